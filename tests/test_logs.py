"""Metrics, times and the completions table."""

import json
import os
import sqlite3
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
from rig import F1, LOGGED, N4_M2, N8_M4, Group, Script, make_trainer, only_log, read_table, step_logs, train
from trl import GRPOConfig, GRPOTrainer
from trl.extras.profiling import ProfilingContext
from trl.trainer import grpo_trainer

from trl_pods import PODSGRPOTrainer
from trl_pods.log_file import LogFileCallback


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


def test_a_group_has_no_spread_if_all_its_rollouts_have_none_not_the_kept_ones(tmp_path):
    script = Script([Group([1, 1, 0, 0]), Group([1, 1, 1, 1])])
    settings = N4_M2 | {"per_device_train_batch_size": 4, "selector": "max_reward"}
    logs = only_log(train(tmp_path, script, **settings))
    assert logs["frac_reward_zero_std"] == 0.5
    assert logs["pods/kept_reward_std"] == 0


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
            "time/train",
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


F1_ADVANTAGES = [-0.76495, 0.76495, -0.95618, 0.95618]
TWO_GROUPS = [F1, Group([1, 0, 0, 0, 0, 0, 0, 0])]


def test_the_completions_table_shows_every_rollout(tmp_path):
    trainer = train(
        tmp_path, Script(TWO_GROUPS), max_steps=3, **(N8_M4 | {"per_device_train_batch_size": 8}), **LOGGED
    )
    assert len(list((tmp_path / "completions").iterdir())) == 3
    for step in (1, 2, 3):
        table = read_table(trainer, step)
        assert list(table.columns) == ["step", "prompt", "completion", "f1", "kept", "advantage"]
        assert table["step"].tolist() == [step] * 16
        assert table["prompt"].tolist() == ["w10 w3 w4"] * 8 + ["w11 w3 w4"] * 8
        completions = [group.completion(i) for group in TWO_GROUPS for i in range(8)]
        assert table["completion"].tolist() == [" ".join(f"w{token}" for token in ids[:-1]) for ids in completions]
        assert table["f1"].tolist() == pytest.approx([reward for group in TWO_GROUPS for reward in group.rewards])
        assert table["kept"].dtype == bool
        assert table["kept"].tolist() == [i in (0, 1, 4, 5) for i in range(8)] + [i < 4 for i in range(8)]
        assert table["advantage"].isna().tolist() == (~table["kept"]).tolist()
        assert table["advantage"].dropna().tolist() == pytest.approx(
            [*F1_ADVANTAGES, 1.4997, -0.4999, -0.4999, -0.4999], abs=1e-4
        )


@pytest.mark.parametrize("num_shown", [2, None])
def test_a_sample_of_all_completions_is_printed(tmp_path, capsys, monkeypatch, num_shown):
    printed = []

    def spy(prompts, completions, rewards, advantages, step, num_samples, extra):
        printed.append([len(c) for c in (prompts, completions, advantages, *rewards.values(), *extra.values())])
        print_sample(prompts, completions, rewards, advantages, step, num_samples, extra=extra)

    monkeypatch.setenv("COLUMNS", "200")
    print_sample = grpo_trainer.print_prompt_completions_sample
    monkeypatch.setattr(grpo_trainer, "print_prompt_completions_sample", spy)
    settings = N8_M4 | {"per_device_train_batch_size": 8, "num_completions_to_print": num_shown, "max_steps": 2}
    train(tmp_path, Script(TWO_GROUPS), log_completions=True, **settings)
    assert printed == [[16] * 5] * 3  # prompt, completion, advantage, f1, kept; the last one again as training ends
    shown = capsys.readouterr().out
    assert shown.count("kept ") == 3
    assert shown.count("True") + shown.count("False") == 3 * (num_shown or 16)


# Tables of a tracker


class Tracker:
    """Stands for trackio: keeps the tables that TRL sends."""

    def __init__(self):
        self.tables = []

    def Table(self, dataframe):  # noqa: N802
        return dataframe

    def log(self, logs):
        self.tables.append(logs["completions"])


