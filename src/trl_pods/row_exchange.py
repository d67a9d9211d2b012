"""Kept rows are dealt out anew to the processes, since a group may lie on several of them."""

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from accelerate import PartialState


Row = TypeVar("Row")


def deal_out(
    rows: Mapping[int, Row],
    kept: Sequence[int],
    num_local: int,
    process: int,
    num_processes: int,
    before_exchange: Callable[[], object] = lambda: None,
) -> list[Row]:
    """
    Give each process an equal, consecutive share of the kept rows, in global order.

    Process p generated the rows p * num_local .. (p + 1) * num_local - 1 and gets the p-th share of the kept ones.
    A kept row that lies on another process than the one it goes to is sent to that process alone. All processes must
    call this with the same `kept`.

    Args:
        rows (`Mapping[int, Row]`):
            The kept rows of this process by their global number. What moves must be picklable.
        kept (`Sequence[int]`):
            Global numbers of all kept rows, ascending; their count is a multiple of `num_processes`.
        num_local (`int`):
            Number of rows that each process generated.
        process (`int`):
            Number of this process.
        num_processes (`int`):
            Number of processes.
        before_exchange (`Callable[[], object]`, *optional*):
            Called on all processes if anything moves, when what moves is pickled, which may fail on some.

    Returns:
        `list[Row]`: the share of this process.

    Example:

    ```python
    >>> deal_out({0: "a", 3: "d"}, kept=[0, 3], num_local=4, process=0, num_processes=1)
    ['a', 'd']

    ```
    """
    share = len(kept) // num_processes
    routes = {number: (number // num_local, position // share) for position, number in enumerate(kept)}
    moves = {number: (source, target) for number, (source, target) in routes.items() if source != target}
    # Known alike to all processes, so that all or none enter the exchange.
    arrived: Mapping[int, Row] = {}
    if moves:
        arrived = _exchange(rows, moves, process, num_processes, before_exchange)
    return [arrived[number] if number in moves else rows[number] for number in kept[process * share :][:share]]


def _exchange(
    rows: Mapping[int, Any],
    moves: Mapping[int, tuple[int, int]],
    process: int,
    num_processes: int,
    before_exchange: Callable[[], object],
) -> dict[int, Any]:
    """
    The rows that move to this process. `moves` has (source, target) of each row that moves, in ascending order of the
    rows, and so of their sources and of their targets: what goes to, or comes from, one process is adjacent.
    """
    device = PartialState().device  # of the backend: NCCL takes no tensors of the CPU
    outgoing = {number: pickle.dumps(rows[number]) for number, (source, _) in moves.items() if source == process}
    before_exchange()
    sizes = torch.tensor([len(outgoing.get(number, b"")) for number in moves], device=device)
    torch.distributed.all_reduce(sizes)  # each is counted by the source of its row alone
    size_of = dict(zip(moves, sizes.tolist(), strict=True))

    given, taken = [0] * num_processes, [0] * num_processes
    for number, (source, target) in moves.items():
        if source == process:
            given[target] += size_of[number]
        if target == process:
            taken[source] += size_of[number]
    sent = torch.frombuffer(bytearray(b"".join(outgoing.values())), dtype=torch.uint8) if outgoing else torch.empty(0)
    sent = sent.to(device, torch.uint8)
    received = torch.empty(sum(taken), dtype=torch.uint8, device=device)
    torch.distributed.all_to_all_single(received, sent, taken, given)

    incoming = [number for number, (_, target) in moves.items() if target == process]
    parcels = received.cpu().split([size_of[number] for number in incoming])
    return {number: pickle.loads(parcel.numpy().tobytes()) for number, parcel in zip(incoming, parcels, strict=True)}
