"""
TRL's logs of a round that down-samples: metrics of rewards and the completions table, over all rollouts.

TRL fills them with the kept rollouts, which are extremes by design and say nothing about progress.
"""

from collections import defaultdict, deque
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import trl
from accelerate.utils import gather_object
from packaging.version import Version
from trl.trainer import grpo_trainer
from trl.trainer.utils import nanstd

from .reward_statistics import reward_std, total_rewards


if TYPE_CHECKING:
    from .pods_grpo_trainer import PODSMixin, _Generated

# Before 1.15 TRL's completions table shows prompts and completions decoded, also where they are lists of messages.
_LOGS_TEXTS = Version(trl.__version__) < Version("1.15")

# Column of the completions table that says which rollouts were trained on.
KEPT_COLUMN = "kept"


class RoundLogs:
    """
    The metrics (`_metrics`) and the table (`_logs`) of a trainer, in rounds that down-sample.

    Args:
        trainer ([`~trl_pods.pods_grpo_trainer.PODSMixin`]):
            The trainer.
    """

    def __init__(self, trainer: "PODSMixin") -> None:
        self._trainer = trainer

    def make_room(self) -> None:
        """TRL's logs hold the rows of one round; a round that down-samples has n / m times as many."""
        trainer = self._trainer
        size = trainer.args.generation_batch_size * trainer.num_rollouts // trainer.args.num_generations
        for name, log in trainer._logs.items():
            is_by_column = isinstance(log, defaultdict)
            trainer._logs[name] = defaultdict(lambda: deque(maxlen=size)) if is_by_column else deque(maxlen=size)

    def check_column(self, column: str, asked_by: str) -> None:
        """
        Refuse the name of a column of our own.

        Args:
            column (`str`):
                Name of a column.
            asked_by (`str`):
                What would put it into the table.

        Raises:
            ValueError: If it is one of our own.
        """
        if column == KEPT_COLUMN:
            raise ValueError(
                f"{asked_by} takes a name that the completions table uses for the rollouts trained on. Use another "
                f"one, for instance 'my_kept'."
            )

    def pad_columns(self, num_rows: int) -> None:
        """
        Columns that reward functions logged on other processes only; TRL would fill them up for the kept rows.

        Args:
            num_rows (`int`):
                Rollouts of this process.

        Raises:
            ValueError: If a column has another number of values.
        """
        trainer = self._trainer
        for column in sorted(set(gather_object(list(trainer._pending_extra_logs)))):
            values = trainer._pending_extra_logs.setdefault(column, [None] * num_rows)
            if trainer.log_completions and len(values) != num_rows:
                raise ValueError(
                    f"log_extra({column!r}, ...) got {len(values)} values for {num_rows} completions. Log one value "
                    "per completion, and a column from one reward function alone."
                )

    def table_columns(self, prompts: list, generated: "_Generated", dataset_images: list | None) -> dict[str, Any]:
        """
        What the table will show of the rollouts of this process, as this release of TRL shows it in evaluation too.

        Args:
            prompts (`list`):
                Their prompts.
            generated (`_Generated`):
                What generation returned.
            dataset_images (`list`, *optional*):
                Their images, where generation returned none.

        Returns:
            `dict[str, Any]`: `prompt`, `completion` and `images`, one entry per rollout.
        """
        if _LOGS_TEXTS:
            decode = partial(self._trainer.processing_class.batch_decode, skip_special_tokens=True)
            shown = {"prompt": decode(generated.prompt_ids), "completion": decode(generated.completion_ids)}
        else:  # the images have a column of their own, and travel once
            strip = grpo_trainer.strip_images_from_messages
            shown = {"prompt": list(map(strip, prompts)), "completion": list(map(strip, generated.completions))}
        return {**shown, "images": generated.images or dataset_images or [None] * len(prompts)}

    def kept_advantages(self, num_kept: int) -> torch.Tensor:
        """
        The advantages of the kept rollouts of all processes: the last ones that were logged.

        Args:
            num_kept (`int`):
                How many there are.

        Returns:
            `torch.Tensor` of shape `(num_kept,)`
        """
        return torch.tensor(list(self._trainer._logs["advantages"])[-num_kept:])

    def log_rewards(self, rewards_per_func: torch.Tensor, further_metrics: dict[str, float]) -> None:
        """
        Under TRL's names go the metrics of all rollouts, under `pods/` those of the kept ones, which TRL has logged.

        Args:
            rewards_per_func (`torch.Tensor` of shape `(rollouts, reward functions)`):
                Rewards of the rollouts of all processes.
            further_metrics (`dict[str, float]`):
                What is logged besides.
        """
        trainer, metrics = self._trainer, self._trainer._metrics["train"]
        kept_reward, kept_reward_std = metrics["reward"].pop(), metrics["reward_std"].pop()
        metrics["frac_reward_zero_std"].pop()
        for name in trainer.reward_func_names:  # functions may share a name
            metrics[f"rewards/{name}/mean"].pop()
            metrics[f"rewards/{name}/std"].pop()
        totals = total_rewards(rewards_per_func, trainer.reward_weights)
        std = reward_std(
            rewards_per_func,
            trainer.reward_weights,
            trainer.num_rollouts,
            trainer.scale_rewards,
            trainer.multi_objective_aggregation,
        )
        values = {
            "reward": totals.nanmean().item(),
            "reward_std": nanstd(totals).item(),
            "frac_reward_zero_std": torch.isclose(std, torch.zeros_like(std)).float().mean().item(),
            "pods/kept_reward": kept_reward,
            "pods/kept_reward_std": kept_reward_std,
            **further_metrics,
        }
        for key, value in values.items():
            metrics[key].append(value)
        for name, rewards in zip(trainer.reward_func_names, rewards_per_func.T, strict=True):
            metrics[f"rewards/{name}/mean"].append(rewards.nanmean().item())
            metrics[f"rewards/{name}/std"].append(nanstd(rewards).item())

    def log_completions(self, rewards_per_func: torch.Tensor, kept: torch.Tensor, table: dict[str, Any]) -> None:
        """
        Fill the table, which holds one round, with all rollouts in place of the kept ones.

        Args:
            rewards_per_func (`torch.Tensor` of shape `(rollouts, reward functions)`):
                Rewards of the rollouts of all processes.
            kept (`torch.Tensor` of shape `(kept rollouts,)`):
                Their numbers, ascending.
            table (`dict[str, Any]`):
                What [`~RoundLogs.table_columns`] gave for the rollouts of this process.
        """
        trainer, logs = self._trainer, self._trainer._logs
        advantages = torch.full((len(rewards_per_func),), torch.nan)
        advantages[kept] = self.kept_advantages(len(kept))
        is_kept = torch.zeros(len(rewards_per_func), dtype=torch.bool)
        is_kept[kept] = True
        logs["prompt"].extend(_alike(gather_object(table["prompt"])))
        logs["completion"].extend(_alike(gather_object(table["completion"])))
        if trainer.log_multimodal:
            images = gather_object(table["images"])
            logs["images"].clear()  # a round without any must not show those of the one before
            logs["images"].extend(images if any(images) else [])
        logs["advantages"].extend(advantages.tolist())
        for name, rewards in zip(trainer.reward_func_names, rewards_per_func.T, strict=True):
            logs["rewards"][name].extend(rewards.tolist())
        logs["extra"][KEPT_COLUMN].extend(is_kept.tolist())

    def log_evaluation(self, num_rows: int) -> None:
        """
        Evaluation drops nothing; the column of the kept must be as long as the others.

        Args:
            num_rows (`int`):
                Rows of all processes.
        """
        self._trainer._logs["extra"][KEPT_COLUMN].extend([True] * num_rows)


def _alike(conversations: list) -> list:
    """Messages of parts everywhere if there are such anywhere: a column of a table takes no mixture with texts."""
    messages = [
        message for conversation in conversations if isinstance(conversation, list) for message in conversation
    ]
    if not any(isinstance(message.get("content"), list) for message in messages):
        return conversations
    return [[_in_parts(message) for message in conversation] for conversation in conversations]


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
