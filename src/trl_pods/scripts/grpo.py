"""
Train with PODS:

    trl-pods grpo --config recipe.yaml [--field value]
    accelerate launch [options] -m trl_pods.scripts.grpo --config recipe.yaml [--field value]
"""

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl import DatasetMixtureConfig, ModelConfig, TrlParser
from trl.scripts.grpo import GRPOScriptArguments

from ..log_file import LogFileCallback
from ..pods_grpo_config import PODSGRPOConfig
from .recipe import check_known, find_recipe, read_recipe, take_config
from .task import EMBEDDED_POLICY, LOADERS, REWARDS, load_reward, locate_policy, open_dataset


if TYPE_CHECKING:
    from ..held_out_accuracy import Accuracy, AccuracyCallback
    from ..pods_grpo_trainer import PODSGRPOTrainer


@dataclass
class PODSScriptArguments(GRPOScriptArguments):
    """
    What the training script takes besides the settings of [`PODSGRPOConfig`] and the model.

    Args:
        reward_funcs (`list[str]`, *optional*):
            Reward functions: names known to `trl_pods` or to TRL's script (see `trl_pods.scripts.task.REWARDS`), or
            dotted import paths; the current directory is importable.
        dataset_loader (`str`, *optional*):
            Where the data comes from, in place of `dataset_name` and `datasets`: `"gsm8k"`, `"math"`, `"sciknoweval"`,
            `"addition"`, or the dotted import path of a function `loader(split, **dataset_kwargs)` that returns a
            [`~datasets.Dataset`]. The splits are `dataset_train_split` and `dataset_test_split`.
        dataset_kwargs (`dict[str, Any]` or `str`, *optional*):
            Further keywords for the loader. On the command line a JSON string.
        num_accuracy_problems (`int`, *optional*, defaults to `0`):
            Problems of the test split on which the accuracy is measured before and after training; 0 for none. The
            first reward function judges, and 1 or more counts as right.
        evaluate_only (`bool`, *optional*, defaults to `False`):
            Evaluate on the test split, by TRL's evaluation as in training, and do not train. The policy
            is `model_name_or_path`; with PEFT, `resume_from_checkpoint` names the checkpoint of an adapter to it.
        accuracy_minutes (`float`, *optional*):
            Measure the accuracy also after every so many minutes of training; the training clock leaves the
            measurements out.
        log_file (`str`, *optional*):
            File that gets each log entry as a line of JSON as soon as it is made; its first line holds settings,
            versions and hardware.
        log_update_memory (`bool`, *optional*, defaults to `False`):
            Log the peak of memory of the update as `memory/update_peak`, in GiB: on a GPU what torch had allocated, on
            a CPU what tensors took beyond what there was before a micro-batch, by a profiler that slows it down.

    Raises:
        ValueError: If `dataset_kwargs` is not a mapping, or `accuracy_minutes` no time or without problems.

    Example:

    ```python
    >>> PODSScriptArguments(dataset_loader="gsm8k", dataset_kwargs='{"data_dir": "gsm8k"}').dataset_kwargs
    {'data_dir': 'gsm8k'}

    ```
    """

    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": f"Reward functions: {', '.join(f'`{name}`' for name in REWARDS)} (with `max_completion_len=1280`, "
            "`soft_punish_cache=256`), or dotted import paths; the current directory is importable."
        },
    )
    dataset_loader: str | None = field(
        default=None,
        metadata={
            "help": f"Where the data comes from, in place of `dataset_name` and `datasets`: {', '.join(LOADERS)}, or "
            "the dotted import path of a function `loader(split, **dataset_kwargs)` that returns a `Dataset`."
        },
    )
    dataset_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further keywords for the loader, as JSON."}
    )
    num_accuracy_problems: int = field(
        default=0,
        metadata={
            "help": "Problems of the test split on which the accuracy is measured before and after training; 0 for "
            "none. The first reward function judges, and 1 or more counts as right."
        },
    )
    evaluate_only: bool = field(
        default=False,
        metadata={
            "help": "Evaluate on the test split, by TRL's evaluation as in training, and do not train. "
            "The policy is `model_name_or_path`; with PEFT, `resume_from_checkpoint` names an adapter's checkpoint."
        },
    )
    accuracy_minutes: float | None = field(
        default=None, metadata={"help": "Measure the accuracy also after every so many minutes of training."}
    )
    log_file: str | None = field(
        default=None, metadata={"help": "File that gets each log entry as a line of JSON as soon as it is made."}
    )
    log_update_memory: bool = field(
        default=False,
        metadata={
            "help": "Log the peak of memory of the update as `memory/update_peak`, in GiB: on a GPU what torch had "
            "allocated, on a CPU what tensors took beyond what there was before a micro-batch, by a profiler that "
            "slows it down."
        },
    )

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str):  # `reward_funcs: name` in YAML
            self.reward_funcs = [self.reward_funcs]
        if isinstance(self.dataset_kwargs, str):
            self.dataset_kwargs = _read_json(self.dataset_kwargs)
        if not isinstance(self.dataset_kwargs, dict | None):
            raise ValueError(f"dataset_kwargs={self.dataset_kwargs!r} must be a mapping of keywords.")
        self._check_accuracy_minutes()

    def _check_accuracy_minutes(self) -> None:
        if self.accuracy_minutes is None:
            return
        if not 0 < self.accuracy_minutes < math.inf:
            raise ValueError(
                f"accuracy_minutes={self.accuracy_minutes} is no time between two measurements. Use None for none "
                "along the way, or minutes, for instance 2.0."
            )
        if self.num_accuracy_problems <= 0:
            raise ValueError(
                f"accuracy_minutes={self.accuracy_minutes} is set with num_accuracy_problems="
                f"{self.num_accuracy_problems}, no problems to measure on. Use for instance num_accuracy_problems=500."
            )


