"""A tokenizer for conversations with tools, of one token a byte."""

import importlib.resources

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
MARKS += ["<tool_response>", "</tool_response>", "<think>", "</think>"]


def chat_template(family: str) -> str:
    """The chat template of a family that TRL can call tools with."""
    return (importlib.resources.files("trl") / "chat_templates" / f"{family}.jinja").read_text()


def make_byte_tokenizer(*further_marks: str) -> PreTrainedTokenizerFast:
    """One token a byte, and one for each of the marks of a conversation."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, padding_side="left")
    marks = [*MARKS, *further_marks]
    tokenizer.add_tokens([AddedToken(mark, special=mark.startswith("<|"), normalized=False) for mark in marks])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    return tokenizer
