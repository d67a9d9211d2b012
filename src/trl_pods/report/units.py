"""Seconds in a unit that suits the length of the runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TimeUnit:
    """A unit of time: its name, and how many seconds it is."""

    name: str
    seconds: float

    def text(self, seconds: float) -> str:
        """
        A time in this unit.

        Example:

        ```python
        >>> TimeUnit("min", 60).text(90)
        '1.5 min'

        ```
        """
        return f"{seconds / self.seconds:.3g} {self.name}"


def unit_for(duration: float) -> TimeUnit:
    """
    The unit for runs of so many seconds.

    Args:
        duration (`float`):
            Seconds of the longest time to be shown.

    Example:

    ```python
    >>> [unit_for(duration).name for duration in (90, 1800, 21600)]
    ['s', 'min', 'h']

    ```
    """
    if duration < 300:
        return TimeUnit("s", 1)
    return TimeUnit("min", 60) if duration < 2 * 3600 else TimeUnit("h", 3600)