def make_parser(prog: str | None = None) -> TrlParser:
    """
    The parser of the training script.

    Args:
        prog (`str`, *optional*):
            Name of the program in `--help`.

    Returns:
        [`~trl.TrlParser`]: over [`PODSScriptArguments`], [`PODSGRPOConfig`], [`~trl.ModelConfig`] and
        [`~trl.DatasetMixtureConfig`].
    """
    dataclass_types: Any = (PODSScriptArguments, PODSGRPOConfig, ModelConfig, DatasetMixtureConfig)
    return TrlParser(
        dataclass_types,
        prog=prog,
        usage="%(prog)s --config recipe.yaml [--field value ...]",
        description="Train with PODS. Settings come from a YAML file (--config: its path, or the name of a shipped "
        f"recipe; for the policy in the package, model_name_or_path is '{EMBEDDED_POLICY}') or on the command line, "
        "which wins over the file. `trl-pods grpo` takes options of `accelerate launch` in both places too, such as "
        "--num_processes 2, and --accelerate_config with a file or the name of one in TRL, such as zero2.",
        allow_abbrev=False,  # an abbreviation could be an option of `accelerate launch`, such as --tpu
    )


def parse(args: list[str] | None = None) -> tuple[Any, ...]:
    """
    Read a command line and the recipe it names.

    Args:
        args (`list[str]`, *optional*):
            The command line. Default: that of the process.

    Returns:
        `tuple`: [`PODSScriptArguments`], [`PODSGRPOConfig`], [`~trl.ModelConfig`], [`~trl.DatasetMixtureConfig`].

    Raises:
        FileNotFoundError: If there is no such recipe.
        ValueError: If a setting is unknown or wrong. In the recipe options of `accelerate launch` are left alone.
    """
    parser = make_parser()
    config, rest = take_config(sys.argv[1:] if args is None else args)
    if config is not None:
        path = find_recipe(config)
        _check_keys(read_recipe(path), parser, path)
        rest = ["--config", str(path), *rest]
    *parsed, _, unused = parser.parse_args_and_config(
        rest, return_remaining_strings=True, separate_remaining_strings=True
    )
    if unused:
        raise ValueError(f"Unknown on the command line: {' '.join(unused)}. See --help for all settings.")
    return tuple(parsed)


