"""The peak of memory of the update, on request."""

import os
from typing import Any

import torch
from transformers import TrainerCallback


UPDATE_MEMORY = "memory/update_peak"  # in the logs: GiB


class UpdateMemoryCallback(TrainerCallback):
    """
    Log the peak of memory of the updates since the last log entry as `memory/update_peak`, in GiB.

    An update is the forward and backward pass of a micro-batch and what follows it: the step of the optimizer, where
    there is one. Generation and rewards are not in it.

    On a GPU it is the most that torch had allocated at a time, weights and states of the optimizer included; torch's
    own statistics of the peak are reset for it. On a CPU torch keeps no such statistics: it is the most that tensors
    took beyond what there was before the micro-batch, counted by torch's profiler, which slows the update down.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, to whose callbacks this is to be added.

    Raises:
        ValueError: If the memory of its device cannot be measured.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._meter = _meter(trainer.accelerator.device)
        compute_loss = trainer.compute_loss

        def watched_loss(*args: Any, **kwargs: Any) -> Any:
            if trainer.model.training:
                self._meter.start()
            return compute_loss(*args, **kwargs)

        trainer.compute_loss = watched_loss

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_peak()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note_peak()

    def _note_peak(self) -> None:
        # The metrics that TRL logs the means of and clears: one value, so that the mean is the most.
        metrics = self._trainer._metrics["train"]
        metrics[UPDATE_MEMORY] = [max([self._meter.stop() / 2**30, *metrics.get(UPDATE_MEMORY, [])])]


def _meter(device: torch.device) -> "_AllocatorMeter | _ProfilerMeter":
    backend = getattr(torch, device.type, None)
    if hasattr(backend, "max_memory_allocated"):
        return _AllocatorMeter(backend)
    if device.type == "cpu":
        return _ProfilerMeter()
    raise ValueError(
        f"log_update_memory=True: torch does not tell the peak of memory of {device.type!r}. Use "
        "log_update_memory=False."
    )


class _AllocatorMeter:
    """Bytes allocated on a device, by the statistics of its allocator."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def start(self) -> None:
        self._backend.reset_peak_memory_stats()

    def stop(self) -> int:
        return self._backend.max_memory_allocated()


class _ProfilerMeter:
    """Bytes that tensors on the CPU took beyond those that there were at the start."""

    def __init__(self) -> None:
        self._profile: Any = None
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes a line for each start and stop

    def start(self) -> None:
        if self._profile is None:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
            self._profile.start()

    def stop(self) -> int:
        if self._profile is None:
            return 0
        profile, self._profile = self._profile, None
        profile.stop()
        # No public method tells single allocations; what the operators took in sum has no peak.
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        taken = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            taken += event.nbytes()
            peak = max(peak, taken)
        return peak
