"""The most memory that an update needs, against that of GRPOTrainer with as many rollouts as are kept."""

import gc
import itertools
import json

import pytest
import torch
from stepping import MODELS, Arm
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer


pytestmark = pytest.mark.benchmark

BEGIN, END = "update begins", "update ends"
NUM_STEPS = 2  # the states of the optimizer are there from the second one on


class UpdateMarks(TrainerCallback):
    """Calls a function when an update begins and ends."""

    def __init__(self, trainer, function) -> None:
        self.function, compute_loss = function, trainer._compute_loss

        def marked(*args):
            function(BEGIN)
            return compute_loss(*args)

        trainer._compute_loss = marked
        trainer.add_callback(self)

    def on_optimizer_step(self, *args, **kwargs):
        self.function(END)


def peak_on_cpu(make_arm, folder):
    """
    Bytes of all tensors alive at the highest point of the last update, and its rows.

    The profiler notes each call of the allocator, so this is exact, where the resident set of a process depends on
    what the allocator has not given back to the system. What is allocated in the profile is also freed in it.
    """

    def mark(name):
        with record_function(name):
            pass

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        arm = make_arm()
        UpdateMarks(arm.trainer, mark)
        rows = run(arm)
        del arm
        gc.collect()
    trace = folder / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = sorted(json.loads(trace.read_text())["traceEvents"], key=lambda event: event.get("ts", 0))
    begin, end = (max(event["ts"] for event in events if event["name"] == name) for name in (BEGIN, END))
    allocations = [event for event in events if event["name"] == "[memory]"]
    alive = itertools.accumulate(event["args"]["Bytes"] for event in allocations)
    peak = max(size for event, size in zip(allocations, alive, strict=True) if begin <= event["ts"] <= end)
    return peak, rows


def peak_on_cuda(make_arm, folder):
    """The same by the statistics of the allocator."""
    peaks = []

    def mark(name):
        if name == BEGIN:
            torch.cuda.reset_peak_memory_stats()
        else:
            peaks.append(torch.cuda.max_memory_allocated())

    arm = make_arm()
    UpdateMarks(arm.trainer, mark)
    rows = run(arm)
    del arm
    gc.collect()
    return peaks[-1], rows


def run(arm):
    for _ in range(NUM_STEPS):
        arm.step()
    return arm.steps[-1]["generated"], arm.steps[-1]["trained"]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("model", "tokens"), MODELS)
def test_the_update_needs_no_more_memory_than_that_of_grpo_on_the_kept_rollouts(tmp_path, model, tokens, report):
    peak = peak_on_cuda if torch.cuda.is_available() else peak_on_cpu

    def measured(name, trainer_class, config_class, **settings):
        def make():
            return Arm(trainer_class, config_class, model, tmp_path / name, tokens, 1, **settings)

        return peak(make, tmp_path)

    pods, rows = measured(
        "pods", PODSGRPOTrainer, PODSGRPOConfig, num_rollouts=64, num_generations=4, per_device_train_batch_size=4
    )
    assert rows == (64, 4)
    grpo, rows = measured("m", GRPOTrainer, GRPOConfig, num_generations=4, per_device_train_batch_size=4)
    assert rows == (4, 4)
    grpo_n, rows = measured("n", GRPOTrainer, GRPOConfig, num_generations=64, per_device_train_batch_size=64)
    assert rows == (64, 64)

    assert pods <= 1.05 * grpo
    report(f"peak of the update, {model}, n = 64, m = 4", f"{pods / grpo:.4f} times that of GRPOTrainer with 4")
    report("  of GRPOTrainer with 64 in one batch", f"{grpo_n / grpo:.2f} times")