def main(
    script_args: PODSScriptArguments,
    training_args: PODSGRPOConfig,
    model_args: ModelConfig,
    dataset_args: DatasetMixtureConfig,
) -> None:
    """
    Train, save, and say where things are; or evaluate alone.

    Args:
        script_args ([`PODSScriptArguments`]):
            Rewards and data.
        training_args ([`PODSGRPOConfig`]):
            Settings of the trainer.
        model_args ([`~trl.ModelConfig`]):
            The policy, PEFT and quantization.
        dataset_args ([`~trl.DatasetMixtureConfig`]):
            A mixture of data sets.

    Raises:
        ValueError: If rewards, data or policy are not set or unknown, or there is nothing to evaluate by.
    """
    load_split = open_dataset(script_args, dataset_args)
    if script_args.evaluate_only:
        _check_evaluation(training_args, model_args)
    trainer = _build_trainer(script_args, training_args, model_args, load_split)
    if script_args.evaluate_only:
        _evaluate(trainer, _checkpoint(training_args.resume_from_checkpoint))
        _end(trainer)
        return
    if script_args.log_update_memory:
        from ..update_memory import UpdateMemoryCallback

        trainer.add_callback(UpdateMemoryCallback(trainer))
    if script_args.log_file:  # the last: others add to the entries
        trainer.add_callback(LogFileCallback(script_args.log_file))
    accuracy = _measure_along_the_way(trainer, script_args, load_split)
    trainer.train(resume_from_checkpoint=_checkpoint(training_args.resume_from_checkpoint))
    _save(trainer, script_args.dataset_name)
    first, after = (accuracy.first, accuracy()) if accuracy else (None, None)
    trainer.save_state()
    trainer.accelerator.print(_summary(training_args, first, after))
    _end(trainer)


def _build_trainer(
    script_args: PODSScriptArguments, training_args: PODSGRPOConfig, model_args: ModelConfig, load_split: Any
) -> "PODSGRPOTrainer":
    from trl import get_peft_config, get_quantization_config

    from ..pods_grpo_trainer import PODSGRPOTrainer

    policy = locate_policy(model_args.model_name_or_path)
    training_args.model_init_kwargs = _model_init_kwargs(training_args, model_args)
    return PODSGRPOTrainer(
        model=policy,
        reward_funcs=_rewards(script_args),
        args=training_args,
        train_dataset=load_split(script_args.dataset_train_split),
        eval_dataset=load_split(script_args.dataset_test_split) if _evaluates(training_args) else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )


def _evaluates(training_args: PODSGRPOConfig) -> bool:
    by_time = training_args.eval_minutes is not None
    return by_time or training_args.eval_on_start or training_args.eval_strategy != "no"


def _rewards(script_args: PODSScriptArguments) -> list[Any]:
    rewards: list[Any] = [load_reward(name) for name in script_args.reward_funcs or []]
    if script_args.reward_model_name_or_path:
        rewards.insert(0, script_args.reward_model_name_or_path)
    if not rewards:
        raise ValueError(
            f"No reward is set. Set reward_funcs ({', '.join(REWARDS)}, or dotted import paths) or "
            "reward_model_name_or_path."
        )
    return rewards


def _model_init_kwargs(training_args: PODSGRPOConfig, model_args: ModelConfig) -> dict[str, Any]:
    own: Any = training_args.model_init_kwargs or {}
    return {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **own,
    }


def _check_evaluation(training_args: PODSGRPOConfig, model_args: ModelConfig) -> None:
    if not _evaluates(training_args):  # the batch of an evaluation is checked only with one of them
        raise ValueError(
            "evaluate_only has eval_strategy='no' and eval_minutes=None beside it. Use eval_strategy='steps', and "
            "num_generations_eval and per_device_eval_batch_size that fit each other."
        )
    if training_args.resume_from_checkpoint and not model_args.use_peft:
        raise ValueError(
            f"evaluate_only has resume_from_checkpoint={training_args.resume_from_checkpoint!r} beside it, which is "
            "for adapters (use_peft). Name the checkpoint of a whole model by model_name_or_path."
        )


