"""What a report says: its statistics by hand, the authors' data, and the files it writes."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from paper_curves import CURVES, GSM8K, SETTINGS, multi_gpu_runs, single_gpu_runs

from trl_pods.cli import main
from trl_pods.comparison.run_file import FAILED, FINISHED, Run, write_json, write_run
from trl_pods.report import plots
from trl_pods.report.statistics import SpeedUp, at_grid, band, bootstrap, make_grid, speed_up
from trl_pods.report.summary import SHARES, best, summarize
from trl_pods.report.tables import accuracy_text, report_text


GRID = np.array([0.0, 10.0, 20.0, 30.0, 40.0])


def make_run(arm, seed, sampled, **fields):
    """A run of 40 seconds, measured every 10; a step lasts 2 seconds and has two rounds."""
    seconds = [0.0, 10.4, 20.1, 30.0, 41.0][: len(sampled)]
    log = {
        "step": [5, 10, 15, 20],
        "time/train": [10.0, 20.0, 30.0, 40.0],
        "time/generate": [0.2, 0.4, 0.2, 0.4],
        "time/reward": [0.1] * 4,
        "time/select": [0.05] * 4,
        "time/score": [0.0] * 4,
        "time/update": [0.3, 0.3, 0.3, None],
        "reward": [0.1, 0.2, 0.3, 0.4],
        "completions/mean_length": [4.0] * 4,
    }
    if arm != "grpo":
        log |= {"pods/kept_reward": [0.5] * 4, "pods/kept_length": [3.0] * 4}
    accuracy = {"seconds": seconds, "step": [0, 5, 10, 15, 20][: len(sampled)], "sampled": sampled}
    run = Run(arm, seed, FINISHED, {"num_rollouts": 32}, 40.0, 10.0, rounds_per_step=2.0, accuracy=accuracy, log=log)
    return replace(run, versions={"trl": "1.16.0"}, hardware={"cpu": "a CPU", "accelerators": []}, **fields)


GRPO = [[0.1, 0.2, 0.3, 0.4, 0.5], [0.1, 0.2, 0.5, 0.4, 0.7]]  # mean .1 .2 .4 .4 .6
PODS = [[0.1, 0.5, 0.6, 0.6, 0.6], [0.1, 0.5, 0.6, 0.8, 0.6]]  # mean .1 .5 .6 .7 .6
SLOW = [[0.1, 0.1, 0.2, 0.3, 0.3], [0.1, 0.1, 0.2, 0.3, 0.3]]
ARMS = {"grpo": GRPO, "pods": PODS, "slow": SLOW}


def all_runs():
    return [make_run(arm, seed, curve) for arm, curves in ARMS.items() for seed, curve in enumerate(curves, 1)]


# Statistics


def test_the_speed_up_is_the_ratio_of_the_first_grid_times_at_the_share_of_the_best():
    found = speed_up(GRID, np.array(GRPO), np.array(PODS))
    assert found.target == pytest.approx(0.594)
    assert (found.baseline_time, found.time, found.ratio) == (40.0, 20.0, 2.0)
    assert speed_up(GRID, np.array(GRPO), np.array(PODS), share=0.6).ratio == 2.0  # 0.36: 20 s against 10 s
    assert speed_up(GRID, np.array(GRPO), np.array(GRPO)).ratio == 1.0


def test_the_start_is_left_out():
    falling = np.array([[0.9, 0.3, 0.4, 0.5, 0.5]])
    found = speed_up(GRID, falling, falling, share=1.0)
    assert (found.target, found.time) == (0.5, 30.0)


def test_never_is_said_and_not_a_number():
    found = speed_up(GRID, np.array(GRPO), np.array(SLOW))
    assert (found.time, found.ratio) == (None, None)


def test_the_bootstrap_is_that_of_all_possible_draws():
    # Each arm draws its runs (a, b) as aa, ab, ba or bb. The baseline is always at its best at 30 s. The other arm is
    # there at 10 s; with bb (a quarter of its draws) never.
    baseline = np.array([[0, 0.1, 0.2, 0.4, 0.4]] * 2)
    arm = np.array([[0, 0.8, 0.8, 0.8, 0.8], [0, 0, 0, 0, 0]])
    found = bootstrap(GRID, baseline, arm, num_draws=4000)
    assert found.never == pytest.approx(0.25, abs=0.03)
    assert (found.low, found.median, found.high) == (None, 3.0, 3.0)
    sure = bootstrap(GRID, baseline, baseline)
    assert (sure.low, sure.median, sure.high, sure.never) == (1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(("baseline", "arm"), [(GRPO[:1], PODS), (GRPO, PODS[:1])])
def test_of_a_single_run_there_is_no_interval(baseline, arm):
    assert bootstrap(GRID, np.array(baseline), np.array(arm)) is None
    runs = [make_run(a, i, c) for a, curves in (("grpo", baseline), ("pods", arm)) for i, c in enumerate(curves)]
    assert re.search(r"\| \d\.\d\d \(one run: no interval\) \|", accuracy_text(summarize(runs, "grpo")))


def test_a_baseline_that_learned_nothing_gives_no_speed_up():
    nothing = np.array([[0.1, 0, 0, 0, 0]] * 2)  # what was right at the start is left out
    assert speed_up(GRID, nothing, np.array(PODS)).ratio is None
    assert bootstrap(GRID, nothing, np.array(PODS)) is None
    runs = [make_run(a, i, list(c)) for a, curves in (("grpo", nothing), ("pods", PODS)) for i, c in enumerate(curves)]
    text = accuracy_text(summarize(runs, "grpo"))
    assert "The baseline, grpo, learned nothing: its accuracy is 0 at every time after the start." in text
    assert "at 30 s |  | none: the baseline learned nothing |" in text
    assert "1.00" not in text
    # Half of its runs did: with two of them a quarter of the draws has none that did.
    half = bootstrap(GRID, np.array([nothing[0], GRPO[0]]), np.array(PODS))
    assert half.high == np.inf
    assert half.low > 0


def test_the_same_runs_give_the_same_interval():
    assert bootstrap(GRID, np.array(GRPO), np.array(PODS)) == bootstrap(GRID, np.array(GRPO), np.array(PODS))


def test_a_grid_has_the_end_and_takes_the_nearest_measurement():
    assert make_grid(90, 6).tolist() == [6.0 * i for i in range(16)]
    assert len(make_grid(60 * 1.5, 60 * 0.1)) == 16  # for all that 0.1 is not exact
    assert at_grid([0.0, 9.0, 21.0], [1, 2, 3], GRID[:4]).tolist() == [1, 2, 3, 3]
    assert at_grid([5.0, 15.0], [1, 2], np.array([10.0])).tolist() == [1]  # both are as near: the earlier


def test_a_band_is_1_96_standard_errors_and_none_with_one_run():
    mean, half = band(np.array([[0.5, 0.2], [0.7, 0.2]]))  # standard deviation 0.141, standard error 0.1
    assert mean.tolist() == pytest.approx([0.6, 0.2])
    assert half.tolist() == pytest.approx([0.196, 0.0])
    assert np.isnan(band(np.array([[0.5]]))[1]).all()


# From runs


def test_seconds_of_a_step_are_those_of_its_rounds_and_the_rest():
    arm = summarize(all_runs(), "grpo").arms[1]
    assert arm.step_seconds() == pytest.approx([2.05, 2.05])  # 41 s, 20 steps
    # Two rounds a step: generation 0.3, reward and selection 0.15, update 0.3 where it was logged.
    assert arm.phase_seconds() == pytest.approx(
        {"generation": 0.6, "reward, selection": 0.3, "scoring": 0.0, "update": 0.6, "other": 0.55}
    )


def test_series_are_means_of_the_entries_since_the_grid_time_before():
    runs = [make_run("grpo", 1, GRPO[0])]
    runs[0].log = {"time/train": [3.0, 10.0, 31.0], "reward": [0.1, 0.3, None]}
    series = summarize(runs, "grpo").arms[0].series("reward", GRID)
    assert series[1] == pytest.approx(0.2)
    assert np.isnan(series[[0, 2, 3, 4]]).all()
    assert np.isnan(summarize(runs, "grpo").arms[0].series("pods/kept_reward", GRID)).all()


@pytest.mark.parametrize(
    ("runs", "baseline", "message"),
    [
        ([], "grpo", "no finished runs to report on \\(0 failed\\)"),
        ([make_run("grpo", 1, GRPO[0])], "ppo", "baseline='ppo' has no finished run. Use one of grpo"),
        (
            [make_run("grpo", 1, GRPO[0]), replace(make_run("pods", 1, PODS[0]), duration=50.0)],
            "grpo",
            "last \\[40.0, 50.0\\] seconds .* they do not compare",
        ),
    ],
)
def test_runs_that_do_not_compare_are_refused(runs, baseline, message):
    with pytest.raises(ValueError, match=message):
        summarize(runs, baseline)


def test_the_tables_say_what_was_reached_when_and_what_never():
    failed = Run("slow", 3, FAILED, {}, 40.0, 10.0, error="It ended.")
    text = report_text(summarize([*all_runs(), failed], "grpo"), plots=["accuracy.png"])
    grpo, pods, slow = (next(line for line in text.splitlines() if line.startswith(f"| {arm} ")) for arm in ARMS)
    assert grpo == "| grpo | 2 | 10.0 % | 60.0 % +- 19.6 | 60.0 % +- 19.6 at 40 s | 40 s | baseline |"
    assert "| 70.0 % +- 19.6 at 30 s | 20 s | 2.00 (" in pods
    assert "| 2 (and 1 failed) | 10.0 % | 30.0 % +- 0.0 |" in slow
    assert "| never reached (59.4 % asked for) | never reached, nor in any draw |" in slow
    assert "| pods | 20 | 2.05 | 2.05 to 2.05 | 0.600 | 0.300 | 0.000 | 0.600 | 0.550 |" in text
    assert "![accuracy](accuracy.png)" in text
    assert "- Hardware: cpu a CPU, accelerators none" in text
    assert "- pods: num_rollouts 32, seeds 1, 2" in text


def test_an_arm_whose_runs_all_failed_is_told_with_the_end_of_its_error():
    failed = [
        Run("broken", seed, FAILED, {}, 40.0, 10.0, error="It ended.\nTraceback\nRuntimeError: out of memory\n")
        for seed in (1, 2)
    ]
    summary = summarize([*all_runs(), *failed], "grpo", order=["broken", "grpo", "not run yet"])
    line = "\n- broken: 0 of 2 runs finished (RuntimeError: out of memory)\n"
    assert line in accuracy_text(summary) + "\n"
    assert line in report_text(summary)
    assert "not run yet" not in report_text(summary)


def test_runs_on_different_machines_are_told():
    runs = all_runs()
    runs[0].hardware = {"cpu": "another CPU"}
    assert "the runs differ (2 kinds), and their times do not compare" in report_text(summarize(runs, "grpo"))


# Files


@pytest.fixture
def folder(tmp_path):
    for run in all_runs():
        write_run(run, tmp_path / "runs" / f"{run.arm}-{run.seed}.json")
    return tmp_path


PLOTS = ["accuracy", "completion_length", "reward", "speed_up", "step_seconds"]


def test_the_command_writes_a_table_and_plots(folder, capsys):
    assert main(["report", str(folder), "--shares", "0.5"]) == 0
    assert "| pods | 2 |" in capsys.readouterr().out
    report = folder / "report"
    files = {path.name for path in report.iterdir()}
    assert files == {"report.md"} | {f"{name}.{kind}" for name in PLOTS for kind in ("png", "svg")}
    for name in PLOTS:
        assert (report / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f"({name}.png)" in (report / "report.md").read_text()
    assert "dashed: 0.99 of the best of grpo, 59.4 %" in (report / "accuracy.svg").read_text()
    assert "x: never reached" in (report / "speed_up.svg").read_text()
    assert "dotted: of the kept ones alone" in (report / "reward.svg").read_text()
    assert "| arm | 0.5 | 0.99 |" in (report / "report.md").read_text()


def test_arms_are_compared_after_equally_many_steps_too():
    short = make_run("short", 1, [0.1, 0.2, 0.3])  # 10 steps; the others made 20
    summary = summarize([*all_runs(), short], "grpo")
    assert summary.numbers_of_steps() == [5, 10, 20]
    assert summary.arms[0].accuracy_after(5).tolist() == [[0.2], [0.2]]
    assert summary.arms[0].accuracy_after(8) == pytest.approx(np.array([[0.26], [0.38]]))  # 3/5 between 5 and 10 steps
    text = report_text(summary)
    assert "| arm | 5 steps | 10 steps | 20 steps |" in text
    assert "| grpo | 20.0 % +- 0.0 | 40.0 % +- 19.6 | 60.0 % +- 19.6 |" in text  # 1.96 x 0.1
    assert "| short | 20.0 % | 30.0 % |  |" in text


def test_plots_say_of_which_arms_there_are_no_intervals(tmp_path):
    runs = [run for run in all_runs() if run.arm != "pods" or run.seed == 1]
    plots.draw_plots(summarize(runs, "grpo", shares=(0.99,)), tmp_path)
    for name, what in (("accuracy", "band"), ("speed_up", "interval")):
        text = (tmp_path / f"{name}.svg").read_text()
        assert re.findall(rf">(.*) \(one run: no {what}\)<", text) == ["pods"]
    alone = [run for run in all_runs() if run.arm != "grpo" or run.seed == 1]
    plots.draw_plots(summarize(alone, "grpo", shares=(0.99,)), tmp_path)
    assert re.findall(r">(.*) \(one run: no interval\)<", (tmp_path / "speed_up.svg").read_text()) == ["pods", "slow"]


def test_a_speed_up_of_no_end_is_drawn_within_the_plot(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, folder, name: figures.append(figure))
    runs = [make_run("grpo", 1, [0.0] * 5), *(run for run in all_runs() if run.arm == "pods")]
    runs.append(make_run("grpo", 2, GRPO[1]))
    plots._speed_up(summarize(runs, "grpo", shares=(0.99,)), tmp_path)
    (interval,) = [line.get_ydata() for line in figures[0].axes[0].lines if line.get_linewidth() == 2]
    assert np.isfinite(interval).all()
    assert interval[1] > interval[0]


def test_a_plot_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    def half(figure, path, **options):
        path.write_bytes(b"half")
        raise OSError("disk full")

    (tmp_path / "accuracy.svg").write_text("old")
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    with pytest.raises(OSError, match="disk full"):
        plots.draw_plots(summarize(all_runs(), "grpo"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["accuracy.svg"]
    assert (tmp_path / "accuracy.svg").read_text() == "old"


def test_speed_ups_that_are_never_reached_are_crosses(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, folder, name: figures.append(figure))
    plots._speed_up(summarize(all_runs(), "grpo", shares=(0.99, 1)), tmp_path)
    axes = figures[0].axes[0]
    points = [(line.get_marker(), line.get_ydata()[0]) for line in axes.lines if len(line.get_ydata()) == 1]
    assert points == [("o", 2.0), ("o", 2.0), ("x", 0), ("x", 0)]  # of pods, of slow


def test_arms_of_one_colour_have_different_lines():
    summary = summarize([make_run(f"arm{number}", 1, GRPO[0]) for number in range(12)], "arm0")
    looks = list(zip((color for _, color in plots._colored(summary)), plots._line_styles(summary), strict=True))
    assert len(set(looks)) == 12
    assert {style for _, style in looks[:9]} == {"-"}


def test_what_was_not_logged_is_not_drawn(tmp_path):
    run = make_run("grpo", 1, GRPO[0])
    write_run(replace(run, log={}), tmp_path / "run.json")
    assert main(["report", str(tmp_path), "--output_dir", str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"accuracy.png", "accuracy.svg", "report.md"}


def test_without_matplotlib_the_table_is_to_be_had(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(folder)]) == 2
    assert "pip install 'trl-pods[report]', or use --no_plots" in capsys.readouterr().err
    assert main(["report", str(folder), "--no_plots"]) == 0
    assert [path.name for path in (folder / "report").iterdir()] == ["report.md"]


def test_a_comparison_stopped_before_its_first_run_ended_has_no_finished_run_yet(tmp_path, capsys):
    write_json({"recipe": "quickstart", "baseline": "grpo", "arms": {"grpo": {}}}, tmp_path / "comparison.json")
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"trl-pods: error: There is no finished run in {tmp_path} yet. `trl-pods compare` with")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing"], "There is no folder missing"),
        ([".", "--shares", "2"], "2 is no share"),
        ([], "The folder is missing. Name the output_dir"),
        (["."], "no finished runs to report on"),
    ],
)
def test_a_wrong_command_line_is_refused_by_one_line(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


# The authors' data

needs_curves = pytest.mark.skipif(not CURVES.is_file(), reason=f"the authors' curves are not at {CURVES}")


@needs_curves
@pytest.mark.parametrize(
    ("setting", "target", "baseline_time", "ratio", "interval"),
    [
        ("GSM8K, 3B", 0.808212, 3.0 * 3600, 2.0, (1.00, 1.60, 2.67)),
        ("MATH, 3B", 0.484102, 5.0 * 3600, 2.0, (1.12, 1.83, 2.50)),
        ("GSM8K, Llama", 0.387384, 1.5 * 3600, 3.0, (1.75, 2.67, 4.50)),
        ("GSM8K, Llama, answers alone", 0.573735, 70 * 60, None, None),
        ("GSM8K, 8 H100", 0.817330, 24 * 60, 24 / 14, (1.00, 1.71, 3.00)),
        ("GSM8K, 8 A100", 0.861679, 28 * 60, 28 / 16, (None, 1.75, 2.80)),
    ],
)
def test_the_rule_gives_the_speed_ups_of_the_authors_logs(setting, target, baseline_time, ratio, interval):
    _, pods = summarize(SETTINGS[setting](), "grpo").arms
    found, bootstrapped = pods.speed_ups[0.99]
    time = None if ratio is None else pytest.approx(baseline_time / ratio)
    assert found == SpeedUp(0.99, pytest.approx(target, abs=1e-6), baseline_time, time)
    if interval is not None:
        drawn = (bootstrapped.low, bootstrapped.median, bootstrapped.high)
        assert drawn == pytest.approx(interval, abs=0.06)


@needs_curves
@pytest.mark.parametrize(
    ("setting", "ratios"),
    [
        ("GSM8K, 3B", [1.00, 1.00, 1.00, 2.00, 2.00, 1.60]),
        ("MATH, 3B", [1.50, 1.00, 1.50, 1.80, 2.00, 2.40]),
        ("GSM8K, Llama", [2.33, 2.33, 2.67, 2.67, 3.00, 3.00]),
        ("GSM8K, 8 H100", [1.50, 1.75, 1.40, 2.40, 1.71, 2.00]),
        ("GSM8K, 8 A100", [2.00, 1.50, 1.75, 1.75, 1.75, 1.75]),
    ],
)
def test_and_so_at_other_shares_of_the_peak(setting, ratios):
    _, pods = summarize(SETTINGS[setting](), "grpo").arms
    assert [round(pods.speed_ups[share][0].ratio, 2) for share in SHARES] == ratios


def percent(*values):
    return [round(100 * float(value), 2) for value in values]


@needs_curves
@pytest.mark.parametrize(
    ("name", "first", "end", "peak", "peak_hours", "steps", "step_seconds"),
    [
        ("GSM8K-512-16-16", 79.11, (80.76, 1.31), (81.64, 0.53), 4.0, 2868, 7.56),
        ("GSM8K-512-32-16", 79.21, (82.43, 0.73), (82.44, 0.56), 5.5, 2738, 7.95),
        ("GSM8K-512-64-16", 79.10, (82.60, 0.58), (82.63, 0.49), 5.5, 2143, 10.12),
        ("GSM8K-512-128-16", 78.07, (82.68, 0.34), (82.68, 0.34), 6.0, 1591, 13.78),
        ("GSM8K-512-256-16", 75.46, (82.16, 0.66), (82.18, 0.45), 5.5, 1017, 21.37),
        ("GSM8K-512-64-8", 78.69, (82.84, 0.48), (82.84, 0.48), 6.0, 2365, 9.21),
        ("GSM8K-512-64-4", 77.95, (82.86, 0.33), (82.86, 0.33), 6.0, 2416, 9.00),
        ("GSM8K-512-64-2", 76.44, (81.30, 0.81), (81.62, 0.62), 5.5, 2732, 8.05),
        ("GSM8K-MaxR-512-64-16", 59.56, (67.28, 3.79), (67.28, 3.79), 6.0, 1563, 14.89),
        ("GSM8K-Rand-512-64-16", 75.38, (81.62, 0.54), (81.62, 0.54), 6.0, 2059, 10.52),
        ("MATH-NF-512-8-8", 41.57, (48.90, 1.03), (48.90, 1.03), 6.0, 2747, 7.87),
        ("MATH-NF-512-32-8", 42.90, (50.17, 0.97), (50.35, 0.64), 5.5, 2137, 10.12),
        ("Llama-512-16-16-0.04", 17.13, (39.13, 9.54), (39.13, 9.54), 1.5, 698, 7.74),
        ("Llama-512-64-16-0.04", 16.68, (54.42, 0.85), (55.88, 1.27), 1.0, 497, 10.89),
    ],
)
def test_and_their_accuracies_on_one_gpu(name, first, end, peak, peak_hours, steps, step_seconds):
    summary = summarize(single_gpu_runs(f"Instruct-{name}", "arm"), "arm")
    (arm,) = summary.arms
    mean, half = band(arm.accuracy_RT)
    value, half_of_best, time = best(arm, summary.grid)
    assert percent(mean[1]) == [first]
    assert percent(mean[-1], half[-1]) == list(end)
    assert (*percent(value, half_of_best), time / 3600) == (*peak, peak_hours)
    assert round(np.mean([run.accuracy["step"][-1] for run in arm.runs])) == steps
    assert round(np.mean(arm.step_seconds()), 2) == step_seconds


@needs_curves
@pytest.mark.parametrize(
    ("hardware", "arm", "end", "peak", "peak_minutes"),
    [
        ("h100s", "GRPO-GA", (82.38, 1.44), (82.56, 1.59), 28),
        ("h100s", "GRPO-PODS", (83.12, 1.40), (84.12, 0.74), 24),
        ("a100s", "GRPO-GA", (86.59, 3.30), (87.04, 3.45), 28),
        ("a100s", "GRPO-PODS", (87.94, 1.62), (87.94, 1.62), 30),
    ],
)
def test_and_their_accuracies_on_eight_gpus(hardware, arm, end, peak, peak_minutes):
    summary = summarize(multi_gpu_runs(hardware, arm, "arm"), "arm")
    mean, half = band(summary.arms[0].accuracy_RT)
    value, half_of_best, time = best(summary.arms[0], summary.grid)
    assert percent(mean[-1], half[-1]) == list(end)
    assert (*percent(value, half_of_best), time / 60) == (*peak, peak_minutes)


@needs_curves
def test_and_their_times_to_the_threshold_of_grpo_by_pool_size_kept_size_and_rule():
    arms = ["16-16", "32-16", "64-16", "128-16", "256-16", "64-8", "64-4", "64-2"]
    runs = [run for arm in arms for run in single_gpu_runs(f"{GSM8K}-{arm}", arm)]
    runs += single_gpu_runs("Instruct-GSM8K-MaxR-512-64-16", "max-reward")
    runs += single_gpu_runs("Instruct-GSM8K-Rand-512-64-16", "random")
    ratios = {arm.name: arm.speed_ups[0.99][0].ratio for arm in summarize(runs, "16-16").arms[1:]}
    assert ratios == {
        "32-16": pytest.approx(1.20),
        "64-16": pytest.approx(2.00),
        "128-16": pytest.approx(1.20),
        "256-16": pytest.approx(1.20),
        "64-8": pytest.approx(1.50),
        "64-4": pytest.approx(1.00),
        "64-2": pytest.approx(2 / 3),
        "max-reward": None,
        "random": pytest.approx(0.75),
    }
