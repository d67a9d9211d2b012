r"""
Rewards for the layout of a completion, by the rules of the two programs behind the PODS paper
(https://huggingface.co/papers/2504.13818).

| program | format | tags |
| --- | --- | --- |
| single GPU | [`graded_format_reward`] | [`tag_count_reward`] |
| multi GPU | [`strict_format_reward`] | [`strict_tag_count_reward`] |

A completion that puts each tag on a line of its own, with the answer block straight after the think block and nothing
around them, earns 1.0 from all four.
"""

import re
from collections.abc import Sequence
from typing import Any

from .completions import Completion, completion_text


_GRADED_JUNCTION = re.compile(r"</think>[ \n]?<answer>")
_STRICT_JUNCTION = "\n</think>\n<answer>\n"
_STRICT_END = re.compile(r"\n</answer>(?=\n|\Z)")
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_TAGS_ON_THEIR_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
_COST_PER_EXTRA_CHARACTER = 0.01


def graded_format_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    r"""
    Reward function of the single-GPU program for a think block directly followed by an answer block.

    With `e` characters before and after the two blocks it is `max(0, 1 - 0.01 e)`; without the blocks it is 0. At most
    one space or newline may stand between them. The stretch from the first `<think>` to the last `</answer>` is free:
    more tags in it cost nothing here, but they do in [`tag_count_reward`].

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or as chat messages.
        **kwargs:
            What else the trainer passes. Not used.

    Returns:
        `list[float]`: Values from 0.0 to 1.0.

    Example:

    ```python
    >>> from trl_pods.rewards import graded_format_reward

    >>> blocks = "<think>9 * 2</think><answer>18</answer>"
    >>> graded_format_reward([blocks, blocks + "0123456789", "18"])
    [1.0, 0.9, 0.0]

    ```
    """
    return [_graded_format(completion_text(completion)) for completion in completions]


def tag_count_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    r"""
    Reward function of the single-GPU program for tags: 0.25 for each of the four tags that occurs exactly once.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or as chat messages.
        **kwargs:
            What else the trainer passes. Not used.

    Returns:
        `list[float]`: Multiples of 0.25 from 0.0 to 1.0.

    Example:

    ```python
    >>> from trl_pods.rewards import tag_count_reward

    >>> tag_count_reward(["<think>9 * 2</think>", "<answer><answer>18</answer>"])
    [0.5, 0.25]

    ```
    """
    return [_share_occurring_once(completion_text(completion), _TAGS) for completion in completions]


def strict_format_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    r"""
    Reward function of the multi-GPU program for the exact layout: all or nothing.

    The completion has to start with a think block and go on with an answer block, each tag on a line of its own and no
    blank line between the blocks. Text after the line of the closing answer tag does not matter. Blank lines inside a
    block belong to its content.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or as chat messages.
        **kwargs:
            What else the trainer passes. Not used.

    Returns:
        `list[float]`: 1.0 or 0.0 each.

    Example:

    ```python
    >>> from trl_pods.rewards import strict_format_reward

    >>> strict_format_reward(["<think>\n9 * 2\n</think>\n<answer>\n18\n</answer>", "<answer>\n18\n</answer>"])
    [1.0, 0.0]

    ```
    """
    return [_strict_format(completion_text(completion)) for completion in completions]


def strict_tag_count_reward(completions: Sequence[Completion], **kwargs: Any) -> list[float]:
    r"""
    Reward function of the multi-GPU program for tags: 0.25 for each tag that stands exactly once next to its newline.

    Wanted are a newline after `<think>`, one on either side of `</think>` and of `<answer>`, and one before
    `</answer>`.

    Args:
        completions (`list[str]` or `list[list[dict]]`):
            Completions, as plain text or as chat messages.
        **kwargs:
            What else the trainer passes. Not used.

    Returns:
        `list[float]`: Multiples of 0.25 from 0.0 to 1.0.

    Example:

    ```python
    >>> from trl_pods.rewards import strict_tag_count_reward

    >>> strict_tag_count_reward(["<think>\n9 * 2\n</think>\n<answer>\n18\n</answer>", "<think>\n9 * 2</think>"])
    [1.0, 0.25]

    ```
    """
    return [_share_occurring_once(completion_text(completion), _TAGS_ON_THEIR_LINES) for completion in completions]


def _graded_format(text: str) -> float:
    # From the first opening to the last closing tag: what stands between them is free.
    start, end = text.find("<think>"), text.rfind("</answer>")
    if start < 0 or end < 0 or not _GRADED_JUNCTION.search(text, start, end):
        return 0.0
    num_extra = start + len(text) - (end + len("</answer>"))
    return max(0.0, 1.0 - _COST_PER_EXTRA_CHARACTER * num_extra)


def _strict_format(text: str) -> float:
    opening = "<think>\n"
    junction = text.find(_STRICT_JUNCTION, len(opening))
    if not text.startswith(opening) or junction < 0:
        return 0.0
    return float(_STRICT_END.search(text, junction + len(_STRICT_JUNCTION)) is not None)


def _share_occurring_once(text: str, marks: tuple[str, ...]) -> float:
    return sum(text.count(mark) == 1 for mark in marks) / len(marks)
