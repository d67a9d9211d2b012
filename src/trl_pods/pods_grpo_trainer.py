"""
PODS inside TRL's GRPOTrainer: all that touches TRL's private methods, but for its logs (round_logs.py).

    rows from TRL's sampler: each prompt m times                             prompts x m
      |  _generate_and_score_completions   widen: each prompt n times        prompts x n
      |    TRL prepares prompts, images, environments, tools
      |    _generate                       TRL generates                     prompts x n
      |                                    TRL scores: each reward function once
      |                                    the selector chooses
      |                                    drop, here and in TRL's lists     prompts x m
      |    TRL pads, old and reference log-probs
      |    _calculate_rewards              the kept rewards once more
      |    TRL: advantages, importance-sampling ratios
      |  statistics over all n into TRL's metrics and completions table
      |  _prepare_inputs                   padding cut off each micro-batch
      v
    loss, optimizer                        TRL, untouched

With n = m and in evaluation everything is TRL's; in training the clock runs along.
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
import trl
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from packaging.specifiers import SpecifierSet
from trl import GRPOTrainer
from trl.trainer import grpo_trainer
from trl.trainer.utils import nanstd

from . import checkpoints
from .checkpoints import (
    checkpoint_to_resume,
    delete_stray_flags,
    delete_unfinished,
    rotation_after,
    saving,
    whole_tables,
)
from .chunks import ChunkedRewardModel, chunks, chunks_of_fields
from .merged_weights import base_weights_untouched
from .padding import PER_IMAGE, PaddingCutter
from .process_failures import ProcessFailures
from .reward_deadline import RewardDeadline
from .reward_statistics import NO_SPREAD, advantages_over_all, total_rewards
from .round_logs import RoundLogs
from .round_timer import OptimizerStepCallback, RoundTimer
from .row_exchange import deal_out
from .selectors import resolve_selector, select
from .tool_turns import turns_of_single_rows
from .training_clock import TRAIN_TIME, TrainingClock


logger = get_logger(__name__)

# Releases whose private methods are known; the same range as in the package's dependencies.
SUPPORTED_TRL = SpecifierSet(">=1.10,<1.17")

# Lists with one entry per row that TRL sets on the trainer before it generates. It goes on using the first alone.
_PER_ROW_ATTRIBUTES = {"_batch_environments", "environments", "_sync_tool_dicts", "_async_tool_dicts"}

# TRL lets a step of the engine take so many tokens, and vLLM refuses to run more sequences than that.
_MOST_SEQUENCES = 4096

_PAPER = {
    "title": "Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning",
    "id": "2504.13818",
    # docstyle-ignore
    "citation": """\
