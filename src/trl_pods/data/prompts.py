"""Prompts as messages: a system message that asks for the layout which the rewards read, and the question."""

import logging
from typing import Any

from datasets import Dataset


logger = logging.getLogger(__name__)

# Each tag on a line of its own: that layout earns the full reward under both sets of format rules.
_LAYOUT = """\
Use exactly this layout, with every tag on its own line:
<think>
your reasoning
</think>
<answer>
your result
</answer>"""

SYSTEM_PROMPT = f"""\
You solve mathematics problems. Work through the problem step by step and check your steps before you settle on a \
result. Then give the result alone, as a number. {_LAYOUT}"""

EXPRESSION_SYSTEM_PROMPT = f"""\
You solve mathematics problems. Work through the problem step by step and check your steps before you settle on a \
result. Then give the result alone, as a number or an expression in LaTeX. {_LAYOUT}"""

CHOICE_SYSTEM_PROMPT = f"""\
You answer multiple-choice questions about science. Work through the question step by step and check your steps \
before you settle on an option. Then give the letter of that option alone. {_LAYOUT}"""


def make_messages(question: str, system_prompt: str | None) -> list[dict[str, str]]:
    """
    A question as chat messages.

    Args:
        question (`str`):
            What the user asks.
        system_prompt (`str`, *optional*):
            System message before it. `None` leaves it out.

    Returns:
        `list[dict[str, str]]`: the messages.

    Example:

    ```python
    >>> make_messages("What is 2 + 2?", None)
    [{'role': 'user', 'content': 'What is 2 + 2?'}]

    ```
    """
    messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*messages, {"role": "user", "content": question}]


def drop_long_prompts(dataset: Dataset, max_prompt_tokens: int | None, tokenizer: str | None) -> Dataset:
    """
    Leave out the problems whose prompt is too long. TRL itself cuts no prompt.

    Args:
        dataset ([`~datasets.Dataset`]):
            Problems with a column `prompt` of messages.
        max_prompt_tokens (`int`, *optional*):
            The longest prompt to keep, in tokens, chat template included. `None` keeps all.
        tokenizer (`str`, *optional*):
            Folder or repository of the hub of the tokenizer that counts, that is, of the policy.

    Returns:
        [`~datasets.Dataset`]: the other problems, in their order.

    Raises:
        ValueError: If there is a limit but no tokenizer, or if no prompt is short enough.
    """
    if max_prompt_tokens is None:
        return dataset
    if tokenizer is None:
        raise ValueError(
            f"max_prompt_tokens={max_prompt_tokens} needs a tokenizer that counts. Set tokenizer to the policy's, for "
            "instance 'Qwen/Qwen2.5-3B-Instruct', or leave max_prompt_tokens out."
        )
    from transformers import AutoTokenizer

    counter = AutoTokenizer.from_pretrained(tokenizer)
    kept = [
        index for index, prompt in enumerate(dataset["prompt"]) if _num_tokens(counter, prompt) <= max_prompt_tokens
    ]
    if not kept:
        raise ValueError(f"max_prompt_tokens={max_prompt_tokens} leaves no problem: every prompt is longer.")
    if len(kept) < len(dataset):
        logger.warning(
            "%d of %d prompts are longer than %d tokens and are left out.",
            len(dataset) - len(kept),
            len(dataset),
            max_prompt_tokens,
        )
    return dataset.select(kept)


def _num_tokens(tokenizer: Any, prompt: list[dict[str, str]]) -> int:
    encoding = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return len(encoding["input_ids"])
