"""Metrics, times and the completions table."""

import pytest
from rig import F1, LOGGED, N4_M2, N8_M4, Group, Script, only_log, read_table, step_logs, train
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOTrainer


def test_rewards_and_lengths_are_logged_over_all_rollouts(tmp_path):
    logs = only_log(train(tmp_path, Script([F1]), **N8_M4))
    assert logs["reward"] == pytest.approx(0.5125)
    assert logs["reward_std"] == pytest.approx(0.34512, abs=1e-5)
    assert logs["rewards/f1/mean"] == pytest.approx(0.5125)
    assert logs["rewards/f1/std"] == pytest.approx(0.34512, abs=1e-5)
    assert logs["completions/mean_length"] == 4.625
    assert logs["num_tokens"] == 61
    assert logs["pods/kept_reward"] == pytest.approx(0.5)
    assert logs["pods/kept_reward_std"] == pytest.approx(0.52281, abs=1e-5)
    assert logs["pods/kept_length"] == 4.5
    assert logs["pods/ineligible"] == 0.0


def test_the_logged_reward_is_the_policys(tmp_path):
    script = Script([Group([0] * 11 + [1] + [0] * 4)])
    logs = only_log(train(tmp_path, script, num_rollouts=16, num_generations=4, per_device_train_batch_size=4))
    assert logs["reward"] == 0.0625
    assert logs["pods/kept_reward"] == 0.25


@pytest.mark.parametrize(
    "settings",
    [{}, {"scale_rewards": "batch"}, {"scale_rewards": "none"}, {"multi_objective_aggregation": "normalize_then_sum"}],
    ids=str,
)
def test_metrics_over_all_are_those_of_grpo_that_trains_on_all(tmp_path, settings):
    rewards = [[(0.1, 1), (0.9, 0), (None, 0.5), (0, 0)], [(1, 1)] * 4]
    groups = [Group(values, [2, 3, 4, 5]) for values in rewards]
    settings = {"reward_weights": [1, 0.5], **settings}
    pods = train(
        tmp_path / "pods", Script(groups, num_functions=2), **(N4_M2 | {"per_device_train_batch_size": 4}), **settings
    )
    grpo = train(
        tmp_path / "grpo",
        Script(groups, num_functions=2),
        GRPOTrainer,
        GRPOConfig,
        num_generations=4,
        per_device_train_batch_size=8,
        **settings,
    )
    ours, theirs = only_log(pods), only_log(grpo)
    described = [key for key in theirs if key.startswith(("reward", "completions/", "num_tokens", "frac_"))]
    assert len(described) >= 15
    for key in described:
        assert ours[key] == theirs[key], key


def test_functions_of_one_name_are_logged_as_in_grpo(tmp_path):
    script = Script([Group([(0, 1), (1, 1), (0.5, 0), (0.25, 0)])], num_functions=2)
    functions = script.reward_functions()
    functions[1].__name__ = "f1"
    logs = only_log(train(tmp_path, script, trainer_kwargs={"reward_funcs": functions}, **N4_M2))
    assert logs["rewards/f1/mean"] == pytest.approx((0.4375 + 0.5) / 2)


@pytest.mark.parametrize("settings", [N8_M4, {"num_generations": 8, "per_device_train_batch_size": 8}])
def test_the_times_of_a_round_are_logged(tmp_path, settings):
    trainer = train(tmp_path, Script([F1]), max_steps=3, **settings)
    for logs in step_logs(trainer):
        assert {key for key in logs if key.startswith("time/")} == {
            "time/generate",
            "time/reward",
            "time/select",
            "time/score",
            "time/update",
        }
        assert logs["time/generate"] > 0
        assert logs["time/update"] > 0
        assert (logs["time/select"] > 0) == ("num_rollouts" in settings)
        assert logs["time/score"] == 0


def test_update_time_is_logged_once_a_round(tmp_path):
    for accumulation, steps, rounds in ((1, 8, 2), (4, 3, 3), (8, 1, 2)):
        counts = {}

        class Spy(PODSGRPOTrainer):
            def log(self, logs, start_time=None, counts=counts):
                counts.update({key: len(values) for key, values in self._metrics["train"].items()})
                super().log(logs, start_time)

        train(
            tmp_path,
            Script([F1] * 4),
            Spy,
            num_rollouts=8,
            num_generations=4,
            per_device_train_batch_size=1,
            steps_per_generation=4,
            gradient_accumulation_steps=accumulation,
            max_steps=steps,
            logging_strategy="no",
        )
        assert counts["time/update"] == counts["time/generate"] == rounds, accumulation


def test_the_completions_table_shows_every_rollout(tmp_path):
    groups = [F1, Group([1, 0, 0, 0, 0, 0, 0, 0])]
    trainer = train(tmp_path, Script(groups), max_steps=3, **(N8_M4 | {"per_device_train_batch_size": 8}), **LOGGED)
    for step in (1, 2, 3):
        table = read_table(trainer, step)
        assert list(table.columns) == ["step", "prompt", "completion", "f1", "kept", "advantage"]
        assert table["f1"].tolist() == pytest.approx([*F1.rewards, *groups[1].rewards])
        assert table["kept"].dtype == bool
        assert table["kept"].tolist() == [i in (0, 1, 4, 5) for i in range(8)] + [i < 4 for i in range(8)]
        assert table["advantage"].isna().tolist() == (~table["kept"]).tolist()
        assert table["advantage"].dropna().tolist() == pytest.approx(
            [-0.76495, 0.76495, -0.95618, 0.95618, 1.4997, -0.4999, -0.4999, -0.4999], abs=1e-4
        )
        lengths = [len(text.split()) + 1 for text in table["completion"]]
        assert lengths == [*F1.lengths, *groups[1].lengths]


def test_printing_a_sample_of_completions_works(tmp_path, capsys):
    train(tmp_path, Script([F1]), log_completions=True, num_completions_to_print=2, **N8_M4)
    assert "kept" in capsys.readouterr().out


def test_extra_columns_and_metrics_of_reward_functions_are_logged(tmp_path):
    def logging(completions, rollout, log_extra, log_metric, **kwargs):
        log_extra("note", [f"rollout {i}" for i in rollout])
        log_metric("longest", 8.0)
        return [F1.rewards[i] for i in rollout]

    trainer = train(tmp_path, Script([F1]), trainer_kwargs={"reward_funcs": [logging]}, **N8_M4, **LOGGED)
    assert read_table(trainer)["note"].tolist() == [f"rollout {i}" for i in range(8)]
    assert only_log(trainer)["longest"] == 8.0


@pytest.mark.parametrize(
    ("column", "num_values", "message"),
    [("kept", 8, "takes a name that the completions table uses"), ("note", 7, "got 7 values for 8 completions")],
)
def test_extra_columns_that_would_spoil_the_table_are_refused(tmp_path, column, num_values, message):
    def logging(completions, log_extra, **kwargs):
        log_extra(column, [0] * num_values)
        return [0.0] * len(completions)

    with pytest.raises(ValueError, match=message):
        train(tmp_path, Script([F1]), trainer_kwargs={"reward_funcs": [logging]}, **N8_M4, **LOGGED)