@article{xu2025not,
    title        = {{Not All Rollouts are Useful: Down-Sampling Rollouts in LLM Reinforcement Learning}},
    author       = {Yixuan Even Xu and Yash Savani and Fei Fang and J. Zico Kolter},
    year         = 2025,
    eprint       = {arXiv:2504.13818},
}
@article{shao2024deepseekmath,
    title        = {{DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models}},
    author       = {Zhihong Shao and Peiyi Wang and Qihao Zhu and Runxin Xu and Junxiao Song and Mingchuan Zhang and \
Y. K. Li and Y. Wu and Daya Guo},
    year         = 2024,
    eprint       = {arXiv:2402.03300},
}""",
}

if TYPE_CHECKING:
    from trl import GRPOTrainer as _Base
else:
    _Base = object


class _Generated(NamedTuple):
    """What `GRPOTrainer._generate` returns: lists with one entry per row, or `None` for all rows."""

    prompt_ids: list
    completion_ids: list
    tool_mask: list | None
    completions: list
    logprobs: list | None
    extra_fields: Any  # of `rollout_func`: a dictionary, not by row
    images: list | None
    tool_images: list | None


@dataclass(frozen=True)
class _Selection:
    """What was chosen in a round, over the rollouts of all processes."""

    rewards_per_func: torch.Tensor  # (rollouts, reward functions)
    kept: torch.Tensor  # (kept rollouts,) their numbers, ascending
    has_signal: torch.Tensor  # (rollouts,) whether the rewards in the group of each differ enough
    metrics: dict[str, float]
    table: dict[str, Any]  # columns for the completions table: the rollouts of this process

    def of_kept(self, values: torch.Tensor) -> torch.Tensor:
        return values[self.kept.to(values.device)]


@dataclass
class _Round:
    """A round that down-samples, from widening to the logs."""

    rows: list[dict[str, Any]]  # the list that TRL works on: all rollouts of this process, after selection the kept
    attributes: dict[str, Any]  # of the trainer, as the round began
    selection: _Selection | None = None


class PODSMixin(_Base):
    """
    Adds PODS to [`~trl.GRPOTrainer`] or a subclass of it: `class MyPODSTrainer(PODSMixin, MyGRPOTrainer)`.

    What changes: in training each prompt gets `num_rollouts` completions; a selector keeps `num_generations` of them
    before anything is padded or run through a model, and GRPO goes on with these alone. Settings are read from
    [`PODSGRPOConfig`]; with any other config, or none, the trainer does what it did before, and logs the times of a
    round besides.

    A `rollout_func` reads the number of completions that it is asked for from `trainer.num_generations`, as with TRL;
    in training this is then `num_rollouts`, while `trainer.args.num_generations` stays the number kept.
    """

    # Of TRL:
    _batch_environments: list[str | None]
    reward_funcs: list[Any]
    rollout_func: Any
    log_multimodal: bool

    _round: _Round | None = None  # the round under way, if it down-samples
    _failures = ProcessFailures(process=0, num_processes=1)  # until `__init__`, without which tests of TRL build one
    _last_draw: tuple[int, int] = (-1, 0)  # global step of the last selection, and selections since in that step

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if trl.__version__ not in SUPPORTED_TRL:
            raise ImportError(
                f"trl {trl.__version__} is installed; trl_pods works with trl{SUPPORTED_TRL}, as it builds on private "
                f"methods. Install one by `pip install 'trl{SUPPORTED_TRL}'`, or a newer trl_pods."
            )
        with _engine_sized_for_rollouts(self):
            super().__init__(*args, **kwargs)
        accelerator = self.accelerator
        self._failures = ProcessFailures(accelerator.process_index, accelerator.num_processes, self.args.ddp_timeout)
        if self.use_vllm and not self.is_fsdp_enabled:  # with FSDP TRL reads the weights in other ways
            self._sync_without_a_trace()
        if self.rollout_func is not None:
            self.rollout_func = _counting_completions(self.rollout_func)
        self.add_callback(OptimizerStepCallback(self._after_optimizer_step))
        self._add_training_clock()
        if self._chunk_size:
            self._work_in_chunks(self._chunk_size)
        if self._downsamples:
            self._prepare_selection()

    def _prepare_selection(self) -> None:
        """Here, and not in the first round, so that what is wrong is refused before anything is generated."""
        self._selector = resolve_selector(self.args.selector, self.args.selector_kwargs)
        self._selection_columns = self._find_selection_columns()
        if self.log_completions:  # else the room would hold the kept rows of earlier rounds
            for name in self.reward_func_names:
                self._round_logs.check_column(name, f"The reward function {name!r}")
            self._round_logs.make_room()

    @property
    def num_rollouts(self) -> int:
        """Completions generated per prompt in training (n)."""
        return getattr(self.args, "num_rollouts", None) or self.args.num_generations

    @property
    def _downsamples(self) -> bool:
        return self.num_rollouts != self.args.num_generations or self._demands_signal

    @property
    def _demands_signal(self) -> bool:
        names = getattr(self.args, "selection_reward_funcs", None)
        return names is not None or getattr(self.args, "min_reward_std", 0.0) > 0

    @property
    def _chunk_size(self) -> int | None:
        return getattr(self.args, "rollout_chunk_size", None)

    def _find_selection_columns(self) -> list[int]:
        """Positions of the reward functions that the rule looks at."""
        wanted = self.args.selection_reward_funcs
        unknown = set(wanted or []) - set(self.reward_func_names)
        if unknown:
            raise ValueError(
                f"selection_reward_funcs={wanted} names {sorted(unknown)}, which are not among the reward functions. "
                f"Use some of {self.reward_func_names}."
            )
        columns = [i for i, name in enumerate(self.reward_func_names) if wanted is None or name in wanted]
        if wanted is not None and not self.reward_weights[columns].any():
            raise ValueError(
                f"selection_reward_funcs={wanted} names functions whose weights are all 0 in "
                f"reward_weights={self.reward_weights.tolist()}, so that no group would have a signal. Give one of "
                "them a weight other than 0, for instance 1.0."
            )
        return columns

    @cached_property
    def _timer(self) -> RoundTimer:
        return RoundTimer(self.accelerator.device)

    @cached_property
    def _round_logs(self) -> RoundLogs:
        return RoundLogs(self)

    @cached_property
    def _padding(self) -> PaddingCutter:
        full_precision = self.model.dtype == torch.float32 and self.accelerator.mixed_precision == "no"
        return PaddingCutter(
            self.model, self._tokenizer.pad_token_id, self.args.pad_to_multiple_of, full_precision=full_precision
        )

    @cached_property
    def _reward_deadline(self) -> RewardDeadline | None:
        seconds = getattr(self.args, "reward_timeout", None)
        return None if seconds is None else RewardDeadline(seconds, self.accelerator.process_index)

    # The round

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        # TRL gathers by these after what runs on one process: environments, tools, `rollout_func`, reward functions.
        with self._failures.shared((self.accelerator, "gather"), (grpo_trainer, "gather")):
            return self._run_round(inputs)

    def _run_round(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return self._evaluate_completions(inputs)
        with self._timer.round():
            if self._downsamples:
                output = self._down_sample(inputs)
            else:
                output = super()._generate_and_score_completions(inputs)
        for phase, seconds in self._timer.seconds.items():
            self._metrics["train"][f"time/{phase}"].append(seconds)
        return output

    def _evaluate_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._downsamples:
            self._round_logs.log_evaluation(len(inputs) * self.accelerator.num_processes)
        return output

    def _down_sample(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._round = round_ = _Round(rows=self._widen(inputs), attributes=dict(vars(self)))
        # Images of all rollouts are logged below. TRL gathers those of the kept rollouts on the processes that have
        # any, and selection may leave some processes without.
        log_multimodal, self.log_multimodal = self.log_multimodal, False
        try:
            output = super()._generate_and_score_completions(round_.rows)
        finally:
            self._round, self.log_multimodal = None, log_multimodal
        if round_.selection is None:
            raise RuntimeError("The installed TRL does not generate by `GRPOTrainer._generate`, as trl_pods expects.")
        _check_output(output, num_kept=len(inputs))
        if self.args.advantage_statistics == "all" or self._demands_signal:
            self._adjust_advantages(output, round_.selection, num_local=len(inputs))
        selection = round_.selection
        self._round_logs.log_rewards(selection.rewards_per_func, selection.metrics)
        if self.log_completions:
            self._round_logs.log_completions(selection.rewards_per_func, selection.kept, selection.table)
        return output

    def _widen(self, inputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """
        Rows for the rollouts that this process generates, each with objects of its own, as TRL's loader makes them:
        TRL, a `rollout_func` and environments write into them.

        A prompt comes as m adjacent rows, perhaps on several processes. The row at slot s among all rows stands for
        the rollouts s * n // m .. (s + 1) * n // m - 1, so that each process knows its own without asking the others.
        """
        n, m = self.num_rollouts, self.args.num_generations
        first_slot = self.accelerator.process_index * len(inputs)
        return [
            copy.deepcopy(row)
            for slot, row in enumerate(inputs, start=first_slot)
            for _ in range((slot + 1) * n // m - slot * n // m)
        ]

    def _generate(self, prompts: list) -> tuple:
        self._failures.meet()  # vLLM and ZeRO-3 start with collectives of their own
        if self._round is None:
            with self._timer.phase("generate"):
                return super()._generate(prompts)
        self._check_attributes(self._round, prompts)
        with self._timer.phase("generate"), self._generating_rollouts():
            outputs = super()._generate(prompts)
        return self._keep_selected(self._round, prompts, _checked(outputs, num_rows=len(prompts)))

    def _generate_single_turn(
        self, prompt_ids: list, images: list | None, multimodal_fields: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[list, list | None]:
        generate = super()._generate_single_turn
        if self.use_transformers_continuous_batching:
            with _left_in_its_mode(self.model):
                return generate(prompt_ids, images, multimodal_fields, *args, **kwargs)
        if self._chunk_size is None or self.use_vllm or len(prompt_ids) <= self._chunk_size:
            return generate(prompt_ids, images, multimodal_fields, *args, **kwargs)
        rows = chunks(len(prompt_ids), self._chunk_size)
        fields = chunks_of_fields(multimodal_fields, images, len(prompt_ids), self._chunk_size)
        completion_ids: list = []
        for part, fields_of_part in zip(rows, fields, strict=True):
            images_of_part = images and images[part]
            of_part = dict(kwargs)
            if kwargs.get("has_tool_images") and "image_grid_thw" in multimodal_fields.keys() - fields_of_part.keys():
                of_part["has_tool_images"] = False  # for which TRL passes a field that Qwen takes with pictures alone
            completion_ids += generate(prompt_ids[part], images_of_part, fields_of_part, *args, **of_part)[0]
        return completion_ids, None  # transformers returns no log-probs

    def _sync_without_a_trace(self) -> None:
        sync_weights = self.vllm_generation.sync_weights

        def sync() -> None:
            with base_weights_untouched(self.model):
                sync_weights()

        self.vllm_generation.sync_weights = sync

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.use_vllm and self.vllm_mode == "server"):
            return super()._tool_call_loop(*args, **kwargs)
        with turns_of_single_rows(self.vllm_generation):
            return super()._tool_call_loop(*args, **kwargs)

    def _work_in_chunks(self, size: int) -> None:
        self.reward_funcs = [
            ChunkedRewardModel(function, size) if isinstance(function, torch.nn.Module) else function
            for function in self.reward_funcs
        ]

    @contextmanager
    def _generating_rollouts(self) -> Iterator[None]:
        """TRL divides by `num_generations` where it sends a prompt once and asks for a group of completions."""
        self.num_generations = self.num_rollouts
        try:
            yield
        finally:
            self.num_generations = self.args.num_generations

    def _check_attributes(self, round_: _Round, prompts: list) -> None:
        """Refuse a list with one entry per rollout that was set since the round began and that is not known."""
        for name, value in vars(self).items():
            is_new = isinstance(value, list) and value is not round_.attributes.get(name)
            shrinks = value is prompts or value is round_.rows
            if is_new and len(value) == len(prompts) and not shrinks and name not in _PER_ROW_ATTRIBUTES:
                raise RuntimeError(
                    f"`{name}` of the trainer holds one entry for each of the {len(value)} rollouts: this release of "
                    "TRL, or a subclass, keeps a list by row that trl_pods does not know, and it would no longer "
                    "match the rows after selection."
                )

    def _keep_selected(self, round_: _Round, prompts: list, generated: _Generated) -> _Generated:
        """Score and select; return the kept rollouts, and shrink the lists that TRL goes on using in place."""
        _merge_extra_fields(round_.rows, generated.extra_fields)
        # A copy of the prompts, as a reward function may hold on to its lists.
        rewards_per_func = self._calculate_rewards(
            round_.rows, list(prompts), generated.completions, generated.completion_ids
        )
        self._round_logs.pad_columns(len(prompts))
        with self._timer.phase("select"):
            round_.selection = self._select(round_.rows, rewards_per_func, list(prompts), generated)
            kept = self._drop_others(round_, round_.selection.kept.tolist(), prompts, generated)
            self._failures.meet()  # what a process was dealt may fail to be unpickled there
            self._failures.settle()
        return kept

    def _drop_others(self, round_: _Round, kept: list[int], prompts: list, generated: _Generated) -> _Generated:
        """Return the kept rollouts of this process, and leave these in `prompts`, the rows and the environments."""
        num_local, process = len(prompts), self.accelerator.process_index
        environments: Any = self._batch_environments if self.environment_factories is not None else None
        columns: list[Any] = [prompts, round_.rows, environments, *generated._replace(extra_fields=None)]
        records = list(zip(*(column or [None] * num_local for column in columns), strict=True))
        mine = {number: records[number % num_local] for number in kept if number // num_local == process}
        dealt = deal_out(mine, kept, num_local, process, self.accelerator.num_processes, self._failures.meet)
        prompts[:], round_.rows[:], environments, *columns = zip(*dealt, strict=True)
        if self.environment_factories is not None:
            self._batch_environments = list(environments)
        return _completed(_Generated(*map(_column, columns)), round_.rows)

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list, completions: list, completion_ids_list: list
    ) -> torch.Tensor:
        if self._round is not None and self._round.selection is not None:  # TRL's call: nothing is scored again
            return self._round.selection.of_kept(self._round.selection.rewards_per_func)
        with self._rewards_in_time(), self._timer.phase("reward"):
            rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._round is None:
            self._failures.settle()
            return rewards_per_func
        return self._without_infinite(rewards_per_func)

    @contextmanager
    def _rewards_in_time(self) -> Iterator[None]:
        deadline, failures = self._reward_deadline, self._failures
        if deadline is None:
            yield
            return
        failures.meet()  # log-probs may come before: the time of all counts from here
        gather = grpo_trainer.gather  # of the rewards; a reward function may gather by the accelerator

        def stop_and_gather(rewards: torch.Tensor) -> Any:
            deadline.stop()
            return gather(rewards)

        reason = f"finished scoring within reward_timeout={deadline.seconds:g} s"
        with (
            patch.object(grpo_trainer, "gather", stop_and_gather),
            failures.limit(deadline.seconds_for_others, reason),
            deadline.watch(", ".join(self.reward_func_names)),
        ):
            yield

    def _without_infinite(self, rewards_per_func: torch.Tensor) -> torch.Tensor:
        """An infinite reward would be the extreme that selection seeks and make NaN of the group: no score instead."""
        infinite = rewards_per_func.isinf()
        if not infinite.any():
            return rewards_per_func
        names = [name for name, column in zip(self.reward_func_names, infinite.any(dim=0), strict=True) if column]
        logger.warning(
            f"The reward functions {names} returned an infinite reward for {int(infinite.any(dim=1).sum())} of "
            f"{len(infinite)} rollouts. These rollouts count as unscorable: they are kept last and push nothing."
        )
        return rewards_per_func.masked_fill(infinite.any(dim=1, keepdim=True), torch.nan)

    def _completion_lengths(self, completion_ids: list, tool_mask: list | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Generated tokens of all rollouts, and whether each was cut off before its end (both as TRL counts)."""
        # Before trl 1.14 the tokenizer's token alone ends a completion.
        eos_token_ids = getattr(self, "eos_token_ids", [self._tokenizer.eos_token_id])
        ends = [*eos_token_ids, self._tokenizer.pad_token_id]  # no set: a tensor's item would not be found in it
        counts = [len(ids) for ids in completion_ids] if tool_mask is None else [int(sum(m)) for m in tool_mask]
        truncated = [ids[-1] not in ends for ids in completion_ids]
        local = torch.tensor([counts, truncated], device=self.accelerator.device).T.contiguous()
        lengths, truncated_all = self.accelerator.gather(local).cpu().unbind(dim=1)
        return lengths, truncated_all.bool()

    def _select(
        self, rows: list[dict[str, Any]], rewards_per_func: torch.Tensor, prompts: list, generated: _Generated
    ) -> _Selection:
        """Choose among the rollouts of all processes; every process gets the same."""
        n = self.num_rollouts
        lengths, truncated = self._completion_lengths(generated.completion_ids, generated.tool_mask)
        # In float64 on the CPU, so that the choice does not depend on the device.
        rewards_all = rewards_per_func.cpu().double()  # in this order: some devices have no float64
        # A function of weight 0 is there for the logs: it must not make a score of 0 out of none.
        looked_at = [i for i in self._selection_columns if self.reward_weights[i] != 0] or self._selection_columns
        totals = total_rewards(rewards_all[:, looked_at], self.reward_weights[looked_at])
        if self.mask_truncated_completions:  # they get no gradient
            totals = totals.masked_fill(truncated, torch.nan)
        indices = self._on_main_process(
            lambda: select(
                self._selector,
                totals.view(-1, n),
                self.args.num_generations,
                selector_kwargs=self.args.selector_kwargs,
                rewards_per_func=rewards_all.view(-1, n, rewards_all.shape[1]),
                completion_lengths=lengths.view(-1, n),
                generator=self._selection_generator(),
            )
        )
        kept = (indices + n * torch.arange(len(indices))[:, None]).flatten()
        has_signal = nanstd(totals.view(-1, n), dim=1) > max(self.args.min_reward_std, NO_SPREAD)
        metrics = {
            "pods/no_signal": 1 - has_signal.double().mean().item(),
            "pods/kept_length": lengths[kept].double().mean().item(),
            "pods/ineligible": totals.isnan().double().mean().item(),
        }
        table = {}
        if self.log_completions:
            table = self._round_logs.table_columns(prompts, generated, _dataset_images(rows))
        return _Selection(rewards_per_func, kept, has_signal.repeat_interleave(n), metrics, table)

    def _on_main_process(self, choose: Callable[[], torch.Tensor]) -> torch.Tensor:
        """One process chooses for all, since a rule may be stochastic."""
        chosen: list[Any] = [choose() if self.accelerator.is_main_process else None]
        self._failures.meet()
        broadcast_object_list(chosen)
        return chosen[0]

    def _selection_generator(self) -> torch.Generator:
        """Random numbers that depend on the seed and the place in training alone: a resumed run draws the same."""
        step, draws = self._last_draw
        draws = draws + 1 if step == self.state.global_step else 0
        self._last_draw = (self.state.global_step, draws)
        seed = random.Random(f"{self.args.seed} {self.state.global_step} {draws}").getrandbits(63)
        return torch.Generator().manual_seed(seed)

    # Micro-batches

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        downsamples = self.model.training and self.num_rollouts != self.args.num_generations
        inputs = super()._prepare_inputs(generation_batch)
        # Each time anew: the buffer of TRL, which is read in every iteration over a round, stays as it is.
        return self._padding.cut(inputs) if downsamples else inputs

    # Checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As [`~transformers.Trainer.train`]; `resume_from_checkpoint=True` is the last checkpoint that is whole."""
        folder = Path(self.args.output_dir)
        with self._failures.shared((checkpoints, "gather_object")):
            checkpoint = checkpoint_to_resume(resume_from_checkpoint, folder)
        if self.args.should_save:
            delete_stray_flags(folder)
        return super().train(checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial))
        checkpoint = folder / f"checkpoint-{self.state.global_step}"
        with rotation_after(self):
            with self._failures.shared():
                self._failures.meet()  # none writes what was called for by a signal
                with saving(checkpoint) if self.args.should_save else nullcontext():
                    self._failures.meet()  # what was there has gone
                    super()._save_checkpoint(model, trial)
                    self._failures.meet()  # all have written
            if self.args.should_save and self.args.save_total_limit:
                delete_unfinished(folder)

    # The model card

    @property
    def _tag_names(self) -> list[str]:
        return [*super()._tag_names, "pods"] if self._downsamples else super()._tag_names

    @property
    def _name(self) -> str:
        return "PODS" if self._downsamples else super()._name

    @property
    def _paper(self) -> dict[str, str]:
        return _PAPER if self._downsamples else super()._paper

    # Metrics and logs

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        logs[TRAIN_TIME] = self.training_clock.read()  # here, and not by the clock, for trackers that come before it
        # TRL writes the table of the last step once more after its checkpoint.
        with whole_tables(Path(self.args.output_dir) / "completions"):
            super().log(logs, *args, **kwargs)

    def _adjust_advantages(self, output: dict[str, Any], selection: _Selection, num_local: int) -> None:
        """Statistics over all rollouts and 0 in groups without signal, as configured, here and in TRL's log."""
        first = self.accelerator.process_index * num_local
        logged = self._round_logs.kept_advantages(len(selection.kept))  # of all processes
        if self.args.advantage_statistics == "all":
            logged = selection.of_kept(
                advantages_over_all(
                    selection.rewards_per_func, self.reward_weights, self.num_rollouts, self.scale_rewards
                )
            )
            output["advantages"] = logged[first:][:num_local]
        if self._demands_signal:
            has_signal = selection.of_kept(selection.has_signal)
            output["advantages"] = _by_row(output["advantages"], has_signal[first:][:num_local])
            logged = _by_row(logged, has_signal)
        self._logs["advantages"].extend(logged.tolist())

    def _log_completion_extra(self, column: str, values: list) -> None:
        if self._downsamples:
            self._round_logs.check_column(column, f"log_extra({column!r}, ...)")
        super()._log_completion_extra(column, values)

    # Clocks

    @property
    def training_clock(self) -> TrainingClock:
        """Seconds of training so far, `training_clock.read()`, without evaluation and saving."""
        # Looked up, since transformers may replace it by a new one when training resumes.
        return next(clock for clock in self.callback_handler.callbacks if isinstance(clock, TrainingClock))

    def _add_training_clock(self) -> None:
        if not any(isinstance(callback, TrainingClock) for callback in self.callback_handler.callbacks):
            self.add_callback(TrainingClock())
        eval_minutes = getattr(self.args, "eval_minutes", None)
        if eval_minutes is not None and self.eval_dataset is None:
            raise ValueError(
                f"eval_minutes={eval_minutes} is set but there is no eval_dataset. Pass one, or use eval_minutes=None."
            )

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with self._timer.phase("score"):  # within a round: old and reference log-probs
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._timer.update():
            loss = super().training_step(*args, **kwargs)
        if not self.accelerator.sync_gradients:
            self._log_update_time()
        return loss

    def _after_optimizer_step(self) -> None:
        self._timer.optimizer_stepped()
        self._log_update_time()

    def _log_update_time(self) -> None:
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:  # the last of its round
            self._metrics["train"]["time/update"].append(self._timer.pop_update())


