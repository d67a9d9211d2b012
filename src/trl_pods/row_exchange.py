"""Kept rows are dealt out anew to the processes, since a group may lie on several of them."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from accelerate.utils import gather_object


Row = TypeVar("Row")


def deal_out(
    rows: Mapping[int, Row], kept: Sequence[int], num_local: int, process: int, num_processes: int
) -> list[Row]:
    """
    Give each process an equal, consecutive share of the kept rows, in global order.

    Process p generated the rows p * num_local .. (p + 1) * num_local - 1 and gets the p-th share of the kept ones.
    Only kept rows that lie on another process than the one they go to are exchanged. All processes must call this with
    the same `kept`.

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

    Returns:
        `list[Row]`: the share of this process.

    Example:

    ```python
    >>> deal_out({0: "a", 3: "d"}, kept=[0, 3], num_local=4, process=0, num_processes=1)
    ['a', 'd']

    ```
    """
    share = len(kept) // num_processes
    moving = {row for position, row in enumerate(kept) if row // num_local != position // share}
    arrived: dict[int, Row] = {}
    if moving:  # known alike to all processes, so that all or none enter the exchange
        for sent in gather_object([{number: row for number, row in rows.items() if number in moving}]):
            arrived.update(sent)
    return [arrived[number] if number in moving else rows[number] for number in kept[process * share :][:share]]
