"""
The authors' logged curves (github.com/YixuanEvenXu/pods, commit 187f43b) as runs of a comparison.

Reads a reduced copy, `paper/curves.json` in the folder named by `TRL_PODS_SHARED`. Times are those of the authors'
plots: of a single GPU the position of a checkpoint times its nominal distance, of several GPUs the minutes that they
logged.
"""

import json
import os
from functools import cache
from pathlib import Path

from trl_pods.comparison.run_file import FINISHED, Run


SHARED = Path(os.environ.get("TRL_PODS_SHARED", Path(__file__).parents[2] / "shared"))
CURVES = SHARED / "paper" / "curves.json"


@cache
def curves():
    return json.loads(CURVES.read_text())


def single_gpu_runs(name, arm, metric=None):
    """Runs of one setting, such as `"Instruct-GSM8K-512-64-16"`, by its headline metric or by another."""
    setting = curves()["single_gpu"][name]
    metric = metric or setting["headline"]
    base = curves()["base"][setting["model"]][setting["eval"]][metric]
    interval = round(3600 * setting["every_hours"])
    duration = round(3600 * setting["last_plotted_hour"])
    num_points = round(duration / interval)  # those that are plotted
    runs = []
    for number, run in setting["runs"].items():
        accuracy = {
            "seconds": [interval * position for position in range(num_points + 1)],
            "sampled": [base, *run[metric][:num_points]],
            "step": [0, *run["steps"][:num_points]],
        }
        log = {"time/train": accuracy["seconds"][1:], "completions/mean_length": run["len"][:num_points]}
        settings = {"num_rollouts": setting["n"], "num_generations": setting["m"]}
        runs.append(Run(arm, int(number), FINISHED, settings, duration, interval, accuracy=accuracy, log=log))
    return runs


def multi_gpu_runs(hardware, name, arm):
    """Runs of one arm on `"h100s"` or `"a100s"`: the seeds whose lengths were logged too, as in the authors' plots."""
    runs = []
    for seed, run in curves()["multi_gpu"][hardware][name].items():
        if not {"acc", "len"} <= run.keys():
            continue
        seconds, accuracies = zip(*((60 * minute, accuracy) for minute, accuracy in run["acc"]), strict=True)
        accuracy = {
            "seconds": list(seconds),
            "sampled": list(accuracies),
            "step": run["optimizer_step_inferred"],
        }
        times, lengths = zip(*((60 * minute, length) for minute, length in run["len"]), strict=True)
        log = {"time/train": list(times), "completions/mean_length": list(lengths)}
        runs.append(Run(arm, int(seed), FINISHED, {}, 1800, 120, accuracy=accuracy, log=log))
    return runs


GSM8K = "Instruct-GSM8K-512"
SETTINGS = {
    "GSM8K, 3B": lambda: single_gpu_runs(f"{GSM8K}-16-16", "grpo") + single_gpu_runs(f"{GSM8K}-64-16", "pods"),
    "MATH, 3B": lambda: (
        single_gpu_runs("Instruct-MATH-NF-512-8-8", "grpo") + single_gpu_runs("Instruct-MATH-NF-512-32-8", "pods")
    ),
    "GSM8K, Llama": lambda: (
        single_gpu_runs("Instruct-Llama-512-16-16-0.04", "grpo")
        + single_gpu_runs("Instruct-Llama-512-64-16-0.04", "pods")
    ),
    "GSM8K, Llama, answers alone": lambda: (
        single_gpu_runs("Instruct-Llama-512-16-16-0.04", "grpo", "ans")
        + single_gpu_runs("Instruct-Llama-512-64-16-0.04", "pods", "ans")
    ),
    "GSM8K, 8 H100": lambda: multi_gpu_runs("h100s", "GRPO-GA", "grpo") + multi_gpu_runs("h100s", "GRPO-PODS", "pods"),
    "GSM8K, 8 A100": lambda: multi_gpu_runs("a100s", "GRPO-GA", "grpo") + multi_gpu_runs("a100s", "GRPO-PODS", "pods"),
}
