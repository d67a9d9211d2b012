"""Plans: what is measured, the costs and variances that are predicted from it, and the pair that is recommended."""

import itertools
import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from fake_training import GRID, PLAN, PLANNED
from rig import COMMAND_LINE

from trl_pods.cli import main
from trl_pods.cli import plan as command
from trl_pods.comparison import training_process
from trl_pods.comparison.arms import train_on
from trl_pods.planning import measuring
from trl_pods.planning.costs import Line, Polyline, fit_costs, fit_line
from trl_pods.planning.measurement import Measurement, join_passes, read_measurement
from trl_pods.planning.pairs import CHECK, FIT, Grid, make_grid, plan_processes
from trl_pods.planning.recommendation import Option, reason, recommend
from trl_pods.planning.signal import Pools, Rule, check_rule, pool


FAKE = Path(__file__).parent / "fake_training.py"
nan = float("nan")


# What is measured

GRIDS = [
    Grid((8, 16, 32, 64, 128), (2, 4, 8, 16, 32)),
    Grid((64,), (2, 4, 8, 16, 32)),
    Grid((16, 32, 64), (8,) + (16,)),
    Grid((4, 8, 128), (4, 64, 128)),
    Grid((8, 16, 32, 64), (8,)),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_extremes_of_n_and_m_are_fitted_and_the_check_is_another_pair(grid):
    fitted = grid.fitted()
    assert set(fitted) <= set(grid.pairs())
    for position, sizes in enumerate((grid.n, grid.m)):
        seen = {pair[position] for pair in fitted}
        assert {sizes[0], sizes[-1]} <= seen
        assert len(seen) == min(3, len(sizes))
    assert grid.check() in set(grid.pairs()) - set(fitted)


def test_where_there_is_a_choice_neither_n_nor_m_of_the_check_was_fitted():
    assert GRIDS[0].fitted() == [(8, 2), (32, 8), (128, 32)]
    assert GRIDS[0].check() == (64, 16)


def test_a_recipe_of_plain_grpo_has_a_grid_too_and_sizes_that_do_not_fit_its_batch_are_left_out():
    assert make_grid({"num_generations": 8, "per_device_train_batch_size": 8}).n == (8, 16, 32, 64, 128)
    # Two rows on each of several devices: 8 of 16 leave one of them, 4 leave half of one.
    spread = {"num_rollouts": 64, "num_generations": 16, "per_device_train_batch_size": 2}
    assert make_grid(spread) == Grid((16, 32, 64, 128, 256), (8, 16, 32, 64))


@pytest.mark.parametrize(
    ("m", "changed"),
    [
        (32, {"gradient_accumulation_steps": 8}),
        (12, {"gradient_accumulation_steps": 3}),
        (4, {"gradient_accumulation_steps": 1}),
        (2, {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8}),
        (6, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 12}),  # 1.5 micro-batches
    ],
)
def test_another_m_leaves_prompts_and_if_possible_the_micro_batch_as_they_are(m, changed):
    recipe = {"num_generations": 8, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}
    assert train_on(recipe, m) == recipe | {"num_generations": m} | changed
    rounds = train_on(recipe | {"steps_per_generation": 4}, m)
    assert rounds["steps_per_generation"] == 2 * changed["gradient_accumulation_steps"]
    assert train_on(recipe | {"generation_batch_size": 64}, m)["generation_batch_size"] == 8 * m


