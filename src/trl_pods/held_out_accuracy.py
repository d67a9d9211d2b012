"""How many problems a policy gets right that it was not trained on, once or along the way."""

import inspect
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import Trainer, TrainerCallback
from trl import GRPOTrainer
from trl.data_utils import is_conversational
from trl.models import unwrap_model_for_generation

from .chunks import chunks
from .process_failures import ProcessFailures
from .training_clock import TRAIN_TIME


if TYPE_CHECKING:
    from .pods_grpo_trainer import PODSMixin


_BATCH_SIZE = 64
_LOGGED = "held_out_accuracy/"

# Columns of a data set that TRL does not pass to reward functions under their name.
_NO_COLUMNS = {"prompt", "completion", "completion_ids"}


@dataclass(frozen=True)
class Accuracy:
    """
    Shares of problems that got the full mark from the first reward function.

    Args:
        sampled (`float`):
            With one completion per problem sampled as in training.
        greedy (`float`):
            With the most likely token at each place.
    """

    sampled: float
    greedy: float


def measure_accuracy(trainer: GRPOTrainer, dataset: Dataset, num_problems: int) -> Accuracy:
    """
    Let the policy of a trainer solve held-out problems, by transformers' `generate`.

    The problems are shared out to the processes. The random numbers of training are left as they were, and two calls
    draw the same ones, so that a measurement changes nothing and two of them compare.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trainer with the policy; its first reward function judges, from the columns of the data set, and a reward
            of 1 or more counts as right. It is given what it gets in training, but what it logs is dropped. A
            `reward_timeout` holds for each of its calls.
        dataset ([`~datasets.Dataset`]):
            Problems in the format of the training set.
        num_problems (`int`):
            How many of the first problems to take.

    Returns:
        [`Accuracy`]: the same on every process.

    Raises:
        ValueError: If the first reward function is a model or asynchronous.
        NotImplementedError: With FSDP1, and with ZeRO-3 or FSDP2 before training has begun.

    Example:

    ```python
    >>> from tempfile import mkdtemp
    >>> from trl_pods import PODSGRPOConfig, PODSGRPOTrainer
    >>> from trl_pods.data.addition import addition_reward, embedded_policy_path, load_addition

    >>> config = PODSGRPOConfig(mkdtemp(), max_completion_length=4, report_to="none", use_cpu=True, bf16=False)
    >>> policy, problems = str(embedded_policy_path()), load_addition("test")
    >>> trainer = PODSGRPOTrainer(policy, addition_reward, config, train_dataset=load_addition("train"))
    >>> accuracy = measure_accuracy(trainer, problems, num_problems=100)
    >>> accuracy.sampled < accuracy.greedy
    True

    ```
    """
    check_supported(trainer)
    _check_begun(trainer)
    problems = dataset.select(range(min(num_problems, len(dataset))))
    # All that training sets, so that nothing comes from the defaults that a model brings along.
    sampling = {name: getattr(trainer, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    generation = {
        "max_new_tokens": trainer.max_completion_length,
        "repetition_penalty": trainer.repetition_penalty,
        "eos_token_id": getattr(trainer, "eos_token_ids", None),  # since trl 1.14
        "do_sample": True,
        **sampling,
        **(trainer.args.generation_kwargs or {}),
    }
    return Accuracy(
        sampled=_share_right(trainer, problems, generation),
        greedy=_share_right(trainer, problems, {**generation, "do_sample": False, **dict.fromkeys(sampling)}),
    )


class AccuracyCallback(TrainerCallback):
    """
    Log [`measure_accuracy`] before training, at intervals of training time, and whenever it is called.

    The log has `held_out_accuracy/sampled` and `held_out_accuracy/greedy`; the training clock stands still meanwhile.

    Args:
        trainer ([`PODSGRPOTrainer`]):
            Trainer with the policy.
        dataset ([`~datasets.Dataset`]):
            Problems in the format of the training set.
        num_problems (`int`):
            How many of the first problems to take.
        minutes (`float`, *optional*):
            Measure after the first step past each multiple of so many minutes of training. `None` is not at all.

    Raises:
        ValueError: If the first reward function is a model or asynchronous.
        NotImplementedError: With FSDP1.
    """

    def __init__(
        self, trainer: "PODSMixin", dataset: Dataset, num_problems: int, minutes: float | None = None
    ) -> None:
        check_supported(trainer)
        self._trainer = trainer
        self._dataset = dataset
        self._num_problems = num_problems
        self._minutes = minutes
        self._measured: dict[int, Accuracy] = {}  # by step

    @property
    def first(self) -> tuple[int, Accuracy]:
        """The step at which it was measured first, and what it was; of a resumed run, by the log it goes on with."""
        entry = next(entry for entry in self._trainer.state.log_history if f"{_LOGGED}sampled" in entry)
        return entry["step"], Accuracy(entry[f"{_LOGGED}sampled"], entry[f"{_LOGGED}greedy"])

    def __call__(self) -> Accuracy:
        """The accuracy at this step, measured if it has not been."""
        step = self._trainer.state.global_step
        if step not in self._measured:
            self._measured[step] = self._measure()
        return self._measured[step]

    def _measure(self) -> Accuracy:
        trainer, clock = self._trainer, self._trainer.training_clock
        with clock.paused():
            accuracy = measure_accuracy(trainer, self._dataset, self._num_problems)
        should_log = trainer.control.should_log  # an entry of our own does not stand for that of the step
        logs = {f"{_LOGGED}{kind}": share for kind, share in asdict(accuracy).items()}
        # As an entry by itself: the `log` of GRPOTrainer would put the metrics of training into it.
        Trainer.log(trainer, {**logs, TRAIN_TIME: clock.read()})
        trainer.control.should_log = should_log
        return accuracy

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._measured.clear()
        self()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self._trainer.training_clock.passed(self._minutes):
            self()


def check_supported(trainer: GRPOTrainer) -> None:
    """
    Refuse what the accuracy cannot be measured with.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer.

    Raises:
        ValueError: If the first reward function is a model or asynchronous.
        NotImplementedError: With FSDP1.
    """
    if trainer.is_fsdp_enabled and not getattr(trainer.accelerator, "is_fsdp2", False):
        raise NotImplementedError(
            "The accuracy on held-out problems (num_accuracy_problems) cannot be measured with FSDP1, in which the "
            "policy does not generate outside a training step. Use FSDP2 or DeepSpeed (accelerate_config: fsdp2 or "
            "zero2), or num_accuracy_problems=0 and an eval_strategy, which logs the rewards on the test split."
        )
    judge = trainer.reward_funcs[0]
    if isinstance(judge, torch.nn.Module) or inspect.iscoroutinefunction(judge):
        raise ValueError(
            f"The first reward function, {trainer.reward_func_names[0]!r}, judges the held-out problems "
            "(num_accuracy_problems) and must be a plain function. Put one first, or use num_accuracy_problems=0."
        )


def _check_begun(trainer: GRPOTrainer) -> None:
    if not _is_sharded(trainer):
        return
    from torch.distributed.fsdp import FSDPModule

    if trainer.model_wrapped is trainer.model and not isinstance(trainer.model, FSDPModule):
        raise NotImplementedError(
            "With ZeRO-3 or FSDP2 the accuracy on held-out problems can be measured in training and after it alone, "
            "when the policy has been wrapped. Use AccuracyCallback, which measures from the beginning of training on."
        )


def _is_sharded(trainer: GRPOTrainer) -> bool:
    """Whether no process has the whole policy."""
    plugin = trainer.accelerator.state.deepspeed_plugin if trainer.is_deepspeed_enabled else None
    return trainer.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)


def _share_right(trainer: GRPOTrainer, problems: Dataset, generation: dict[str, Any]) -> float:
    accelerator = trainer.accelerator
    rows = problems.shard(accelerator.num_processes, accelerator.process_index).to_list()
    # Processes that share a policy must generate equally often, whatever becomes of the rows added.
    num_rows = math.ceil(len(problems) / accelerator.num_processes)
    rewards: list[Any] = []
    devices: list[int] | None = [] if accelerator.device.type == "cpu" else None  # `None` is all of them
    failures = ProcessFailures(accelerator.process_index, accelerator.num_processes, trainer.args.ddp_timeout)
    synced = _is_sharded(trainer) and accelerator.num_processes > 1
    with _policy(trainer) as model, torch.random.fork_rng(devices), torch.no_grad(), failures.shared():
        torch.manual_seed(trainer.args.seed + accelerator.process_index)
        for part in chunks(num_rows, _BATCH_SIZE):
            own = rows[part]
            padded = own + [problems[0]] * (len(range(*part.indices(num_rows))) - len(own))
            inputs = _tokenize(trainer, padded).to(accelerator.device)
            failures.meet()  # generation may wait for the others
            outputs = model.generate(**inputs, **generation, synced_gpus=synced)
            completion_ids = outputs[: len(own), inputs["input_ids"].shape[1] :]
            rewards += _rewards(trainer, own, completion_ids) if own else []
        failures.meet()
    rewards = gather_object(rewards)
    return sum(reward is not None and reward >= 1 for reward in rewards) / len(rewards)


@contextmanager
def _policy(trainer: GRPOTrainer) -> Iterator[Any]:
    """The policy in a state to generate, and not to learn."""
    with _unwrapped(trainer) as model:
        was_training = model.training
        model.eval()
        try:
            yield model
        finally:
            model.train(was_training)
            if trainer.is_fsdp_enabled:
                _reshard(model)


def _reshard(model: Any) -> None:
    """Generation leaves the parameters whole that training would need next, those of the head."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _unwrapped(trainer: GRPOTrainer) -> AbstractContextManager[Any]:
    accelerator = trainer.accelerator
    if not trainer.is_deepspeed_enabled:
        return nullcontext(accelerator.unwrap_model(trainer.model_wrapped))
    options = {
        "gather_deepspeed3_params": trainer.args.ds3_gather_for_generation,
        "gradient_checkpointing_kwargs": trainer.args.gradient_checkpointing_kwargs,  # since trl 1.16
    }
    known = inspect.signature(unwrap_model_for_generation).parameters
    options = {name: value for name, value in options.items() if name in known}
    return unwrap_model_for_generation(trainer.model_wrapped, accelerator, **options)


def _rewards(trainer: GRPOTrainer, rows: list[dict[str, Any]], outputs: torch.Tensor) -> list:
    texts = trainer.processing_class.batch_decode(outputs, skip_special_tokens=True)
    conversational = is_conversational(rows[0])
    completions = [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts
    columns: dict[str, Any] = {key: [row[key] for row in rows] for key in rows[0] if key not in _NO_COLUMNS}
    columns |= {"trainer_state": trainer.state, "log_extra": _log_nothing, "log_metric": _log_nothing}
    completion_ids = [_up_to_end(ids, trainer) for ids in outputs.tolist()]
    with _in_time(trainer):
        return trainer.reward_funcs[0](
            prompts=[row["prompt"] for row in rows],
            completions=completions,
            completion_ids=completion_ids,
            **columns,
        )


def _in_time(trainer: GRPOTrainer) -> AbstractContextManager[None]:
    deadline = getattr(trainer, "_reward_deadline", None)
    return nullcontext() if deadline is None else deadline.watch(trainer.reward_func_names[0])


def _up_to_end(ids: list[int], trainer: GRPOTrainer) -> list[int]:
    """A completion without its padding."""
    ends = getattr(trainer, "eos_token_ids", None) or [trainer.processing_class.eos_token_id]
    return next((ids[: place + 1] for place, token in enumerate(ids) if token in ends), ids)


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _tokenize(trainer: GRPOTrainer, rows: list[dict[str, Any]]) -> Any:
    prompts = [row["prompt"] for row in rows]
    options = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
    if not is_conversational(rows[0]):
        return trainer.processing_class(text=prompts, **options)
    return trainer.processing_class.apply_chat_template(
        prompts,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **options,
        **trainer.chat_template_kwargs,
    )