@pytest.mark.parametrize("log_unique_prompts", [False, True])
def test_a_tracker_gets_the_table_of_all_rollouts(tmp_path, monkeypatch, log_unique_prompts):
    tracker = Tracker()
    monkeypatch.setattr(grpo_trainer, "trackio", tracker, raising=False)
    monkeypatch.setattr(ProfilingContext, "_log_metrics", lambda *args: None)
    trainer = make_trainer(
        tmp_path,
        Script(TWO_GROUPS),
        log_unique_prompts=log_unique_prompts,
        max_steps=3,
        **(N8_M4 | {"per_device_train_batch_size": 8}),
        **LOGGED,
    )
    trainer.args.report_to = ["trackio"]  # now, so that nothing but TRL's tables goes to the tracker
    trainer.train()
    rows = [0, 8] if log_unique_prompts else list(range(16))  # the first of each prompt, or all
    # The last one is sent again as training ends.
    for step, table in zip((1, 2, 3, 3), tracker.tables, strict=True):
        pd.testing.assert_frame_equal(table, read_table(trainer, step).iloc[rows])
        assert table["kept"].tolist() == [row in (0, 1, 4, 5, 8, 9, 10, 11) for row in rows]


@pytest.mark.slow
def test_trackio_takes_the_table(tmp_path):
    pytest.importorskip("trackio", reason="trackio is not installed")
    code = (
        "import sys; from rig import *\n"
        "train(sys.argv[1], Script([F1]), report_to='trackio', project='pods', max_steps=2, **N8_M4, **LOGGED)"
    )
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    with sqlite3.connect(tmp_path / "trackio" / "pods.db") as database:
        logged = [json.loads(metrics) for (metrics,) in database.execute("select metrics from metrics order by id")]
    tables = [metrics["completions"]["_value"] for metrics in logged if "completions" in metrics]
    assert [table[0]["step"] for table in tables] == [1, 2, 2]  # the last one again as training ends
    for table in tables:
        assert [row["kept"] for row in table] == [i in (0, 1, 4, 5) for i in range(8)]
        assert [row["f1"] for row in table] == pytest.approx(F1.rewards)
        assert [row["advantage"] for row in table if row["kept"]] == pytest.approx(F1_ADVANTAGES, abs=1e-4)


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


def test_the_log_file_of_a_resumed_run_ends_the_line_that_a_kill_has_torn_and_every_other_line_is_json(tmp_path):
    def refuse(constant):
        raise AssertionError(constant)

    path = tmp_path / "run" / "log.jsonl"
    args = SimpleNamespace(to_dict=lambda: {"weights": [1.0, float("nan"), (float("inf"),)]}, world_size=1)
    state = SimpleNamespace(is_world_process_zero=True, global_step=0)
    callback = LogFileCallback(path)
    callback.on_train_begin(args, state, None)
    callback.on_log(args, state, None, {"loss": float("nan"), "parts": [{"a": float("-inf")}]})
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    state.global_step = 2
    callback.on_train_begin(args, state, None)
    callback.on_train_begin(args, state, None)  # nothing to end now
    header, entry, torn, *resumed = path.read_text().splitlines()
    assert torn == '{"step": 3, "lo'
    header, entry, *resumed = (json.loads(line, parse_constant=refuse) for line in (header, entry, *resumed))
    assert header["settings"] == {"weights": [1.0, None, [None]], "world_size": 1}
    assert entry == {"step": 0, "loss": None, "parts": [{"a": None}]}
    assert [again["settings"] for again in resumed] == [header["settings"]] * 2


def test_a_reward_function_by_the_name_of_a_column_is_refused_before_training(tmp_path):
    def kept(completions, **kwargs):
        return [0.0] * len(completions)

    settings = {"trainer_kwargs": {"reward_funcs": [kept]}}
    with pytest.raises(ValueError, match="The reward function 'kept' takes a name that .* instance 'my_kept'"):
        make_trainer(tmp_path, Script([F1]), **settings, **N8_M4, **LOGGED)
    make_trainer(tmp_path, Script([F1]), **settings, **N8_M4)  # without a table there is no such column
