"""Evaluation drops nothing."""

import pandas as pd
import pytest
from rig import F1, LOGGED, N8_M4, Group, Script, make_trainer, read_table, step_logs, train
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer


VARYING = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time"}


def evaluate(tmp_path, trainer_class, config_class, rewards, num_generations_eval, **settings):
    script = Script([Group(values) for values in rewards])
    trainer = make_trainer(
        tmp_path,
        script,
        trainer_class,
        config_class,
        trainer_kwargs={"eval_dataset": script.dataset()},
        num_generations=2,
        num_generations_eval=num_generations_eval,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        **settings,
        **LOGGED,
    )
    return trainer.evaluate(), script


@pytest.mark.parametrize("num_generations_eval", [1, 2, None, 4])
def test_evaluation_is_that_of_grpo(tmp_path, num_generations_eval):
    rewards = [[0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 1, 1]]
    pods, pods_script = evaluate(
        tmp_path, PODSGRPOTrainer, PODSGRPOConfig, rewards, num_generations_eval, num_rollouts=8
    )
    grpo, grpo_script = evaluate(tmp_path, GRPOTrainer, GRPOConfig, rewards, num_generations_eval)
    assert pods_script.calls == grpo_script.calls
    assert pods.pop("time/train") == 0
    assert {k: v for k, v in pods.items() if k not in VARYING} == {k: v for k, v in grpo.items() if k not in VARYING}


def test_evaluation_does_not_select(tmp_path):
    metrics, script = evaluate(
        tmp_path, PODSGRPOTrainer, PODSGRPOConfig, [[1, 0, 0, 0], [1, 0, 0, 0]], 4, num_rollouts=8
    )
    assert metrics["eval_reward"] == 0.25  # selecting two of four would give 0.5
    assert [len(call) for call in script.calls] == [4, 4]
    table = pd.read_parquet(tmp_path / "completions" / "completions_00000.parquet")
    assert table["kept"].tolist() == [True] * 8


@pytest.mark.parametrize(
    ("num_generations_eval", "rewards", "calls", "mean"),
    [
        (2, [[0, 0], [1, 1], [1, 1]], [4, 2], 0.75),  # TRL logs the mean of the means of its calls
        (None, [[0, 0], [1, 1], [1, 1]], [4, 2], 0.75),  # as many as are kept in training
        (4, [[1, 0, 0, 0], [1, 0, 0, 0]], [4, 4], 0.25),
        (1, [[0], [1], [1]], [3], 2 / 3),
    ],
)
def test_evaluation_generates_as_many_completions_as_it_is_told(tmp_path, num_generations_eval, rewards, calls, mean):
    script = Script([Group(values + [0.5] * (8 - len(values))) for values in rewards])
    trainer = train(
        tmp_path,
        script,
        trainer_kwargs={"eval_dataset": script.dataset()},
        num_rollouts=8,
        num_generations=2,
        num_generations_eval=num_generations_eval,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        eval_strategy="steps",
        eval_on_start=True,
    )
    assert [len(call) for call in script.calls] == [*calls, 8, *calls]
    evaluations = [logs for logs in trainer.recorder.logs if "eval_reward" in logs]
    assert [logs["eval_reward"] for logs in evaluations] == pytest.approx([mean] * 2)
    assert not [key for logs in evaluations for key in logs if "pods/" in key or "eval_time/" in key]


def test_evaluation_shows_its_completions_with_every_reward_function(tmp_path):
    def run(name, trainer_class, config_class, **settings):
        rewards = [(1, 0.5), (0, 1), (None, 0), (0.5, None), (1, 1), (0, 0), (0, 0), (1, 0)]
        script = Script([Group(rewards, [2, 3, 4, 5, 6, 7, 8, 2]), Group(rewards[::-1])], num_functions=2)
        noting = note_rollouts(script.reward_functions())
        trainer = train(
            tmp_path / name,
            script,
            trainer_class,
            config_class,
            trainer_kwargs={"reward_funcs": noting, "eval_dataset": script.dataset()},
            reward_weights=[1, -0.5],
            num_generations=4,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=4,
            num_generations_eval=2,
            eval_strategy="steps",
            eval_on_start=True,
            **LOGGED,
            **settings,
        )
        return trainer, [logs for logs in trainer.recorder.logs if "eval_reward" in logs]

    pods, ours = run("pods", PODSGRPOTrainer, PODSGRPOConfig, num_rollouts=8, min_reward_std=0.1)
    grpo, theirs = run("grpo", GRPOTrainer, GRPOConfig)
    assert len(ours) == len(theirs) == 2
    for ours_once, theirs_once in zip(ours, theirs, strict=True):
        for key in set(theirs_once) - VARYING - {"eval_num_tokens"}:  # of training, in which PODS has more
            assert ours_once[key] == theirs_once[key], key

    # TRL's logs still hold the last round of training, before the four completions of the evaluation.
    at_start, at_end = read_table(pods, 0), read_table(pods, 1)
    assert at_start["kept"].tolist() == [True] * 4
    assert len(at_end) == 16
    assert at_end["kept"].tolist()[-4:] == [True] * 4
    assert at_end["kept"].tolist().count(True) == 4 + at_end["advantage"][:-4].notna().sum()
    for table, other in ((at_start, read_table(grpo, 0)), (at_end[-4:], read_table(grpo, 1)[-4:])):
        columns = [column for column in table if column != "kept"]
        assert columns == list(other)
        pd.testing.assert_frame_equal(table[columns].reset_index(drop=True), other.reset_index(drop=True))


def note_rollouts(functions):
    def noting(log_extra, log_metric, rollout, **kwargs):
        log_extra("note", [f"rollout {i}" for i in rollout])
        log_metric("noted", len(rollout))
        return functions[0](rollout=rollout, **kwargs)

    return [noting, functions[1]]


def test_training_goes_on_with_selection_after_evaluation(tmp_path):
    script = Script([F1])
    trainer = train(
        tmp_path,
        script,
        trainer_kwargs={"eval_dataset": script.dataset()},
        eval_strategy="steps",
        eval_steps=1,
        eval_on_start=True,
        per_device_eval_batch_size=4,
        max_steps=2,
        **N8_M4,
        **LOGGED,
    )
    assert [len(call) for call in script.calls] == [4, 8, 4, 8, 4]
    assert len(step_logs(trainer)) == 2
    assert all(logs["loss"] == pytest.approx(-0.19124, abs=1e-5) for logs in step_logs(trainer))
