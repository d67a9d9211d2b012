"""Work on rows in parts, for the memory of one part."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


def chunks(num_rows: int, size: int) -> Iterator[slice]:
    """
    Consecutive parts of `num_rows` rows, each of `size` rows but the last.

    Example:

    ```python
    >>> [list(range(5))[part] for part in chunks(5, 2)]
    [[0, 1], [2, 3], [4]]

    ```
    """
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


class ChunkedRewardModel(nn.Module):
    """
    A reward model that takes so many rows at a time. Rewards do not depend on the rows beside a row.

    Args:
        model (`nn.Module`):
            The reward model; called with tensors of one row per completion, returns an object with `logits`.
        size (`int`):
            Rows to take at a time.

    Example:

    ```python
    >>> model = ChunkedRewardModel(nn.Identity(), 2)
    >>> model.model.forward = lambda x: SimpleNamespace(logits=x.sum(dim=1, keepdim=True))
    >>> model(x=torch.ones(3, 4)).logits[:, 0]
    tensor([4., 4., 4.])

    ```
    """

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__()
        self.model = model
        self.size = size

    def forward(self, **inputs: torch.Tensor) -> Any:
        num_rows = len(next(iter(inputs.values())))
        parts = [
            self.model(**{name: value[part] for name, value in inputs.items()}).logits
            for part in chunks(num_rows, self.size)
        ]
        return SimpleNamespace(logits=torch.cat(parts))