class PODSGRPOTrainer(PODSMixin, GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] with down-sampling of rollouts (PODS, arXiv 2504.13818).

    Of `num_rollouts` completions per prompt, all scored, a selector keeps the `num_generations` whose rewards vary
    most; everything after that is GRPO on the kept ones. Arguments are those of [`~trl.GRPOTrainer`]; `args` is a
    [`PODSGRPOConfig`]. A [`~trl.GRPOConfig`], or `None`, gives plain GRPO, and so does `num_rollouts` equal to
    `num_generations`, to the last bit.

    TRL's metrics of rewards, completions and tokens describe all rollouts; those of the update (`kl`, `entropy`,
    `clip_ratio/*`, `sampling/*`) the kept ones. Logged besides: `pods/kept_reward`, `pods/kept_reward_std`,
    `pods/kept_length` (tokens), `pods/ineligible` (share of rollouts without a usable score), `pods/no_signal` (share
    of groups in which what the rule looks at does not differ enough), and the seconds of a round: `time/generate`,
    `time/reward`, `time/select`, `time/score` (old and reference log-probs), `time/update`. `time/train` is the
    seconds of training so far, without evaluation and saving ([`~trl_pods.training_clock.TrainingClock`]).

    Example:

    ```python
    >>> from tempfile import mkdtemp
    >>> from trl_pods import PODSGRPOConfig, PODSGRPOTrainer
    >>> from trl_pods.data.addition import addition_reward, embedded_policy_path, load_addition

    >>> trainer = PODSGRPOTrainer(
    ...     model=str(embedded_policy_path()),
    ...     reward_funcs=addition_reward,
    ...     args=PODSGRPOConfig(
    ...         output_dir=mkdtemp(),
    ...         num_rollouts=16,
    ...         num_generations=4,
    ...         per_device_train_batch_size=8,
    ...         max_completion_length=4,
    ...         max_steps=1,
    ...         save_strategy="no",
    ...         report_to="none",
    ...         use_cpu=True,
    ...         bf16=False,
    ...     ),
    ...     train_dataset=load_addition("train"),
    ... )
    >>> trainer.train().global_step  # doctest: +ELLIPSIS
    {'train_runtime': ...}
    1

    ```
    """


@contextmanager
def _engine_sized_for_rollouts(trainer: PODSMixin) -> Iterator[None]:
    """
    Let `GRPOTrainer.__init__` build its vLLM engine for all rollouts of a round.

    TRL sizes it for the rows that are trained on; the n / m times as many requests of a round would then run in n / m
    waves.
    """
    build_engine = grpo_trainer.VLLMGeneration

    def build_wider_engine(*args: Any, max_num_seqs: int, **kwargs: Any) -> Any:
        wider = max_num_seqs * trainer.num_rollouts // trainer.args.num_generations
        max_num_seqs = max(max_num_seqs, min(wider, _MOST_SEQUENCES))
        return build_engine(*args, max_num_seqs=max_num_seqs, **kwargs)

    grpo_trainer.VLLMGeneration = build_wider_engine
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = build_engine


@contextmanager
def _left_in_its_mode(model: torch.nn.Module) -> Iterator[None]:
    """TRL's continuous batching sets the model to training, in which it would go through the rest of an evaluation."""
    was_training = model.training
    try:
        yield
    finally:
        if not was_training:
            model.eval()