def _evaluate(trainer: "PODSGRPOTrainer", checkpoint: str | bool | None) -> None:
    from transformers.trainer_utils import get_last_checkpoint

    if checkpoint is True:
        checkpoint = get_last_checkpoint(str(trainer.args.output_dir))
        if checkpoint is None:
            raise ValueError(f"resume_from_checkpoint=True: there is no checkpoint in {trainer.args.output_dir}.")
    if checkpoint:
        trainer.model.load_adapter(checkpoint, adapter_name="default")
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics, combined=False)
    rewards = [name for name in metrics if name.startswith("eval_rewards/") and name.endswith("/mean")]
    lines = [f"{name.split('/')[1]:<28}{metrics[name]:>8.4f}" for name in rewards]
    folder = Path(str(trainer.args.output_dir))
    trainer.accelerator.print("\n".join(["Test split, mean of", *lines, f"All: {folder / 'eval_results.json'}"]))


def _measure_along_the_way(
    trainer: "PODSGRPOTrainer", script_args: PODSScriptArguments, load_split: Any
) -> "AccuracyCallback | None":
    if script_args.num_accuracy_problems <= 0:
        return None
    from ..held_out_accuracy import AccuracyCallback

    problems = load_split(script_args.dataset_test_split)
    callback = AccuracyCallback(
        trainer, problems, script_args.num_accuracy_problems, minutes=script_args.accuracy_minutes
    )
    trainer.add_callback(callback)
    return callback


def _checkpoint(value: str | bool | None) -> str | bool | None:
    """`true` and `false` reach the configuration as words; as such they would be folders."""
    return {"true": True, "false": None}.get(str(value).lower(), value)


def _save(trainer: "PODSGRPOTrainer", dataset_name: str | None) -> None:
    trainer.save_model(trainer.args.output_dir)
    trainer.save_state()  # once more after the accuracy is measured, which may fail
    if trainer.args.push_to_hub:
        trainer.push_to_hub(dataset_name=dataset_name)
        trainer.accelerator.print(f"Pushed to https://huggingface.co/{trainer.hub_model_id}")


def _summary(training_args: PODSGRPOConfig, first: "tuple[int, Accuracy] | None", after: "Accuracy | None") -> str:
    folder = Path(str(training_args.output_dir))
    lines = [f"Model: {folder}", f"Log: {folder / 'trainer_state.json'}"]
    if training_args.log_completions:
        lines.append(f"Completions: {folder / 'completions'}")
    if first is not None and after is not None:
        step, before = first
        start = f"step {step}" if step else "before"  # a resumed run may not have been measured before
        lines.append(f"{'Held-out accuracy':<17}{start:>11}{'after':>8}")
        lines.append(f"{'  sampled':<17}{before.sampled:>11.3f}{after.sampled:>8.3f}")
        lines.append(f"{'  greedy':<17}{before.greedy:>11.3f}{after.greedy:>8.3f}")
    return "\n".join(lines)


def _end(trainer: "PODSGRPOTrainer") -> None:
    """A process that leaves its process group open often aborts at exit."""
    engine = getattr(getattr(trainer, "vllm_generation", None), "llm", None)
    if engine is not None:  # the process groups of a colocated engine, which lie within that of the trainer, go first
        engine.llm_engine.engine_core.shutdown()
    if hasattr(trainer, "end"):  # transformers 5.18 and later
        trainer.end()
        return
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _check_keys(recipe: dict[str, Any], parser: TrlParser, path: Path) -> None:
    known = {action.dest for action in parser._actions} | {"env"}
    unknown = [key for key in recipe if key not in known]
    if not unknown:
        return
    from ..cli.launcher import launcher_options  # only now: accelerate's command sets up logging when imported

    known |= launcher_options().keys()
    for key in unknown:
        check_known(key, known, f"in {path}")


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"dataset_kwargs={text!r} is no valid JSON: {error}.") from error


if __name__ == "__main__":
    main(*parse())
