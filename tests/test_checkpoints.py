import contextlib
import io
import logging
import os
import shutil

import pandas as pd
import pytest
from rig import F1, N8_M4, Group, Script, assert_equal_weights, make_trainer
from transformers import TrainerCallback
from transformers import trainer as transformers_trainer
from trl import GRPOConfig, GRPOTrainer

from trl_pods import checkpoints
from trl_pods.checkpoints import checkpoint_to_resume, delete_unfinished, last_whole_checkpoint, saving, why_torn


SAVING = {**N8_M4, "max_steps": 3, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The output folder of a run with checkpoints at steps 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("saved")
    make_trainer(folder, Script([F1]), **SAVING).train()
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "output")


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
        "training_args.bin",
        "config.json",
    ],
)
def test_a_file_that_is_cut_off_makes_a_checkpoint_torn(folder, name):
    checkpoint = folder / "checkpoint-3"
    assert why_torn(checkpoint) is None
    file = checkpoint / name
    for size in (file.stat().st_size - 2, file.stat().st_size // 2, 0):
        os.truncate(file, size)
        assert why_torn(checkpoint) == f"{name} is cut off"
    assert last_whole_checkpoint(folder) == folder / "checkpoint-2"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.safetensors", "it lacks the weights"),
        ("optimizer.pt", "it lacks optimizer.pt"),
        ("scheduler.pt", "it lacks scheduler.pt"),
        ("rng_state.pth", "it lacks rng_state.pth"),
        ("trainer_state.json", "it lacks trainer_state.json"),
    ],
)
def test_a_file_that_is_missing_makes_a_checkpoint_torn(folder, name, reason):
    (folder / "checkpoint-3" / name).unlink()
    assert why_torn(folder / "checkpoint-3") == reason


def test_weights_in_parts_are_asked_for(folder):
    checkpoint = folder / "checkpoint-3"
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (checkpoint / "model.safetensors.index.json").write_text(index)
    assert why_torn(checkpoint) == "it lacks model-00002-of-00002.safetensors"
    shutil.copy(checkpoint / "model-00001-of-00002.safetensors", checkpoint / "model-00002-of-00002.safetensors")
    assert why_torn(checkpoint) is None


WEIGHTS_ALONE = ("optimizer.pt", "scheduler.pt", "rng_state.pth")


@pytest.mark.parametrize(
    ("deleted", "added", "reason"),
    [
        (WEIGHTS_ALONE, ["additional_chat_templates/rag.jinja"], None),
        (WEIGHTS_ALONE, ["ref/adapter_config.json", "ref/adapter_model.bin"], None),
        (["rng_state.pth"], ["rng_state_8.pth", "rng_state_9.pth"], None),  # of the second node
        (["model.safetensors", "optimizer.pt"], ["pytorch_model_fsdp_0/0.distcp", "optimizer_0/0.distcp"], None),
        (["model.safetensors", "optimizer.pt"], ["global_step3/mp_rank_00_model_states.pt"], None),
        (["model.safetensors"], ["modeling_mine.py"], "it lacks the weights"),
        (["model.safetensors"], ["completions/table.parquet"], "it lacks the weights"),
        (["optimizer.pt"], ["completions/table.parquet"], "it lacks optimizer.pt"),
        ([], ["checkpoint-is-incomplete.txt"], "its saving did not end"),
    ],
)
def test_what_is_beside_the_files_of_training_neither_makes_up_for_them_nor_asks_for_more(
    folder, deleted, added, reason
):
    checkpoint = folder / "checkpoint-3"
    for name in deleted:
        (checkpoint / name).unlink()
    for name in added:
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_text("{}")
    assert why_torn(checkpoint) == reason


def test_a_checkpoint_of_weights_alone_is_whole(tmp_path):
    make_trainer(tmp_path, Script([F1]), save_only_model=True, **SAVING).train()
    assert why_torn(tmp_path / "checkpoint-3") is None


