"""The peak of memory of the update."""

from types import SimpleNamespace

import pytest
import torch
from rig import Group, Script, make_trainer, step_logs

from trl_pods import update_memory
from trl_pods.update_memory import UPDATE_MEMORY, UpdateMemoryCallback


GROUPS = [Group(rewards=[0.0, 1.0, 0.5, 0.25])] * 4
MIB = 2**20


def peaks(tmp_path, rows, **settings):
    """In MiB, of 16 rows a step in micro-batches."""
    sizes = {"num_generations": 4, "per_device_train_batch_size": rows, "gradient_accumulation_steps": 16 // rows}
    trainer = make_trainer(tmp_path, Script(GROUPS), max_steps=3, **sizes, **settings)
    trainer.add_callback(UpdateMemoryCallback(trainer))
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [1024 * entry[UPDATE_MEMORY] for entry in history]


def test_on_a_cpu_it_is_what_tensors_take_and_grows_with_the_rows_of_a_micro_batch(tmp_path):
    by_rows = {rows: peaks(tmp_path, rows)[-1] for rows in (4, 8, 16)}
    assert 0 < by_rows[4] < by_rows[8] < by_rows[16] < 20
    assert by_rows[16] - by_rows[8] == pytest.approx(2 * (by_rows[8] - by_rows[4]), rel=0.25)  # activations


def test_generation_and_evaluation_are_not_in_it(tmp_path):
    script = Script(GROUPS)

    def greedy_of_memory(completions, number, rollout, **kwargs):
        large = torch.ones(64 * MIB // 4)
        return [float(large[0]) * r for r in rollout]

    trainer = make_trainer(
        tmp_path,
        script,
        num_generations=4,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
        trainer_kwargs={"reward_funcs": greedy_of_memory, "eval_dataset": script.dataset()},
    )
    trainer.add_callback(UpdateMemoryCallback(trainer))
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(history) == 2
    assert all(0 < 1024 * entry[UPDATE_MEMORY] < 20 for entry in history)
    assert not any(UPDATE_MEMORY in entry for entry in trainer.state.log_history if "eval_loss" in entry)


def test_on_a_gpu_it_is_what_torch_had_allocated_since_the_forward_pass(monkeypatch, tmp_path):
    allocator = SimpleNamespace(peak=9 * MIB)  # of generation
    backend = SimpleNamespace(
        reset_peak_memory_stats=lambda: setattr(allocator, "peak", 2 * MIB),
        max_memory_allocated=lambda: allocator.peak,
    )
    monkeypatch.setattr(update_memory, "_meter", lambda device: update_memory._AllocatorMeter(backend))
    assert peaks(tmp_path, 8) == [2.0] * 3


def test_a_device_of_which_torch_tells_no_memory_is_refused():
    with pytest.raises(ValueError, match="peak of memory of 'meta'. Use log_update_memory=False"):
        update_memory._meter(SimpleNamespace(type="meta"))


@pytest.mark.parametrize(("logging_steps", "logged"), [(1, [1.0, 3.0, 2.0]), (3, [3.0])])
def test_trackers_get_the_most_since_the_last_entry_wherever_they_come(tmp_path, monkeypatch, logging_steps, logged):
    peaks = iter([1.0, 3.0, 2.0])
    meter = SimpleNamespace(start=lambda: None, stop=lambda: next(peaks) * 2**30)
    monkeypatch.setattr(update_memory, "_meter", lambda device: meter)
    settings = {"num_generations": 4, "per_device_train_batch_size": 4, "max_steps": 3}
    trainer = make_trainer(tmp_path, Script(GROUPS), logging_steps=logging_steps, **settings)
    trainer.add_callback(UpdateMemoryCallback(trainer))  # after the recorder
    trainer.train()
    assert [entry[UPDATE_MEMORY] for entry in step_logs(trainer)] == logged
    assert UPDATE_MEMORY not in trainer.recorder.logs[-1]  # the summary
