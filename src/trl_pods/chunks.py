"""Work on rows in parts, for the memory of one part."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid


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


def chunks_of_fields(
    fields: dict[str, Any], images: list | None, num_rows: int, size: int
) -> Iterator[dict[str, Any]]:
    """
    What a processor made of rows with images, in the parts of [`chunks`].

    Args:
        fields (`dict[str, Any]`):
            Fields of all rows as `GRPOTrainer` gets them from a processor: a list of token lists, one per row, or
            tensors of patches or pictures, laid out one after the other or padded to one entry per row.
        images (`list` or `None`):
            The images of each row; `None` or an empty list for a row without.
        num_rows (`int`):
            Number of rows.
        size (`int`):
            Rows to a part.

    Raises:
        `NotImplementedError`: for families that cut pictures into tiles, whose fields do not say how many tiles
            belong to a row.

    Example:

    ```python
    >>> grids = torch.tensor([[1, 2, 2], [1, 2, 4]])  # images of 4 and 8 patches
    >>> fields = {"pixel_values": torch.arange(12)[:, None], "image_grid_thw": grids}
    >>> parts = chunks_of_fields(fields, images=[["a"], None, ["b"]], num_rows=3, size=2)
    >>> [part["pixel_values"][:, 0].tolist() for part in parts]
    [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]]

    ```
    """
    num_images = [len(row_images or []) for row_images in images or [None] * num_rows]
    per_token = {name: value for name, value in fields.items() if _is_per_token(value)}
    of_images = {name: torch.as_tensor(np.array(value)) for name, value in fields.items() if name not in per_token}
    pixels = of_images.get("pixel_values")
    if "spatial_shapes" in of_images or (pixels is not None and pixels.ndim == 4 and len(pixels) != sum(num_images)):
        raise NotImplementedError(
            "rollout_chunk_size cannot be had with a model whose processor cuts images into tiles, when transformers "
            "generates. Use rollout_chunk_size=None, or vLLM."
        )
    if "pixel_attention_mask" not in of_images:  # with a mask they are padded to one entry per row
        of_images = split_pixel_values_by_grid({**of_images, "num_images": num_images})
    of_images.pop("num_images", None)
    for part in chunks(num_rows, size):
        part_of_images = of_images if any(num_images[part]) else {}
        rows = {name: value[part] for name, value in (per_token | part_of_images).items()}
        yield unsplit_pixel_values_by_grid(rows)


def _is_per_token(value: Any) -> bool:
    return isinstance(value, list) and isinstance(value[0], list) and isinstance(value[0][0], int)


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
