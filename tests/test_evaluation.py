"""Evaluation drops nothing."""

import pandas as pd
import pytest
from rig import F1, LOGGED, N8_M4, Group, Script, make_trainer, step_logs, train
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer


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
    varying = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time"}
    assert {k: v for k, v in pods.items() if k not in varying} == {k: v for k, v in grpo.items() if k not in varying}


def test_evaluation_does_not_select(tmp_path):
    metrics, script = evaluate(
        tmp_path, PODSGRPOTrainer, PODSGRPOConfig, [[1, 0, 0, 0], [1, 0, 0, 0]], 4, num_rollouts=8
    )
    assert metrics["eval_reward"] == 0.25  # selecting two of four would give 0.5
    assert [len(call) for call in script.calls] == [4, 4]
    table = pd.read_parquet(tmp_path / "completions" / "completions_00000.parquet")
    assert table["kept"].tolist() == [True] * 8


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