def _counting_completions(rollout_func: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Refuse too few or too many completions here, before TRL gathers what is to be equally long everywhere."""

    @wraps(rollout_func)
    def counted(prompts: list, *args: Any, **kwargs: Any) -> dict[str, Any]:
        num_prompts = len(prompts)
        output = rollout_func(prompts, *args, **kwargs)
        for name in ("prompt_ids", "completion_ids", "logprobs"):
            column = output.get(name)
            if column is not None and len(column) != num_prompts:
                raise RuntimeError(
                    f"rollout_func returned {len(column)} `{name}` for {num_prompts} prompts. Return one entry per "
                    "prompt: a prompt comes as often as completions of it are asked for."
                )
        return output

    return counted


def _checked(outputs: tuple, num_rows: int) -> _Generated:
    """What TRL generated, in lists that are not TRL's, and are lists also where a `rollout_func` returns tensors."""
    if len(outputs) != len(_Generated._fields):
        raise RuntimeError(
            f"`GRPOTrainer._generate` of the installed TRL returns {len(outputs)} values; trl_pods knows "
            f"{len(_Generated._fields)}. Install a TRL that trl_pods supports."
        )
    generated = _Generated(*outputs)
    by_row = {name: column for name, column in generated._asdict().items() if name != "extra_fields"}
    columns: dict[str, Any] = {name: list(column) for name, column in by_row.items() if column is not None}
    for name, column in columns.items():
        if column and len(column) != num_rows:
            raise RuntimeError(
                f"`{name}` has {len(column)} entries for {num_rows} rollouts: this release of TRL, a subclass or a "
                "`rollout_func` generates in another shape than trl_pods knows, and going on would misalign them."
            )
    return generated._replace(**columns)


def _column(values: tuple) -> Any:
    """Of the rows dealt to a process, which may have come from one with values or from one without."""
    return None if all(value is None for value in values) else list(values)


def _completed(kept: _Generated, rows: list[dict[str, Any]]) -> _Generated:
    """What was generated as TRL takes it, where some rows have no value, or none has."""
    images, tool_mask = kept.images or [], kept.tool_mask
    if tool_mask:  # a `rollout_func` may give masks on some processes only
        masks = zip(kept.completion_ids, tool_mask, strict=True)
        tool_mask = [[1] * len(ids) if mask is None else mask for ids, mask in masks]
    return kept._replace(
        # Processors take an empty list where a row has no images, but not the `None` that TRL gives them.
        images=[row_images or [] for row_images in images] if any(images) else _dataset_images(rows),
        tool_mask=tool_mask,
        tool_images=kept.tool_images or [],
        extra_fields={},  # they are in the rows already
    )


def _check_output(output: dict[str, Any], num_kept: int) -> None:
    for name, value in output.items():
        is_by_row = isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.ndim > 0)
        if is_by_row and name not in PER_IMAGE and len(value) != num_kept:
            raise RuntimeError(
                f"`{name}` has {len(value)} entries for {num_kept} kept rollouts: this release of TRL, or a subclass, "
                "computes something by row that trl_pods does not know, and going on would misalign it."
            )


def _by_row(values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The product, of values of shape (B,) or, as subclasses may have advantages, (B, T)."""
    return values * factors.to(values).view(-1, *[1] * (values.ndim - 1))


def _merge_extra_fields(rows: list[dict[str, Any]], extra_fields: dict[str, Any]) -> None:
    """Give reward functions the further fields of a `rollout_func`: one value per row, or one for all."""
    for name, values in extra_fields.items():
        per_row = values if isinstance(values, list) else [values] * len(rows)
        for row, value in zip(rows, per_row, strict=False):
            row[name] = value


def _dataset_images(rows: list[dict[str, Any]]) -> list | None:
    """The images of the data set, where generation returns none: TRL would put back those of all rollouts."""
    if "images" in rows[0]:
        images = [row.get("images") for row in rows]
    elif "image" in rows[0]:
        images = [[row["image"]] if row.get("image") is not None else None for row in rows]
    else:
        return None
    return None if all(row_images == [] for row_images in images) else images
