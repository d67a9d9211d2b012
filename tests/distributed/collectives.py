"""Notes what a process exchanges with the others."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import distributed_c10d


@dataclass
class Collective:
    """One call. Whatever is called by C++, such as the sum of gradients in DDP, is not seen."""

    name: str
    dtype: str
    sizes: list[int]  # elements that this process gives, by receiver where these differ
    received: int  # bytes that come from other processes
    caller: str  # "package.function" of what exchanges
    taken: list[int] | None = None  # all_to_all_single: elements that this process gets, by sender


_FUNCTIONS = {
    "all_gather": lambda tensors, tensor, **_: (tensor, tensor.nbytes * (len(tensors) - 1)),
    "all_gather_into_tensor": lambda output, tensor, **_: (tensor, output.nbytes - tensor.nbytes),
    "all_reduce": lambda tensor, **_: (tensor, tensor.nbytes),
    "broadcast": lambda tensor, **_: (tensor, tensor.nbytes),
    "reduce_scatter_tensor": lambda output, tensor, **_: (tensor, output.nbytes),
}


def _caller() -> str:
    """The innermost function of trl_pods, TRL or transformers that exchanges, not one that goes before another's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.split(".")[0]
        if module != "trl_pods.process_failures" and package in ("trl_pods", "trl", "transformers"):
            return f"{package}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "other"


@contextmanager
def recorded_collectives() -> Iterator[list[dict[str, Any]]]:
    """
    A list to which the calls of this process are added as they come.

    Gathering and broadcasting of objects shows as what it is made of: the sizes and then the bytes.
    """
    calls: list[dict[str, Any]] = []

    def noting(name: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor | list)]
            tensor, received = _FUNCTIONS[name](*tensors)
            calls.append(asdict(Collective(name, str(tensor.dtype), [tensor.numel()], received, _caller())))
            return function(*args, **kwargs)

        return call

    def noted_all_to_all(output, tensor, output_split_sizes=None, input_split_sizes=None, **kwargs):
        world, rank = distributed_c10d.get_world_size(), distributed_c10d.get_rank()
        given = list(input_split_sizes or [len(tensor) // world] * world)
        taken = list(output_split_sizes or [len(output) // world] * world)
        received = (sum(taken) - taken[rank]) * tensor.element_size()
        calls.append(asdict(Collective("all_to_all_single", str(tensor.dtype), given, received, _caller(), taken)))
        return all_to_all(output, tensor, output_split_sizes, input_split_sizes, **kwargs)

    all_to_all = distributed_c10d.all_to_all_single
    replaced = {name: noting(name, getattr(distributed_c10d, name)) for name in _FUNCTIONS}
    replaced["all_to_all_single"] = noted_all_to_all
    # Functions for objects look up those for tensors in their own module.
    with patch.multiple(distributed_c10d, **replaced), patch.multiple(torch.distributed, **replaced):
        yield calls


def assert_even(by_rank: list[list[dict[str, Any]]]) -> None:
    """All processes made the same calls with tensors of the same sizes, and each got what the others gave it."""
    assert len({len(calls) for calls in by_rank}) == 1, [len(calls) for calls in by_rank]
    for position, calls in enumerate(zip(*by_rank, strict=True)):
        assert len({(call["name"], call["dtype"]) for call in calls}) == 1, (position, calls)
        if calls[0]["name"] == "all_to_all_single":
            given = [[call["sizes"][receiver] for call in calls] for receiver in range(len(calls))]
            assert [call["taken"] for call in calls] == given, (position, calls)
        else:
            assert len({tuple(call["sizes"]) for call in calls}) == 1, (position, calls)
