"""
A tiny rig for exact tests of a GRPO trainer: a random 2-layer model whose rollouts are prescribed.

Rollouts are given as a table by prompt. `rollout_func` replays them row by row, in the order in which the trainer asks
for them, and the reward functions read the rewards of the same rows. So completions, lengths and rewards are known,
whatever the model says.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer
from trl_pods.padding import PaddingCutter


VOCABULARY = 128
PAD, EOS, UNKNOWN, FIRST_WORD = 0, 1, 2, 3


def make_tokenizer(words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Knows `w3`, `w4` and so on; `words` take the places of the last of these."""
    names = [f"w{i}" for i in range(FIRST_WORD, VOCABULARY - len(words))] + list(words)
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *names])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_model(seed: int = 0, **settings: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "bos_token_id": None,
    }
    return Qwen2ForCausalLM(Qwen2Config(**(defaults | settings)))


@dataclass
class Group:
    """The prescribed rollouts of one prompt: rewards per function, lengths (end of sequence included), ends."""

    rewards: Sequence[Any]  # one reward per rollout, or a tuple of them with several reward functions
    lengths: Sequence[int] = ()
    ends: Sequence[bool] = ()  # whether a rollout ends in EOS; all do by default
    masks: Sequence[int] = ()  # how many of the first tokens are masked as not the model's, none by default
    logprob: Callable[[int], Any] | None = None  # log-prob of each token of a rollout by its index, or of all alike

    def __post_init__(self) -> None:
        self.lengths = self.lengths or [3] * len(self.rewards)
        self.ends = self.ends or [True] * len(self.rewards)

    def completion(self, index: int) -> list[int]:
        body = [
            FIRST_WORD + (7 * index + position) % (VOCABULARY - FIRST_WORD) for position in range(self.lengths[index])
        ]
        if self.ends[index]:
            body[-1] = EOS
        return body


F1 = Group(rewards=[0.1, 0.9, 0.5, 0.45, 0.0, 1.0, 0.55, 0.6], lengths=[3, 5, 2, 7, 4, 6, 2, 8])


@dataclass
class Script:
    """Replays groups; keeps what reward functions saw and how often a prompt was asked for."""

    groups: Sequence[Group]
    num_functions: int = 1
    calls: list[list[tuple[int, int]]] = field(default_factory=list)  # per reward call: (prompt, rollout) of each row
    rounds: int = 0
    only: dict[int, list[int]] | None = None  # replay these rollouts of each prompt alone (for the shadow of PODS)

    def dataset(self) -> Dataset:
        return Dataset.from_dict(
            {"prompt": [f"w{10 + i} w3 w4" for i in range(len(self.groups))], "number": list(range(len(self.groups)))}
        )

    def rollouts_of(self, prompt: int) -> Sequence[int]:
        return range(len(self.groups[prompt].rewards)) if self.only is None else self.only[prompt]

    def rollout_func(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        self.rounds += 1
        numbers = [int(prompt.split()[0][1:]) - 10 for prompt in prompts]
        offset = _first_index_of_this_process(self, numbers, trainer)
        seen: dict[int, int] = dict(offset)
        output: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "rollout": []}
        use_masks = any(group.masks for group in self.groups)
        if use_masks:
            output["env_mask"] = []
        for number, prompt in zip(numbers, prompts, strict=True):
            group, choice = self.groups[number], self.rollouts_of(number)
            index = choice[seen.get(number, 0) % len(choice)]
            seen[number] = seen.get(number, 0) + 1
            completion = group.completion(index)
            logprob = group.logprob(index) if group.logprob else -0.1
            output["prompt_ids"].append([int(word[1:]) for word in prompt.split()])
            output["completion_ids"].append(completion)
            output["logprobs"].append(logprob if isinstance(logprob, list) else [logprob] * len(completion))
            output["rollout"].append(index)
            if use_masks:
                masked = group.masks[index] if group.masks else 0
                output["env_mask"].append([0] * masked + [1] * (len(completion) - masked))
        return output

    def reward_functions(self) -> list[Callable[..., list]]:
        return [self._reward_function(i) for i in range(self.num_functions)]

    def _reward_function(self, position: int) -> Callable[..., list]:
        def reward(completions, number, rollout, **kwargs):
            if position == 0:
                self.calls.append(list(zip(number, rollout, strict=True)))
            values = [self.groups[n].rewards[r] for n, r in zip(number, rollout, strict=True)]
            return [value[position] for value in values] if self.num_functions > 1 else values

        reward.__name__ = f"f{position + 1}"
        return reward


