"""The text of a completion, whichever of TRL's two shapes it comes in."""

from collections.abc import Mapping, Sequence
from typing import Any


Completion = str | Sequence[Mapping[str, Any]]


def completion_text(completion: Completion) -> str:
    """
    Text that the model wrote last.

    Args:
        completion (`str` or `list[dict]`):
            Plain text, or a list of chat messages. Of messages the last one by the assistant counts (the last of all
            if none is marked as such); its content may be a string, a list of blocks or `None`.

    Returns:
        `str`: The text, `""` where there is none. Of content blocks, the text blocks joined.

    Example:

    ```python
    >>> completion_text([{"role": "assistant", "content": [{"type": "text", "text": "18"}]}])
    '18'

    ```
    """
    if isinstance(completion, str):
        return completion
    by_assistant = [message for message in completion if message.get("role") == "assistant"]
    messages = by_assistant or list(completion)
    return _content_text(messages[-1].get("content")) if messages else ""


def _content_text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(block.get("text") or "" for block in content if block.get("type") == "text")