def test_all_pairs_are_measured_with_the_policy_and_the_prompts_of_the_recipe_and_nothing_besides():
    recipe = {
        "num_rollouts": 32,
        "num_generations": 8,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "output_dir": "here",
        "num_accuracy_problems": 9,
        "max_train_minutes": 3.0,
        "env": {"A": 1},
        "use_vllm": True,
    }
    *pairs, small, large = plan_processes(recipe, make_grid(recipe), [4, 32], warmup=2, steps=6)
    assert [(pair.purpose, pair.n, pair.m) for pair in pairs] == [
        (FIT, 8, 2),
        (FIT, 32, 8),
        (FIT, 128, 32),
        (CHECK, 64, 16),
    ]
    for process in (*pairs, small, large):
        assert process.settings.items() >= {"learning_rate": 0.0, "max_steps": 8, "use_vllm": True}.items()
        assert process.settings["env"] == {"A": 1}
        assert not {"output_dir", "num_accuracy_problems", "max_train_minutes"} & process.settings.keys()
    for pair in pairs:
        settings = pair.settings
        rows = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
        assert rows == 4 * settings["num_generations"]  # 4 prompts
        assert "log_update_memory" not in settings
    for process, rows, kept in ((small, 4, 4), (large, 32, 8)):
        settings = process.settings
        assert (settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]) == (rows, 1)
        assert settings["num_rollouts"] == settings["num_generations"] == kept
        assert settings["log_update_memory"]


def test_a_round_of_several_steps_is_measured_to_its_end():
    recipe = PLANNED | {"num_iterations": 3}  # 2 micro-batches, 3 times, one for a step
    assert plan_processes(recipe, make_grid(recipe), [], 2, 6)[0].settings["max_steps"] == 48
    several = PLANNED | {"gradient_accumulation_steps": 4}  # two rounds a step
    assert plan_processes(several, make_grid(several), [], 2, 6)[0].settings["max_steps"] == 8


def test_in_several_passes_the_pairs_take_turns_and_memory_is_measured_once():
    grid = make_grid(PLANNED)
    once, thrice = plan_processes(PLANNED, grid, [8], 1, 3), plan_processes(PLANNED, grid, [8], 1, 3, passes=3)
    names = [process.name for process in once[:-1]]
    assert [process.name for process in thrice] == [
        *names,
        *(f"{name}-pass2" for name in names),
        *(f"{name}-pass3" for name in names),
        "rows8",
    ]
    assert [process.settings for process in thrice[:-1]] == 3 * [process.settings for process in once[:-1]]


