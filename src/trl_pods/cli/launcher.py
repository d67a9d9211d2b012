"""Start the training script through `accelerate launch`, and end with it."""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from accelerate.commands.config import default_config_file, load_config_from_file
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.utils import DistributedType
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from trl.cli.accelerate_config import resolve_accelerate_config_argument


SECONDS_TO_END = 10


@dataclass
class LaunchPlan:
    """What to start: arguments of `accelerate launch` and of the training script, environment variables."""

    launcher: list[str] = field(default_factory=list)
    training: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    on_cpu: bool = False  # whether the training is told to use the CPU


@cache
def launcher_options() -> dict[str, argparse.Action]:
    """Options of `accelerate launch` by name, `accelerate_config` included; without those that we set ourselves."""
    ours = {"help", "module", "no_python"}
    return {a.dest: a for a in _make_parser()._actions if a.option_strings and a.dest not in ours}


def launch(module: str, plan: LaunchPlan) -> int:
    """
    Run a module in the processes that a plan asks for, and wait for their end.

    Args:
        module (`str`):
            What to run, as in `python -m`.
        plan (`LaunchPlan`):
            How.

    Returns:
        `int`: the exit code: 0, that of the first process that failed, or 128 plus the number of a signal.

    Raises:
        ValueError: If the launcher refuses its arguments.
        OSError: If the accelerate config file cannot be read.
    """
    os.environ.update(plan.environment)
    args = parse_launcher_args(module, plan)
    if getattr(args, "use_cpu", False):
        # Without it a process that finds no GPU takes itself for the only one.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    # A scheduler ends a job by SIGTERM to this process; it must take the training along as Ctrl-C does.
    on_sigterm = signal.signal(signal.SIGTERM, _raise_signal)
    try:
        launch_command(args)
    except subprocess.CalledProcessError as error:
        return _report_failure(error.returncode)
    except ChildFailedError as error:
        return _report_failure(error.get_first_failure()[1].exitcode)
    except SignalException as error:
        _end_children()
        return 128 + error.sigval
    except KeyboardInterrupt:
        _end_children()
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGTERM, on_sigterm)
    return 0


def parse_launcher_args(module: str, plan: LaunchPlan) -> argparse.Namespace:
    """
    The arguments for [`~accelerate.commands.launch.launch_command`], with as many processes as were asked for.

    Args:
        module (`str`):
            What to run.
        plan (`LaunchPlan`):
            How.

    Returns:
        `argparse.Namespace`: the arguments.

    Raises:
        ValueError: If an argument is wrong.
        OSError: If the accelerate config file cannot be read.
    """
    parser = _make_parser()
    parser.exit_on_error = False
    try:
        args = parser.parse_args([*plan.launcher, "--module", module, *plan.training])
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    if args.training_script != module:  # the parser takes any loose value for the script
        raise ValueError(f"{args.training_script!r} is an unexpected argument.")
    _settle_processes(args, plan.on_cpu)
    return args


class _AccelerateConfig(argparse.Action):
    """`--accelerate_config zero2` is `--config_file` with the file that TRL ships under this name."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        _, namespace.config_file = resolve_accelerate_config_argument(["--accelerate_config", str(values)])


def _make_parser() -> argparse.ArgumentParser:
    parser = launch_command_parser()
    parser.add_argument("--accelerate_config", "--accelerate-config", action=_AccelerateConfig)
    return parser


def _settle_processes(args: argparse.Namespace, on_cpu: bool) -> None:
    """
    Make `num_processes` mean what it says.

    On its own `accelerate launch` starts several processes only for several GPUs, DeepSpeed, FSDP and the like. All
    else, several CPU processes too, it starts once, by a bare `python`. Several processes of this kind go through
    torchrun if `multi_gpu` is set, which says no more than that: the device is chosen by the training script.
    """
    config = _accelerate_config(args)
    if config is None:
        _take_defaults(args)
    chosen = args.multi_gpu or args.tpu or args.use_deepspeed or args.use_fsdp or args.use_megatron_lm
    if chosen or args.mpirun_hostfile or not _is_plain(config):
        return
    on_cpu = on_cpu or args.cpu or bool(config and config.use_cpu)
    num_processes = args.num_processes or _default_num_processes(config, on_cpu)
    if num_processes > 1:
        _use_torchrun(args, num_processes, on_cpu)
    else:
        _use_one_process(args)


def _default_num_processes(config: Any, on_cpu: bool) -> int:
    """Without a config file one for each GPU, as accelerate does; with one of a single process, that one."""
    if config is None:
        return 1 if on_cpu else max(1, torch.accelerator.device_count())
    return config.num_processes if config.distributed_type == DistributedType.MULTI_CPU else 1


def _accelerate_config(args: argparse.Namespace) -> Any:
    """The config file that accelerate will read, if any."""
    if args.config_file is None and (args.cpu or not Path(default_config_file).is_file()):
        return None
    try:
        return load_config_from_file(args.config_file)
    except (AttributeError, TypeError, yaml.YAMLError) as error:
        raise ValueError(f"{args.config_file or default_config_file} is not a valid accelerate config.") from error


def _take_defaults(args: argparse.Namespace) -> None:
    """What accelerate takes without a config file, and warns that it does."""
    for name, value in {"num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no"}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _is_plain(config: Any) -> bool:
    """Whether a config file leaves the kind of launch open."""
    if config is None:
        return True
    has_mpi = bool(getattr(config, "mpirun_config", None))
    return config.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU) and not has_mpi


def _use_torchrun(args: argparse.Namespace, num_processes: int, on_cpu: bool) -> None:
    args.num_processes = num_processes
    args.multi_gpu = True
    args.cpu = False  # accelerate takes it for the opposite of `multi_gpu`
    args.use_cpu = on_cpu or not torch.accelerator.is_available()


def _use_one_process(args: argparse.Namespace) -> None:
    args.num_processes = 1
    if torch.cuda.device_count() > 1 and args.gpu_ids is None:
        # Else transformers would spread the model over all GPUs by `DataParallel`, and multiply the batch.
        args.gpu_ids = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def _raise_signal(number: int, frame: Any) -> None:
    raise SignalException(f"Received signal {number}", signal.Signals(number))


def _report_failure(exit_code: int) -> int:
    print(f"trl-pods: error: training failed with exit code {exit_code}; see its output above.", file=sys.stderr)
    return exit_code if exit_code > 0 else 128 - exit_code  # a negative one is a signal


def _end_children() -> None:
    children = psutil.Process().children(recursive=True)
    for child in children:
        child.terminate()
    _, alive = psutil.wait_procs(children, timeout=SECONDS_TO_END)
    for child in alive:
        child.kill()