def _first_index_of_this_process(script: Script, numbers: list[int], trainer: GRPOTrainer) -> dict[int, int]:
    """Where a group starts on an earlier process, the rollouts before those of this one were asked for there."""
    process, first = trainer.accelerator.process_index, numbers[0]
    group_size = len(script.rollouts_of(first))
    return {first: process * len(numbers) % group_size}


class ForwardCounter:
    """Counts rows and widths that enter a model, with and without gradient."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: list[tuple[bool, int, int]] = []  # (with gradient, rows, width)
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        rows, width = kwargs["input_ids"].shape
        self.calls.append((torch.is_grad_enabled(), rows, width))

    def rows(self, with_grad: bool) -> list[int]:
        return [rows for grad, rows, _ in self.calls if grad == with_grad]

    def widths(self) -> set[int]:
        return {width for _, _, width in self.calls}


class Narrow:
    """Makes micro-batches as narrow as those of PODS, for a comparison to the last bit: sums round alike then."""

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        multiple_of = self.args.pad_to_multiple_of
        cutter = PaddingCutter(self.model, self._tokenizer.pad_token_id, multiple_of, full_precision=True)
        return cutter.cut(inputs) if self.model.training else inputs


class NarrowGRPOTrainer(Narrow, GRPOTrainer):
    pass


class LogRecorder(TrainerCallback):
    """Keeps what is logged, and the gradients that the optimizer gets."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []
        self.gradients: list[list[torch.Tensor]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


CONFIG = {
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "gradient_checkpointing": False,
    "shuffle_dataset": False,
    "max_completion_length": 8,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "beta": 0.0,
    "learning_rate": 0.0,
    "loss_type": "dapo",
    "max_steps": 1,
}


N4_M2 = {"num_rollouts": 4, "num_generations": 2, "per_device_train_batch_size": 2}
N8_M4 = {"num_rollouts": 8, "num_generations": 4, "per_device_train_batch_size": 4}
LOGGED = {"log_completions": True, "num_completions_to_print": 0}

# `trl-pods`, wherever it is installed
COMMAND_LINE = [sys.executable, "-c", "import sys; from trl_pods.cli import main; sys.exit(main())"]


def make_config(output_dir: Path, config_class: type = PODSGRPOConfig, **settings: Any) -> GRPOConfig:
    return config_class(output_dir=str(output_dir), **(CONFIG | settings))


def make_trainer(
    output_dir: Path,
    script: Script,
    trainer_class: type = PODSGRPOTrainer,
    config_class: type = PODSGRPOConfig,
    model: torch.nn.Module | None = None,
    trainer_kwargs: dict[str, Any] | None = None,
    **settings: Any,
) -> GRPOTrainer:
    trainer_kwargs = {
        "model": model or make_model(),
        "reward_funcs": script.reward_functions(),
        "train_dataset": script.dataset(),
        "processing_class": make_tokenizer(),
        "rollout_func": script.rollout_func,
    } | (trainer_kwargs or {})
    recorder = LogRecorder()
    trainer = trainer_class(
        args=make_config(output_dir, config_class, **settings), callbacks=[recorder], **trainer_kwargs
    )
    trainer.recorder = recorder
    return trainer


def train(*args: Any, **kwargs: Any) -> GRPOTrainer:
    trainer = make_trainer(*args, **kwargs)
    trainer.train()
    return trainer


def step_logs(trainer: GRPOTrainer) -> list[dict[str, float]]:
    """Logs of optimizer steps, without the summary at the end."""
    return [logs for logs in trainer.recorder.logs if "loss" in logs]


def only_log(trainer):
    (logs,) = step_logs(trainer)
    return logs


def kept_rows(trainer, step=None):
    """Rollout numbers that were trained on, in order, by the completions table of a step, by default the last."""
    table = read_table(trainer, step)
    return [i for i, kept in enumerate(table["kept"]) if kept]


def read_table(trainer, step=None):
    step = trainer.state.global_step if step is None else step
    return pd.read_parquet(f"{trainer.args.output_dir}/completions/completions_{step:05d}.parquet")


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def assert_equal_weights(trainer, other):
    for (name, ours), theirs in zip(weights(trainer).items(), weights(other).values(), strict=True):
        assert torch.equal(ours, theirs), name


def number_of_distinct_words(completion_ids, **kwargs):
    return [float(len(set(ids))) for ids in completion_ids]


def assert_trained_alike(pods, shadow):
    for ours, theirs in zip(step_logs(pods), step_logs(shadow), strict=True):
        assert ours["grad_norm"] > 0
        for key in ("loss", "grad_norm", "entropy"):
            assert ours[key] == theirs[key], key
    assert_equal_weights(pods, shadow)
