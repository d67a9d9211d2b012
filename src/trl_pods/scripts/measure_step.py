"""
Measure what a training step costs, PODS beside plain GRPO with m and with n:

    python -m trl_pods.scripts.measure_step [--num_rollouts 64] [--num_generations 16] [--completion_tokens 512]
    ... --device cpu --shape hidden_size=64 intermediate_size=128 num_hidden_layers=2    # a small model on a CPU

The model has the shape of Qwen2.5-0.5B and random weights; it is trained whole in bfloat16, on one prompt a step, and
generates by transformers. Completions never end early, so that all steps do the same work. Each arm runs in processes
of its own, the arms in turn; the table shows medians over steps and the highest peak of memory. Nothing is downloaded.
"""

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


QWEN_HALF_B = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
PHASES = ("generate", "reward", "score", "update")
TIMEOUT = 3600  # seconds for one process

# What a process measures: `steps`, of each step after the warm-up the seconds (`step` and by phase) and the rows that
# were `generated` and `trained` on; `memory`, the peak in bytes, 0 if it ran out; `hardware`.
Measurement = dict[str, Any]


def arms(args: argparse.Namespace) -> dict[str, tuple[int, int | None]]:
    """`num_generations` and `num_rollouts` by the name of the arm."""
    n, m = args.num_rollouts, args.num_generations
    return {f"PODS, n = {n}, m = {m}": (m, n), f"GRPO with {m}": (m, None), f"GRPO with {n}": (n, None)}


# One process


def measure(args: argparse.Namespace, num_generations: int, num_rollouts: int | None) -> Measurement:
    """Train for some steps in this process."""
    import torch

    steps: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = _make_trainer(args, num_generations, num_rollouts, folder, steps)
        try:
            trainer.train()
        except torch.OutOfMemoryError:
            return {"steps": [], "memory": 0, "hardware": _hardware(args.device)}
    logs = [entry for entry in trainer.state.log_history if "time/update" in entry]
    for step, entry in zip(steps, logs, strict=True):
        step.update({phase: entry[f"time/{phase}"] for phase in PHASES})
    return {"steps": steps[args.warmup :], "memory": _peak_memory(args.device), "hardware": _hardware(args.device)}


def _make_trainer(
    args: argparse.Namespace, num_generations: int, num_rollouts: int | None, folder: str, steps: list[dict]
) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    from trl_pods import PODSGRPOConfig, PODSGRPOTrainer
    from trl_pods.data.addition import embedded_policy_path

    tokenizer = AutoTokenizer.from_pretrained(embedded_policy_path())
    batch_size = args.micro_batch_size or num_generations
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": args.device == "cpu",
        "bf16": True,
        "num_generations": num_generations,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": num_generations // batch_size,
        "max_steps": args.warmup + args.steps,
        "logging_steps": 1,
        **settings_for_equal_work(tokenizer, args.completion_tokens),
    }
    plain = num_rollouts is None  # with TRL's config the trainer is GRPOTrainer with a clock
    prompts = [(f"{10 + i}+" * args.prompt_tokens)[: args.prompt_tokens] for i in range(args.warmup + args.steps)]
    trainer = PODSGRPOTrainer(
        model=_make_model(args, tokenizer),
        reward_funcs=make_reward(args.completion_tokens, steps),
        args=GRPOConfig(**settings) if plain else PODSGRPOConfig(**settings, num_rollouts=num_rollouts),
        train_dataset=Dataset.from_dict({"prompt": prompts}),  # the tokenizer takes a character as a token
        processing_class=tokenizer,
    )
    if args.device == "cuda":
        trainer.add_callback(_forget_peak_of_warm_up(args.warmup))
    watch(trainer, steps)
    return trainer