def test_resuming_takes_the_last_whole_checkpoint_and_warns_of_torn_ones(folder, caplog):
    os.truncate(folder / "checkpoint-3" / "optimizer.pt", 100)
    script = Script([F1])
    with caplog.at_level(logging.WARNING):
        make_trainer(folder, script, **SAVING).train(resume_from_checkpoint=True)
    assert len(script.calls) == 1
    (warning,) = [record.message for record in caplog.records if "torn" in record.message]
    assert warning == f"The checkpoint {folder}/checkpoint-3 is torn and is skipped: optimizer.pt is cut off."
    assert why_torn(folder / "checkpoint-3") is None  # saved anew


def test_a_torn_checkpoint_is_refused_where_there_is_no_other(folder):
    for step in (1, 2, 3):
        (folder / f"checkpoint-{step}" / "scheduler.pt").unlink()
    trainer = make_trainer(folder, Script([F1]), **SAVING)
    with pytest.raises(ValueError, match="checkpoint-2' is torn: it lacks scheduler.pt. Use resume_from_checkpoint="):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    with pytest.raises(ValueError, match="finds torn checkpoints only in .* Use resume_from_checkpoint=None"):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("of_other", "asked_for", "expected"),
    [
        ({"checkpoint-1": None, "checkpoint-2": "torn"}, True, "checkpoint-1"),
        ({"checkpoint-2": None, "checkpoint-3": None, "checkpoint-4": None}, True, "checkpoint-3"),
        ({}, True, "finds torn checkpoints only"),
        ("it broke", "checkpoint-2", "checkpoint-2' is torn: it broke"),
        ("not all processes have it", "checkpoint-2", "checkpoint-2' is torn: not all processes have it"),
        (None, "checkpoint-7", "checkpoint-7' is torn: not all processes have it"),
    ],
)
def test_processes_with_disks_of_their_own_resume_from_what_is_whole_on_all(
    folder, monkeypatch, of_other, asked_for, expected
):
    monkeypatch.setattr(checkpoints, "gather_object", lambda objects: [*objects, of_other])
    asked_for = asked_for if asked_for is True else str(folder / asked_for)
    if " " not in expected:
        assert checkpoint_to_resume(asked_for, folder) == str(folder / expected)
        return
    with pytest.raises(ValueError, match=expected):
        checkpoint_to_resume(asked_for, folder)


def test_all_processes_look_for_checkpoints_where_some_have_none(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "gather_object", lambda objects: [*objects, {"checkpoint-1": None}])
    with pytest.raises(ValueError, match="finds torn checkpoints only"):
        checkpoint_to_resume(True, tmp_path)


def test_without_any_checkpoint_the_error_is_that_of_transformers(tmp_path):
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        make_trainer(tmp_path, Script([F1]), **SAVING).train(resume_from_checkpoint=True)


def fail_to_save(checkpoint):
    with contextlib.suppress(OSError), saving(checkpoint):
        checkpoint.mkdir()
        (checkpoint / "part").touch()
        raise OSError("disk full")


def test_a_saving_that_fails_leaves_a_torn_checkpoint_whatever_was_there_before(folder):
    checkpoint = folder / "checkpoint-3"
    fail_to_save(checkpoint)
    # Of two savings one whole checkpoint could seem to be made.
    assert [path.name for path in checkpoint.iterdir()] == ["part"]
    shutil.rmtree(checkpoint)
    shutil.copytree(folder / "checkpoint-2", checkpoint)
    assert why_torn(checkpoint) == "its saving did not end"
    with saving(checkpoint):
        shutil.copytree(folder / "checkpoint-2", checkpoint)
    assert why_torn(checkpoint) is None


def test_a_step_that_is_saved_again_keeps_its_checkpoint_until_the_new_one_is_whole(folder):
    checkpoint, old = folder / "checkpoint-3", folder / "old-checkpoint-3"
    for _ in range(2):  # the second saving does not take the torn one for the old one
        # What transformers does when a signal asks for a checkpoint.
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "checkpoint-is-incomplete.txt").touch()
        fail_to_save(checkpoint)
        assert why_torn(checkpoint) == "its saving did not end"
        assert last_whole_checkpoint(folder) == old
    trainer = make_trainer(folder, Script([F1]), **SAVING)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3
    with saving(checkpoint):
        shutil.copytree(old, checkpoint)
    assert last_whole_checkpoint(folder) == checkpoint
    assert not old.exists()