NEEDED = ["--config", "RECIPE", "--output_dir", "out"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--config is missing. Name a recipe"),
        (["--config", "missing", "--output_dir", "out"], "There is no recipe 'missing'"),
        (["--config", "RECIPE"], "--output_dir is missing"),
        ([*NEEDED, "stray"], "Unexpected argument 'stray'"),
        ([*NEEDED, "--passes", "0"], "passes=0 is too few. Use for instance --passes 3"),
        ([*NEEDED, "--steps", "0"], "steps=0 is too few. Use for instance --steps 3"),
        ([*NEEDED, "--num_generations", "four"], "num_generations='four' is no number of rollouts"),
        ([*NEEDED, "--num_rollouts_grid", "1", "8"], "num_rollouts_grid=[1, 8] must be numbers from 2 on"),
        ([*NEEDED, "--num_generations_grid", "64", "128"], "Use for instance --num_generations_grid 4"),
        ([*NEEDED, *GRID, "64"], "num_generations_grid=[2, 4, 8, 64] has 64, and n is at most 32"),
        ([*NEEDED, "--num_rollouts_grid", "8", "--num_generations_grid", "4"], "leave no pair to check"),
        ([*NEEDED, "--num_generations_grid", "3", "4", "5"], "num_generations=3 does not fit in place of 4"),
        ([*NEEDED, "--memory_rows", "5"], "memory_rows=5 holds no group"),
        ([*NEEDED, "--selector", "shortest"], "Plan with --selector max_variance"),
        ([*NEEDED, "--selector", "best"], "selector='best' is not a rule"),
        ([*NEEDED, "--selector", "no_rules.mine"], "selector='no_rules.mine' cannot be imported"),
        ([*NEEDED, "--mask_truncated_completions"], "Plan with --mask_truncated_completions false"),
        ([*NEEDED, "--selecter", "random"], "Did you mean 'selector'?"),
        ([*NEEDED, "--model_name_or_path", "./x"], "model_name_or_path='./x' is no folder"),
    ],
)
def test_a_wrong_plan_is_refused_by_one_line_before_anything_is_measured(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    settings = {"num_rollouts": 16, "num_generations": 4, "per_device_train_batch_size": 2}
    recipe.write_text(yaml.safe_dump(settings | {"model_name_or_path": "embedded"}))
    assert main(["plan", *(str(recipe) if arg == "RECIPE" else arg for arg in args)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trl-pods: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()


def test_a_rule_in_the_current_directory_is_found_as_it_is_in_training(tmp_path, monkeypatch):
    (tmp_path / "rules_lying_here.py").write_text("def first(rewards, num_selected): ...")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # "" is the current directory
    monkeypatch.chdir(tmp_path)
    check_rule({"selector": "rules_lying_here.first", "mask_truncated_completions": False})
    assert sys.modules.pop("rules_lying_here").__file__ == str(tmp_path / "rules_lying_here.py")


def test_a_round_that_is_not_trained_on_to_its_end_is_left_out():
    # Three micro-batches a round and two a step: rounds start in the steps 1, 2, 4 and 5, and end in 2, 3 and 5.
    entries = [{"step": step, "loss": 0.0} for step in range(1, 6)] + [{"train_loss": 0.0, "time/update": 9.0}]
    for step in (1, 2, 4, 5):
        entries[step - 1] |= {"time/generate": step, "time/score": 0.0, "completions/mean_length": 10 * step}
    for step in (2, 3, 5):
        entries[step - 1] |= {"time/update": step / 10}
    rounds = measuring._rounds(entries, warmup=1)
    assert rounds == {"generate": [2, 4], "score": [0.0, 0.0], "update": [0.3, 0.5], "length": [20, 40]}
    measurement = Measurement(FIT, 8, 4, {}, rounds=rounds, rollouts=1)
    assert measurement.step_range() == (2.3, 4.5)
    assert measurement.seconds_per_token() == 0.1
    assert measuring._rounds(entries, warmup=3) == measuring._rounds([], warmup=0) == {}


# Costs


def test_a_line_goes_through_points_on_it_and_weighs_errors_by_their_size():
    assert fit_line([2, 8, 32], [0.14, 0.26, 0.74]) == Line(0.1, 0.02)
    # 10 % off at either end: a start and a slope that are 10 % off have equal relative errors.
    assert fit_line([1, 1000], [0.0011, 0.9]).per_row == pytest.approx(0.0009, rel=1e-2)


def test_no_coefficient_of_a_line_is_negative():
    through_zero = fit_line([8, 20], [0.1, 0.4])  # else it would start at -0.1
    assert through_zero.start == 0.0
    assert 0.1 / 8 < through_zero.per_row < 0.4 / 20
    falling = fit_line([8, 20], [0.3, 0.2])
    assert falling.per_row == 0.0
    assert 0.2 < falling.start < 0.3
    assert fit_line([8, 20], [0.0, 0.0]) == Line(0.0, 0.0)
    assert fit_line([8], [0.5]) == Line(0.5, 0.0)


def test_generation_is_interpolated_between_measured_sizes_and_goes_on_beyond_them():
    curve = Polyline((8, 32, 128), (1.0, 1.0, 4.0))
    assert [curve(n) for n in (8, 16, 32, 80, 128)] == [1.0, 1.0, 1.0, 2.5, 4.0]
    assert curve(160) == 5.0
    assert curve(4) == 1.0
    assert Polyline((8,), (1.5,))(100) == 1.5


def make_measurement(n, m, purpose=FIT, **fields):
    """Two rounds a step, and one outlier among three; 1 s + n / 8 s, n / 100 s, m / 4 s for a round."""
    rounds = {
        "generate": [1 + n / 8, 99.0, 1 + n / 8],
        "reward": [n / 100] * 3,
        "select": [0.0] * 3,
        "score": [0.0] * 3,
        "update": [m / 4] * 3,
        "length": [5.0] * 3,
    }
    return Measurement(purpose, n, m, {}, rounds_per_step=2.0, rollouts=4 * n, rounds=rounds, **fields)


def test_seconds_of_a_pair_are_the_sum_of_what_depends_on_n_and_on_m_for_all_rounds_of_a_step():
    measurements = [make_measurement(8, 2), make_measurement(16, 4), make_measurement(64, 16)]
    assert measurements[0].step_seconds() == pytest.approx(2 * (2 + 0.08 + 0.5))
    assert measurements[0].step_range() == pytest.approx((2 * (2 + 0.08 + 0.5), 2 * (99 + 0.08 + 0.5)))
    assert measurements[0].seconds_per_token() == pytest.approx(2 / (32 * 5))
    costs = fit_costs(measurements)
    assert costs.seconds("generate", 32, 2) == pytest.approx(10.0)
    assert costs.step_seconds(32, 8) == pytest.approx(2 * (5 + 0.32 + 2.0))


def test_the_rounds_of_all_passes_over_a_pair_are_one_measurement_with_the_rewards_of_the_first():
    def seconds(measurement, *values):
        measurement.rounds = {"generate": list(values), "update": [1.0] * len(values)}
        return measurement

    slow = seconds(make_measurement(8, 2, rewards=[[[1, 0, 7], [[[1.0], 8]]]]), 9.0, 9.0)
    other = seconds(make_measurement(16, 2, CHECK), 3.0)
    first, second = join_passes([slow, other, seconds(make_measurement(8, 2, rewards=[]), 2.0, 2.0, 2.5)])
    assert first.rounds == {"generate": [9.0, 9.0, 2.0, 2.0, 2.5], "update": [1.0] * 5}
    assert first.step_seconds() == 2 * (2.5 + 1.0)
    assert first.step_range() == (2 * (2.0 + 1.0), 2 * (9.0 + 1.0))
    assert first.rewards == slow.rewards
    assert second == other


# Rewards


def pools_of(*rewards, functions=("right",), **settings):
    rows = [[row if isinstance(row, tuple) else (row,) for row in of_prompt] for of_prompt in rewards]
    return Pools(Rule(functions, settings), [torch.tensor(of_prompt, dtype=torch.float64) for of_prompt in rows])


def expected_kept_variance_of_coins(p, n, m):
    """Of n coins k come up with binomial probability; half of the m kept are ones, or as near as there are enough."""
    total = 0.0
    for k in range(n + 1):
        ones = max(m - (n - k), min(k, m // 2))
        total += math.comb(n, k) * p**k * (1 - p) ** (n - k) * ones / m * (1 - ones / m)
    return total


def test_a_hand_worked_variance_of_two_coins():
    # They differ half of the time, and 1 and 0 have the variance 1/4.
    assert expected_kept_variance_of_coins(0.5, 2, 2) == 0.125
    assert pools_of([0, 1]).kept_variance(2, 2) == pytest.approx(0.125, abs=0.005)
    # Of four coins with 2 kept only all alike are without: 1 - 2 / 16 of the draws have 1/4.
    assert expected_kept_variance_of_coins(0.5, 4, 2) == 0.21875


@pytest.mark.parametrize(("num_right", "n", "m"), [(1, 8, 4), (1, 32, 8), (5, 16, 8), (9, 16, 4), (3, 6, 5)])
def test_the_kept_variance_of_binary_rewards_is_that_of_the_exact_sum(num_right, n, m):
    pools = pools_of([1] * num_right + [0] * (10 - num_right))
    assert pools.kept_variance(n, m) == pytest.approx(expected_kept_variance_of_coins(num_right / 10, n, m), abs=0.006)
    assert pools.plain_variance(m) == pytest.approx(num_right / 10 * (1 - num_right / 10) * (m - 1) / m)


def test_the_kept_variance_of_other_rewards_is_that_of_all_draws_and_all_subsets():
    values, n, m = [0.0, 0.3, 1.0], 4, 2
    best = [
        max(
            torch.tensor(kept, dtype=torch.float64).var(correction=0).item()
            for kept in itertools.combinations(draw, m)
        )
        for draw in itertools.product(values, repeat=n)
    ]
    assert pools_of(values).kept_variance(n, m) == pytest.approx(sum(best) / len(best), abs=0.004)
    # Without selection: that of the pool, (0.4333^2 + 0.1333^2 + 0.5667^2) / 3, times (m - 1) / m.
    assert pools_of(values).plain_variance(m) == pytest.approx(0.17556 / 2, abs=1e-4)


def test_the_mean_is_over_prompts_and_a_prompt_without_spread_adds_nothing():
    one, both = pools_of([0, 1]).kept_variance(16, 4), pools_of([0, 1], [1, 1, 1]).kept_variance(16, 4)
    assert both == pytest.approx(one / 2, abs=0.003)


def test_the_rule_of_the_recipe_selects_and_its_weights_add_up_the_reward():
    assert pools_of([0, 1], selector="max_reward").kept_variance(8, 2) < 0.02  # two ones, nearly always
    random = pools_of([0, 1], selector="random")
    assert random.kept_variance(8, 2) == pytest.approx(random.plain_variance(2), abs=0.01)
    two = ("right", "short")
    weighted = pools_of([(0, 0), (1, 2)], functions=two, reward_weights=[1.0, 0.5])  # 0 and 2
    assert weighted.kept_variance(64, 2) == pytest.approx(1.0)
    # What the rule looks at never differs, so that there is no signal, whatever the other function says.
    unseen = pools_of([(1, 0), (1, 2)], functions=two, selection_reward_funcs=["right"])
    assert unseen.kept_variance(64, 2) == 0.0
    assert pools_of([0, 0.1], min_reward_std=0.2).kept_variance(64, 2) == 0.0
    # Apart by rounding alone, as in training.
    rounded = pools_of([(1.0, 0), (1 + 1e-9, 2)], functions=two, selection_reward_funcs="right")
    assert rounded.kept_variance(64, 2) == 0.0


def test_a_rollout_without_a_score_is_kept_last_and_deviates_from_nothing():
    assert pools_of([nan, 0, 1]).kept_variance(64, 2) == pytest.approx(0.25)
    assert pools_of([nan]).kept_variance(8, 2) == 0.0
    assert pools_of([nan, nan]).plain_variance(2) == 0.0


def test_rewards_of_the_same_prompt_are_put_together_and_solved_is_1_or_more():
    first = make_measurement(4, 2, functions=["right"], rewards=[[[1, 0, 7], [[[1.0], 3], [[0.0], 1]]]])
    second = make_measurement(
        8,
        2,
        functions=["right"],
        rewards=[[[1, 0, 7], [[[0.0], 8]]], [[1, 1, 9], [[[None], 2], [[2.0], 2], [[0.5], 4]]]],
    )
    pools = pool([first, second], {})
    assert [len(rewards) for rewards in pools.rewards] == [12, 8]
    assert pools.pass_rates().tolist() == [0.25, 0.25]


# The recommendation


def option(n, m, seconds, variance):
    return Option(n, m, {"generate": seconds}, variance, 0.1)


def test_of_pairs_that_are_nearly_as_good_the_smallest_n_and_then_the_smallest_m_is_taken():
    # Roots of m x variance by seconds: 2 / 2 = 1, 1.92 / 2 = 0.96, 0.96 / 1 = 0.96, 2.88 / 3 = 0.96, 0.8 / 1 = 0.8
    found = [option(64, 8, 2, 0.5), option(32, 8, 2, 0.4608), option(32, 4, 1, 0.2304), option(32, 16, 3, 0.5184)]
    assert [each.signal_per_second for each in found] == pytest.approx([1, 0.96, 0.96, 0.96])
    chosen = recommend([*found, option(16, 4, 1, 0.16)])
    assert (chosen.n, chosen.m) == (32, 4)
    text = reason(chosen, option(64, 4, 1.5, 0.24192), found)
    assert "num_rollouts=32, num_generations=4 (n / m = 8)" in text
    assert "variance by +5 % and the seconds by +50 %" in text
    assert "n near 64 and n / m of 2 to 4" in text
    assert "heuristic" in text
    assert "the most in the grid" not in text
    edge = reason(found[0], option(128, 8, 4, 0.5), found)
    assert "num_rollouts=64 is the most in the grid: more may be better still." in edge


def test_without_any_variance_nothing_is_recommended():
    assert recommend([option(8, 2, 1.0, 0.0), option(16, 2, 1.0, 0.0)]) is None
    assert reason(None, None, []).startswith("No recommendation: in every prompt all rollouts got the same reward")


# Measuring, by a stand-in for the training


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(training_process, "_COMMAND", [sys.executable, str(FAKE)])
    monkeypatch.setattr(measuring, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(command, "_check", lambda *_: None)


@pytest.fixture
def run(tmp_path, fake):
    def run(model="learn", *more):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(PLANNED | {"model_name_or_path": model}))
        return main(["plan", "--config", str(recipe), "--output_dir", str(tmp_path / "out"), *PLAN, *more])

    return run


def rows_of(text, start):
    return [line.replace("*", "").strip("| ").split(" | ") for line in text.splitlines() if line.startswith(start)]


def test_a_plan_says_what_was_measured_predicted_and_recommended(run, tmp_path, capsys):
    assert run("learn", "--reward_weights", "1.0", "0.0") == 0
    out = tmp_path / "out"
    printed, text = capsys.readouterr().out, (out / "plan.md").read_text()
    assert {path.stem for path in (out / "measurements").iterdir()} == {
        *("n8-m2", "n16-m4", "n32-m8", "n32-m4"),
        *("rows4", "rows8"),
    }
    assert list((out / "work").iterdir()) == []
    # 2 steps a round. Of n = 16, m = 8: generation and reward (2.6 + 0.32) / 2, update 4 / 2.
    pair = next(row for row in rows_of(printed, "| ") if row[:2] == ["16", "8"])
    assert pair[2:6] == ["2", "3.460", "1.460", "2.000"]
    assert "| 32 | 4 | 3.420 | 3.420 | 3.420 to 3.420 | +0.0 % |" in printed
    assert "| 32 | 4 | 2.100 | 0.320 | 0.000 | 0.000 | 1.000 | 5.0 | check |" in text
    assert "- update: 0 + 0.25 m" in text
    assert "- reward: 0 + 0.01 n" in text
    # Prompt 0 of each round is never solved, the others by a half, a third and a quarter of 88 measured rollouts.
    assert "16 prompts, 25 % never right, 0 % always." in text
    pass_rate = next(row for row in rows_of(text, "| pass rate"))
    assert pass_rate[0] == "pass rate (right of 1 or more)"
    assert float(pass_rate[1]) == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 4) / 4, abs=0.02)
    assert "| 4 | 0.5 |" in text
    assert "| 8 | 1 |" in text
    assert "Recommended: num_rollouts=" in printed
    assert "Recommended: num_rollouts=" in text
    for name in ("pairs", "seconds", "pass_rates", "motivation"):
        assert (out / f"{name}.png").stat().st_size > 5_000
        assert f"({name}.png)" in text
    assert "m = 8" in (out / "pairs.svg").read_text()
    assert "never solved" in (out / "pass_rates.svg").read_text()
    # A token of 32 x 4 rollouts costs (1 + 3.2) / 32 of what one of 4 x 4 does, (1 + 0.4) / 4: 2.67 times less.
    assert "up to 2.67 times cheaper" in (out / "motivation.svg").read_text()


def test_what_is_measured_is_not_measured_again_and_other_settings_are_refused(run, tmp_path, capsys):
    assert run() == 0
    files = sorted((tmp_path / "out" / "measurements").iterdir())
    before = [path.stat().st_mtime_ns for path in files]
    first = (tmp_path / "out" / "plan.md").read_text()
    capsys.readouterr()
    assert run() == 0
    assert "6 of 6 processes are measured already." in capsys.readouterr().out
    assert [path.stat().st_mtime_ns for path in files] == before
    assert (tmp_path / "out" / "plan.md").read_text() == first
    assert run("learn", "--passes", "2") == 0
    assert [path.stat().st_mtime_ns for path in files] == before
    names = {path.stem for path in (tmp_path / "out" / "measurements").iterdir()}
    assert names - {path.stem for path in files} == {f"{n}-pass2" for n in ("n8-m2", "n16-m4", "n32-m8", "n32-m4")}
    assert "medians over 6 rounds of each pair" in (tmp_path / "out" / "plan.md").read_text()
    assert run("learn", "--num_rollouts_grid", "8", "16", "32", "64") == 0  # one more pair, perhaps another check
    assert run("learn", "--temperature", "0.5") == 2
    assert "temperature=None, and temperature=0.5 is asked for now" in capsys.readouterr().err


def test_a_process_that_fails_is_reported_with_the_end_of_its_output(run, tmp_path, capsys):
    assert run("crash") == 1
    error = capsys.readouterr().err
    assert "n8-m2 failed. It ended with exit code 1 and 0 rounds." in error
    assert error.rstrip().endswith("RuntimeError: out of memory")
    assert not (tmp_path / "out" / "measurements").exists()


def test_one_that_only_measures_memory_may_run_out_of_it(run, tmp_path):
    assert run("crash for memory") == 0
    assert read_measurement(tmp_path / "out" / "measurements" / "rows8.json").error.endswith("out of memory")
    assert "| 8 | failed: RuntimeError: out of memory |" in (tmp_path / "out" / "plan.md").read_text()


def test_without_matplotlib_the_table_is_to_be_had(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run() == 0
    printed = capsys.readouterr()
    assert "Recommended: " in printed.out
    assert "pip install 'trl-pods[report]'" in printed.err
    assert not list((tmp_path / "out").glob("*.png"))


def test_an_interrupted_plan_ends_its_process_leaves_whole_files_and_goes_on_later(run, tmp_path):
    out = tmp_path / "out"
    start = [sys.executable, str(FAKE), "plan", str(out), "sleep"]
    process = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    noted, deadline = [], time.monotonic() + 60
    while len(noted) < 2 and time.monotonic() < deadline:
        path = out / "running.json"
        noted = json.loads(path.read_text()) if path.is_file() else []
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not psutil.pid_exists(noted[1]["pid"])
    assert not (out / "measurements").exists()
    assert run() == 0
    assert (out / "plan.md").is_file()


# A real one


@pytest.mark.slow
def test_a_plan_for_the_embedded_task_predicts_what_it_did_not_see(tmp_path):
    out = tmp_path / "out"
    settings = ["--per_device_train_batch_size", "16", "--num_generations", "4", "--num_rollouts", "8"]
    grid = ["--num_rollouts_grid", "4", "8", "--num_generations_grid", "2", "4"]
    args = ["plan", "--config", "quickstart", "--output_dir", str(out), *grid, "--memory_rows", "8", "--steps", "2"]
    command = [*COMMAND_LINE, *args, "--warmup", "1", *settings]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    measured = {path.stem: read_measurement(path) for path in (out / "measurements").iterdir()}
    assert {name: found.purpose for name, found in measured.items()} == {
        "n4-m2": FIT,
        "n8-m4": FIT,
        "n8-m2": CHECK,
        "rows8": "memory",
    }
    for name in ("n4-m2", "n8-m4", "n8-m2"):
        found = measured[name]
        assert found.rollouts == 4 * found.n
        assert len(found.rounds["generate"]) == len(found.rounds["update"]) == 2
        assert len(found.rewards) == 3 * 4  # of the warm-up too
        assert {sum(count for _, count in counts) for _, counts in found.rewards} == {found.n}
        assert found.functions == ["addition_reward"]
    # Everywhere the same prompts: their rewards go together.
    assert len({tuple(prompt) for found in measured.values() for prompt, _ in found.rewards}) == 12
    assert 0 < measured["rows8"].rounds["memory"][0] < 1
    text = (out / "plan.md").read_text()
    assert "| 8 | 2 | " in text.split("## Check of the prediction")[1]
    assert (out / "motivation.png").is_file()