def _make_model(args: argparse.Namespace, tokenizer: Any) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(**(QWEN_HALF_B | dict(args.shape)), **tokens, tie_word_embeddings=True)
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def settings_for_equal_work(tokenizer: Any, completion_tokens: int) -> dict[str, Any]:
    """Settings with which all completions have the same length, and steps write nothing to a disk."""
    return {
        "max_completion_length": completion_tokens,
        "generation_kwargs": {"suppress_tokens": [tokenizer.eos_token_id]},
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def make_reward(completion_tokens: int, steps: list[dict]) -> Any:
    """A reward function that counts in the last of `steps` what was `generated`."""

    def share_of_even_tokens(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        if {len(ids) for ids in completion_ids} != {completion_tokens}:
            raise RuntimeError(f"Completions have other lengths than {completion_tokens}, so that work is unequal.")
        steps[-1]["generated"] += len(completion_ids)
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    return share_of_even_tokens


def watch(trainer: Any, steps: list[dict], clock: Callable[[], float] = time.perf_counter) -> None:
    """Add to `steps` each step of the trainer: its seconds, and the rows `trained` on, with a gradient."""
    import torch
    from transformers import TrainerCallback

    synchronize = getattr(torch, trainer.args.device.type).synchronize

    def now() -> float:
        synchronize()
        return clock()

    def count(module: Any, inputs: Any, keywords: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            steps[-1]["trained"] += len(keywords["input_ids"])

    class Watch(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            steps.append({"generated": 0, "trained": 0, "step": -now()})

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps[-1]["step"] += now()

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.add_callback(Watch())


def _forget_peak_of_warm_up(warmup: int) -> Any:
    import torch
    from transformers import TrainerCallback

    class ForgetPeak(TrainerCallback):
        def on_step_begin(self, _: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == warmup:
                torch.cuda.reset_peak_memory_stats()

    return ForgetPeak()


def _peak_memory(device: str) -> int:
    if device == "cuda":
        import torch

        return torch.cuda.max_memory_allocated()
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _hardware(device: str) -> str:
    from trl_pods.machine import hardware

    found = hardware()
    return found["accelerators"][0] if device == "cuda" else f"{found['cpu']}, threads: {found['threads']}"


# All of them


def measure_all(args: argparse.Namespace, command_line: Sequence[str]) -> dict[str, list[Measurement]]:
    """Run the arms in turn, each time in a process of its own."""
    measurements: dict[str, list[Measurement]] = {name: [] for name in arms(args)}
    for number in range(args.passes):
        for position, (name, of_arm) in enumerate(measurements.items()):
            print(f"pass {number + 1} of {args.passes}: {name}", file=sys.stderr, flush=True)
            of_arm.append(_measure_in_process(command_line, position))
    return measurements


def _measure_in_process(command_line: Sequence[str], position: int) -> Measurement:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "measurement.json"
        command = [sys.executable, "-m", "trl_pods.scripts.measure_step", *command_line]
        command += ["--only_arm", str(position), "--result", str(result)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if process.returncode:
            raise RuntimeError(f"A run failed with exit code {process.returncode}:\n{process.stderr[-4000:]}")
        return json.loads(result.read_text(encoding="utf-8"))


def table(measurements: dict[str, list[Measurement]], device: str) -> str:
    """
    Medians over the steps of all processes of an arm, and the highest peak of memory.

    Example:

    ```python
    >>> rest = {"generated": 64, "trained": 16, "reward": 0.0, "score": 0.0, "update": 1.0}
    >>> one = {"steps": [{"step": 3.0, "generate": 1.5, **rest}], "memory": 2**30}
    >>> two = {"steps": [{"step": 4.0, "generate": 2.5, **rest}], "memory": 2**31}
    >>> print(table({"PODS": [one, two]}, "cpu").splitlines()[-1])
    | PODS | 64 | 16 | 3.500 (3.000 to 4.000) | 2.000 | 0.000 | 0.000 | 1.000 | 2.00 |

    ```
    """
    memory = "allocated on the GPU" if device == "cuda" else "resident set of the process"
    columns = ["arm", "generated", "trained on", "step (range)", *PHASES, f"peak memory, GiB ({memory})"]
    lines = [columns, ["---"] * len(columns)]
    lines += [[name, *_cells(of_arm)] for name, of_arm in measurements.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(of_arm: list[Measurement]) -> list[str]:
    if not all(measurement["memory"] for measurement in of_arm):
        return ["out of memory"] + [""] * (len(PHASES) + 3)
    steps = [step for measurement in of_arm for step in measurement["steps"]]
    seconds = [step["step"] for step in steps]
    return [
        *(", ".join(map(str, sorted({step[rows] for step in steps}))) for rows in ("generated", "trained")),
        f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})",
        *(f"{statistics.median(step[phase] for step in steps):.3f}" for phase in PHASES),
        f"{max(measurement['memory'] for measurement in of_arm) / 2**30:.2f}",
    ]


def describe(args: argparse.Namespace, hardware: str) -> str:
    """What the table was made with."""
    from trl_pods.machine import versions  # only now: `--help` needs no torch

    rows = f"micro-batches of {args.micro_batch_size} rows" if args.micro_batch_size else "one micro-batch a step"
    shape = ", ".join(f"{name}={value}" for name, value in args.shape) or "of Qwen2.5-0.5B"
    return (
        f"Seconds, medians over {args.passes} x {args.steps} steps, each process after {args.warmup} of warm-up.\n"
        f"Model: shape {shape}, random weights, bfloat16. {args.prompt_tokens} tokens in a prompt, "
        f"{args.completion_tokens} in a completion, one prompt a step, {rows}, gradient checkpointing.\n"
        f"Device: {hardware}. Date: {datetime.date.today().isoformat()}.\n"
        f"Versions: {', '.join(f'{name} {version}' for name, version in versions().items())}."
    )


# Command line


def make_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="Default: a GPU if there is one.")
    parser.add_argument("--num_rollouts", type=int, default=64, help="n")
    parser.add_argument("--num_generations", type=int, default=16, help="m")
    parser.add_argument("--micro_batch_size", type=int, help="Rows to a micro-batch. Default: all trained on.")
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--completion_tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5, help="Steps measured in each process.")
    parser.add_argument("--warmup", type=int, default=1, help="Steps before these.")
    parser.add_argument("--passes", type=int, default=2, help="Processes for each arm.")
    sizes = "Other sizes of the Qwen2Config."
    parser.add_argument("--shape", type=_setting, nargs="+", default=[], metavar="FIELD=NUMBER", help=sizes)
    parser.add_argument("--only_arm", type=int, help=argparse.SUPPRESS)  # in the process of one arm
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def _setting(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if name not in QWEN_HALF_B or not value.isdigit():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size of one of {', '.join(QWEN_HALF_B)}. Use for instance hidden_size=64."
        )
    return name, int(value)


def _parse(command_line: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(command_line)
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in ("steps", "passes", "prompt_tokens", "completion_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is too few. Use 1 or more.")
    common = math.gcd(args.num_generations, args.num_rollouts)
    if args.micro_batch_size and common % args.micro_batch_size:
        parser.error(f"--micro_batch_size {args.micro_batch_size} does not divide m and n. Use for instance {common}.")
    return args


def main(command_line: Sequence[str] | None = None) -> None:
    command_line = sys.argv[1:] if command_line is None else command_line
    args = _parse(command_line)
    if args.only_arm is not None:
        measurement = measure(args, *list(arms(args).values())[args.only_arm])
        args.result.write_text(json.dumps(measurement), encoding="utf-8")
        return
    measurements = measure_all(args, command_line)
    hardware = next(iter(measurements.values()))[0]["hardware"]
    print(table(measurements, args.device), describe(args, hardware), sep="\n\n")


if __name__ == "__main__":
    main()