def test_several_processes_that_delete_the_same_files_do_not_fail(folder, monkeypatch):
    def delete_as_another_does(path, ignore_errors=False):
        rmtree(path, ignore_errors=True)
        checkpoints._flag(path).unlink(missing_ok=True)
        rmtree(path, ignore_errors=ignore_errors)

    fail_to_save(folder / "checkpoint-7")
    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", delete_as_another_does)
    delete_unfinished(folder)
    assert last_whole_checkpoint(folder) == folder / "checkpoint-3"
    fail_to_save(folder / "checkpoint-7")
    with saving(folder / "checkpoint-7"):
        pass


def test_a_flag_without_a_checkpoint_goes_as_training_begins(folder):
    flag = folder / "checkpoint-9.unfinished"
    flag.touch()
    fail_to_save(folder / "checkpoint-7")
    make_trainer(folder, Script([F1]), **SAVING).train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    assert not flag.exists()
    assert why_torn(folder / "checkpoint-7") == "its saving did not end"


def test_older_checkpoints_go_when_the_new_one_is_whole_and_unfinished_ones_with_them(folder, monkeypatch):
    def rotate(output_dir, **kwargs):
        whole_at_rotation.append(why_torn(folder / "checkpoint-3") is None)
        rotate_checkpoints(output_dir=output_dir, **kwargs)

    rotate_checkpoints, whole_at_rotation = transformers_trainer.rotate_checkpoints, []
    monkeypatch.setattr(transformers_trainer, "rotate_checkpoints", rotate)
    fail_to_save(folder / "checkpoint-7")
    trainer = make_trainer(folder, Script([F1]), save_total_limit=1, **SAVING)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert whole_at_rotation == [True]
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-3"]


ROUNDS = {
    "num_generations": 2,
    "per_device_train_batch_size": 1,
    "steps_per_generation": 4,
    "gradient_accumulation_steps": 1,
    "max_steps": 12,
    "learning_rate": 1e-2,
    "save_strategy": "steps",
    "save_steps": 6,
}


def test_resumed_within_a_round_a_run_goes_on_as_with_grpo(tmp_path):
    def resumed(name, *args, **settings):
        script = Script([Group([0, 1, 0.5, 0.25], [2, 3, 4, 5])] * 6)
        trainer = make_trainer(tmp_path / name, script, *args, **ROUNDS, **settings)
        trainer.train()
        script.calls.clear()
        trainer = make_trainer(tmp_path / name, script, *args, **ROUNDS, **settings)
        trainer.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-6"))
        return trainer, [sorted({number for number, _ in call}) for call in script.calls]

    grpo, prompts = resumed("grpo", GRPOTrainer, GRPOConfig)
    plain, prompts_of_plain = resumed("plain")
    pods, prompts_of_pods = resumed("pods", num_rollouts=4)
    assert_equal_weights(plain, grpo)
    assert prompts == prompts_of_plain == prompts_of_pods
    assert pods.state.global_step == grpo.state.global_step == 12


def test_tables_take_their_place_whole_and_keep_it_when_a_run_is_resumed_at_its_end(tmp_path):
    settings = {**SAVING, "log_completions": True, "num_completions_to_print": 0}
    make_trainer(tmp_path, Script([F1]), **settings).train()
    tables = {path.name: path.read_bytes() for path in (tmp_path / "completions").iterdir()}
    assert sorted(tables) == [f"completions_0000{step}.parquet" for step in (1, 2, 3)]
    make_trainer(tmp_path, Script([F1]), **settings).train(resume_from_checkpoint=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "completions").iterdir()} == tables


def test_tables_of_others_that_are_written_while_training_logs_are_left_alone(tmp_path):
    class WritesTables(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            table = pd.DataFrame({"a": [1]})
            in_memory = io.BytesIO()
            table.to_parquet(in_memory)
            written.append((table.to_parquet(), in_memory.getvalue()))
            table.head(0).to_parquet(tmp_path / "mine.parquet")

    written = []
    (tmp_path / "mine.parquet").write_bytes(b"old")
    trainer = make_trainer(tmp_path, Script([F1]), **N8_M4)
    trainer.add_callback(WritesTables())
    trainer.train()
    assert all(len(pd.read_parquet(io.BytesIO(table))) == 1 for tables in written for table in tables)
    assert written
    assert pd.read_parquet(tmp_path / "mine.parquet").empty
