"""Comparisons: what is run and in which order, what is kept, and what happens when something fails."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import transformers
import yaml
from fake_training import comparison_of
from rig import COMMAND_LINE

import trl_pods
from trl_pods.cli import main
from trl_pods.comparison import running, training_process
from trl_pods.comparison.arms import apply
from trl_pods.comparison.plan import Arm, in_turn, read_comparison
from trl_pods.comparison.run_file import Run, read_run, read_runs, write_run
from trl_pods.comparison.running import run_comparison
from trl_pods.comparison.training_process import TrainingProcess
from trl_pods.planning.pairs import default_memory_rows, make_grid, plan_processes, sizes
from trl_pods.scripts.grpo import parse
from trl_pods.scripts.recipe import find_comparison, find_recipe, read_recipe, shipped_comparisons, shipped_recipes


FAKE = Path(__file__).parent / "fake_training.py"
RECIPE = {"num_rollouts": 32, "num_generations": 8, "model_name_or_path": "learn", "learning_rate": 1e-3}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(training_process, "_COMMAND", [sys.executable, str(FAKE)])
    monkeypatch.setattr(running, "_POLL_SECONDS", 0.05)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "comparison"


def names(folder):
    return sorted(path.name for path in (folder / "runs").iterdir())


# Arms and order


def test_the_arms_differ_in_how_much_they_generate_and_train_on():
    recipe = RECIPE | {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}
    assert apply("pods", recipe) == recipe
    assert apply("grpo", recipe) == recipe | {"num_rollouts": 8}
    # 4 times as many rollouts for the same 4 prompts.
    assert apply("grpo-all", recipe) == recipe | {"num_generations": 32, "gradient_accumulation_steps": 8}
    wide = apply("grpo-all", recipe | {"steps_per_generation": 4})
    assert (wide["gradient_accumulation_steps"], wide["steps_per_generation"]) == (8, 16)


def test_every_arm_comes_first_in_turn_so_that_a_slow_phase_meets_all(recipe):
    arms = (Arm("grpo", "grpo"), Arm("b", "pods"), Arm("c", "pods"))
    order = [f"{arm.name}{seed}" for arm, seed in in_turn(comparison_of(recipe, arms=arms, seeds=(1, 2, 3, 4)))]
    assert order == ["grpo1", "b1", "c1", "b2", "c2", "grpo2", "c3", "grpo3", "b3", "grpo4", "b4", "c4"]


def test_a_run_has_the_recipe_what_all_set_what_its_arm_sets_and_the_time(recipe):
    arms = (Arm("grpo", "grpo"), Arm("random", "pods", {"selector": "random", "learning_rate": 3e-4}))
    runs = comparison_of(recipe, arms=arms, settings={"logging_steps": 7}, seeds=(5,)).runs()
    grpo, random = (run.settings for run in runs)
    assert grpo.items() >= {"num_rollouts": 8, "learning_rate": 1e-3, "logging_steps": 7, "seed": 5}.items()
    assert random.items() >= {"num_rollouts": 32, "learning_rate": 3e-4, "selector": "random", "seed": 5}.items()
    for settings in (grpo, random):
        assert settings["max_train_minutes"] == 1.0
        assert settings["accuracy_minutes"] == 0.25
        assert settings["lr_scheduler_type"] == "constant"
        assert settings["max_steps"] > 10**8


def test_flags_beat_the_file_and_add_arms(tmp_path, recipe):
    path = tmp_path / "comparison.yaml"
    path.write_text(
        f"recipe: {recipe}\nminutes: 2.0\naccuracy_minutes: 0.5\nnum_accuracy_problems: 10\nseeds: [1, 2]\n"
        "arms:\n  grpo: {learning_rate: 3.0e-4}\n  shortest: {selector: shortest}\n"
    )
    as_written = read_comparison(path, {})
    assert as_written.arms == (
        Arm("grpo", "grpo", {"learning_rate": 3e-4}),
        Arm("shortest", "pods", {"selector": "shortest"}),
    )
    flags = {"seeds": [7], "arms": ["grpo", "pods", "random"], "more_arms": {"random": {"selector": "random"}}}
    changed = read_comparison(path, flags)
    assert changed.seeds == (7,)
    assert [arm.name for arm in changed.arms] == ["grpo", "pods", "random"]
    assert changed.arms[0].overrides == {"learning_rate": 3e-4}
    assert changed.arms[2] == Arm("random", "pods", {"selector": "random"})


FLAGS = ["--minutes", "1", "--accuracy_minutes", "0.1", "--num_accuracy_problems", "5", "--seeds", "1", "--dry_run"]


def test_the_command_line_alone_describes_a_comparison(recipe, capsys):
    assert (
        main(["compare", "--recipe", str(recipe), *FLAGS, "--arm", "random", "selector=random", "--arms", "grpo"]) == 0
    )
    assert capsys.readouterr().out.split() == ["grpo-seed1", "random-seed1"]
    assert main(["compare", "--recipe", str(recipe), *FLAGS]) == 0
    assert capsys.readouterr().out.split() == ["grpo-seed1", "grpo-all-seed1", "pods-seed1"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config", "missing", *FLAGS], "There is no comparison 'missing'"),
        (FLAGS, "'recipe' is missing in the comparison. Set it there or by --recipe"),
        (["--recipe", "missing", *FLAGS], "There is no recipe 'missing'"),
        (["--recipe", "RECIPE", *FLAGS[:-1]], "--output_dir is missing"),
        (["--recipe", "RECIPE", *FLAGS, "--minutes", "0"], "minutes=0.0 is no time"),
        (["--recipe", "RECIPE", *FLAGS, "--accuracy_minutes", "2"], "accuracy_minutes=2.0 is more than minutes=1.0"),
        (["--recipe", "RECIPE", *FLAGS, "--num_accuracy_problems", "0"], "num_accuracy_problems=0 is too few"),
        (["--recipe", "RECIPE", *FLAGS, "--seeds", "1", "1"], "seeds=[1, 1] must be at least one, and different"),
        (["--recipe", "RECIPE", *FLAGS, "--arms", "grpo", "ppo"], "There is no arm 'ppo'. Use some of grpo"),
        (["--recipe", "RECIPE", *FLAGS, "--arms", "pods"], "baseline='grpo' is not among the arms. Use one of pods"),
        (["--recipe", "RECIPE", *FLAGS, "--arm", "a", "like=ppo"], "like='ppo' is no built-in arm"),
        (["--recipe", "RECIPE", *FLAGS, "--arm", "a/b", "seed=1"], "The arm 'a/b' names files"),
        (["--recipe", "RECIPE", *FLAGS, "--arm", "a", "seed=1"], "seed=1 cannot be set for an arm: use seeds"),
        (["--recipe", "RECIPE", *FLAGS, "--arm", "a", "selector"], "'selector' is no override. Write setting=value"),
        (
            ["--recipe", "RECIPE", *FLAGS, "--arm", "a", "num_rollouts=8"],
            "num_rollouts=8 is not more than num_generations=8",
        ),
        (["--recipe", "RECIPE", *FLAGS, "--arm", "grpo-all", "num_rollouts=30"], "Use for instance num_rollouts=32"),
        (
            ["--recipe", "RECIPE", *FLAGS, "--arm", "a", "num_generations=two"],
            "needs num_generations as a whole number",
        ),
        (
            ["--recipe", "RECIPE", *FLAGS[:-1], "--output_dir", "out", "--arm", "a", "model_name_or_path=./x"],
            "model_name_or_path='./x' is no folder. Make it first",
        ),
        (
            ["--recipe", "RECIPE", *FLAGS[:-1], "--output_dir", "out", "--arm", "a", "selecter=x"],
            "Did you mean 'selector'?",
        ),
    ],
)
def test_a_wrong_comparison_is_refused_by_one_line(args, message, recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = [str(recipe) if arg == "RECIPE" else arg for arg in args]
    arms = [] if "--arms" in args or "--arm" not in args else ["--arms", "grpo"]
    assert main(["compare", *args, *arms]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trl-pods: error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("minuts: 1\n", "'minuts' in .* is unknown. Did you mean 'minutes'"),
        ("arms: [grpo]\n", "must be a mapping of names to overrides"),
        ("arms: {grpo: 3}\n", "The arm 'grpo' .* must be a mapping of overrides"),
        ("arms: {grpo: {like: [pods]}}\n", r"like=\['pods'\] is no built-in arm. Use one of grpo"),
        ("num_accuracy_problems: many\n", "num_accuracy_problems='many' is no whole number. Use for instance 500"),
        ("num_accuracy_problems: 2.5\n", "num_accuracy_problems=2.5 is no whole number"),
        ("settings: [a]\n", r"settings=\['a'\] is no mapping. Use lines of `setting: value`, for instance `logging"),
        ("recipe: null\n", "recipe=None is no name. Use a path or a shipped recipe, such as quickstart"),
        ("recipe: [quickstart]\n", r"recipe=\['quickstart'\] is no name"),
        ("seeds: {a: 1}\n", r"seeds=\[{'a': 1}\] must be whole numbers. Use for instance \[1, 2\]"),
        ("seeds: [1, true]\n", r"seeds=\[1, True\] must be whole numbers"),
        ("minutes: soon\n", "minutes='soon' is no time. Use minutes of training, for instance 1.5"),
        ("accuracy_minutes: true\n", "accuracy_minutes=True is no time"),
        ("settings: {resume_from_checkpoint: true}\n", "resume_from_checkpoint=True cannot be set .* starts anew"),
    ],
)
def test_a_wrong_file_is_refused(text, message, recipe, tmp_path):
    path = tmp_path / "comparison.yaml"
    flags = {"recipe": str(recipe), "minutes": 1, "accuracy_minutes": 0.5, "num_accuracy_problems": 5, "seeds": [1]}
    path.write_text(yaml.safe_dump(flags | yaml.safe_load(text)))
    with pytest.raises(ValueError, match=message):
        read_comparison(path, {}).runs()


# What a recipe has for a training whose model is kept

FOR_ITS_MODEL = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "eval_on_start": True,
    "eval_minutes": 2.0,
    "load_best_model_at_end": True,
    "save_steps": 2,
    "push_to_hub": True,
    "log_completions_hub_repo": "me/completions",
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "resume_from_checkpoint": True,
    "evaluate_only": True,
}
PODS_RECIPES = [name for name in shipped_recipes() if len(set(sizes(read_recipe(find_recipe(name))))) == 2]


@pytest.mark.parametrize("name", PODS_RECIPES)
def test_no_run_of_a_shipped_recipe_evaluates_pushes_or_resumes_nor_does_a_process_of_a_plan(name, tmp_path):
    path = tmp_path / "recipe.yaml"
    recipe = read_recipe(find_recipe(name)) | FOR_ITS_MODEL
    path.write_text(yaml.safe_dump(recipe))
    runs = comparison_of(path, arms=(Arm("grpo", "grpo"), Arm("grpo-all", "grpo-all"), Arm("pods", "pods"))).runs()
    processes = plan_processes(recipe, make_grid(recipe), default_memory_rows(recipe), 2, 6)
    for settings in (planned.settings for planned in (*runs, *processes)):
        assert (settings["eval_strategy"], settings["save_strategy"]) == ("no", "no")
        assert settings["lr_scheduler_type"] == "constant"
        assert settings.keys() & FOR_ITS_MODEL.keys() <= {
            "eval_strategy",
            "eval_steps",
            "save_steps",
            "lr_scheduler_type",
        }
        assert settings["model_name_or_path"] == recipe["model_name_or_path"]


def test_recipes_with_evaluation_are_shipped():
    assert sum("eval_on_start" in read_recipe(find_recipe(name)) for name in PODS_RECIPES) > 3


def test_a_comparison_itself_may_ask_for_evaluation_in_its_runs(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE | FOR_ITS_MODEL))
    evaluating = Arm("evaluating", "pods", {"eval_on_start": True, "eval_strategy": "steps"})
    plain, other = comparison_of(
        path, arms=(Arm("grpo", "grpo"), evaluating), settings={"eval_minutes": 0.5}, seeds=(1,)
    ).runs()
    assert (plain.settings["eval_minutes"], plain.settings["eval_strategy"]) == (0.5, "no")
    assert "eval_on_start" not in plain.settings
    assert other.settings["eval_on_start"]
    assert other.settings["eval_strategy"] == "steps"


# Running


def test_each_run_leaves_one_small_file_with_its_curve_settings_versions_and_hardware(recipe, folder, fake):
    runs = run_comparison(comparison_of(recipe), folder)
    assert [(run.arm, run.seed, run.status) for run in runs] == [
        ("grpo", 1, "finished"),
        ("pods", 1, "finished"),
        ("pods", 2, "finished"),
        ("grpo", 2, "finished"),
    ]
    assert names(folder) == ["grpo-seed1.json", "grpo-seed2.json", "pods-seed1.json", "pods-seed2.json"]
    pods = read_run(folder / "runs" / "pods-seed1.json")
    assert pods.accuracy["seconds"] == [0, 15, 30, 45, 60]
    assert pods.accuracy["step"] == [0, 1, 2, 3, 4]
    assert pods.accuracy["sampled"] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert pods.log["reward"] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert "pods/kept_reward" not in read_run(folder / "runs" / "grpo-seed1.json").log
    assert (pods.duration, pods.interval, pods.rounds_per_step) == (60, 15, 0.5)
    assert (pods.versions, pods.hardware) == ({"trl": "1"}, {"cpu": "none"})
    assert pods.settings["num_rollouts"] == 32
    assert pods.started < read_run(folder / "runs" / "grpo-seed2.json").started
    assert json.loads((folder / "comparison.json").read_text())["arms"] == {
        "grpo": {"like": "grpo"},
        "pods": {"like": "pods"},
    }
    assert list((folder / "work").iterdir()) == []
    assert not (folder / "running.json").exists()


def test_a_finished_run_is_not_run_again_and_more_seeds_may_be_added(recipe, folder, fake, capsys):
    first = run_comparison(comparison_of(recipe, seeds=(1,)), folder)
    more = run_comparison(comparison_of(recipe, seeds=(1, 2)), folder)
    assert len(more) == 4
    assert more[:2] == first
    assert "2 of 4 runs are there already" in capsys.readouterr().out


def test_a_crashed_arm_does_not_take_the_others_with_it_and_is_tried_again(recipe, folder, fake):
    arms = [Arm("grpo", "grpo", {"model_name_or_path": "crash"}), Arm("pods", "pods")]
    failed, finished = run_comparison(comparison_of(recipe, arms=tuple(arms), seeds=(1,)), folder)
    assert (failed.status, finished.status) == ("failed", "finished")
    assert failed.error.startswith("It ended with exit code 1 after 0.0 s of training.\n")
    assert failed.error.endswith("RuntimeError: out of memory")
    assert (folder / "work" / "grpo-seed1" / "output.txt").is_file()
    mended, again = run_comparison(comparison_of(recipe, seeds=(1,)), folder)
    assert mended.status == "finished"
    assert mended.error is None
    assert again == finished


def test_a_run_that_ends_before_its_time_is_no_result(recipe, folder, fake):
    arms = (Arm("grpo", "grpo", {"model_name_or_path": "stop early"}),)
    (run,) = run_comparison(comparison_of(recipe, arms=arms, seeds=(1,)), folder)
    assert run.status == "failed"
    assert "exit code 0 after 30.0 s of training" in run.error


def test_a_run_that_hangs_is_ended(recipe, folder, fake):
    arms = (Arm("grpo", "grpo", {"model_name_or_path": "sleep"}),)
    (run,) = run_comparison(comparison_of(recipe, arms=arms, seeds=(1,)), folder, run_timeout_minutes=0.02)
    assert run.status == "failed"
    assert run.error == "It was ended after 0.02 minutes (run_timeout_minutes)."
    assert not [
        process for process in psutil.Process().children(recursive=True) if "fake_training" in process.cmdline()
    ]


def test_what_outlives_a_killed_launcher_is_ended(folder, fake, monkeypatch):
    monkeypatch.setattr(training_process, "_SECONDS_BETWEEN_NOTES", 0)
    monkeypatch.setattr(training_process, "_SECONDS_TO_FOLLOW", 0.2)
    process = TrainingProcess(RECIPE | {"model_name_or_path": "leave a child", "max_train_minutes": 1}, folder)
    deadline = time.monotonic() + 60
    while not (folder / "child").is_file():
        assert time.monotonic() < deadline
        process.is_over()
        time.sleep(0.05)
    child, grandchild = (psutil.Process(int(pid)) for pid in (folder / "child").read_text().split())
    process.is_over()
    process.process.kill()
    process.process.wait(timeout=60)
    assert process.is_over()
    assert child.is_running()
    process.end()
    for left in (child, grandchild):
        assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE


def test_a_process_that_got_the_id_of_an_ended_one_is_left_alone(folder, fake):
    process = TrainingProcess(RECIPE | {"max_train_minutes": 1, "seed": 1}, folder)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        before = psutil.Process(stranger.pid)
        before._ident = (before.pid, before._ident[1] - 10)  # as of a process that had this id 10 s before
        process._descendants = {before}
        while not process.is_over():
            time.sleep(0.05)
        process.end()
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_torn_line_of_a_log_is_skipped(folder, fake):
    process = TrainingProcess(RECIPE | {"max_train_minutes": 1, "seed": 1}, folder)
    while not process.is_over():
        time.sleep(0.05)
    number = len(process.entries)
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"step": 9, "lo\n{"step": 10, "loss": 1.0}\n')
    assert process.is_over()
    assert process.entries[number:] == [{"step": 10, "loss": 1.0}]


def test_a_file_of_a_run_with_other_settings_is_not_taken_for_this_one(recipe, folder, fake):
    run_comparison(comparison_of(recipe, seeds=(1,)), folder)
    changed = comparison_of(recipe, seeds=(1,), settings={"learning_rate": 1e-2})
    with pytest.raises(
        ValueError, match="is of a run with learning_rate=0.001, and learning_rate=0.01 is asked for now"
    ):
        run_comparison(changed, folder)


def start_comparison(folder, model):
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(Path(trl_pods.__file__).parents[1])}
    command = [sys.executable, str(FAKE), "compare", str(folder), model]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def wait_for_the_child(folder):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        path = folder / "running.json"
        noted = json.loads(path.read_text()) if path.is_file() else []
        if len(noted) == 2 and (folder / "work" / "grpo-seed1" / "model").is_dir():
            return noted[1]["pid"]
        time.sleep(0.05)
    raise AssertionError("no run was started")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_ends_its_run_leaves_no_file_of_it_and_goes_on_later(folder, number, fake):
    process = start_comparison(folder, "sleep")
    child = wait_for_the_child(folder)
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    assert not psutil.pid_exists(child)
    assert not (folder / "runs").exists()
    assert start_comparison(folder, "learn").wait(timeout=60) == 0
    assert names(folder) == ["grpo-seed1.json", "pods-seed1.json"]


def test_a_killed_comparison_leaves_whole_files_and_a_run_that_outlives_it_is_noticed(folder, fake):
    process = start_comparison(folder, "sleep")
    child = wait_for_the_child(folder)
    process.kill()
    process.wait(timeout=60)
    assert psutil.pid_exists(child)
    comparison = comparison_of(folder / "recipe.yaml", seeds=(1,))
    with pytest.raises(ValueError, match=rf"is running in .* already \(process {child}\)"):
        run_comparison(comparison, folder)
    psutil.Process(child).kill()
    assert start_comparison(folder, "learn").wait(timeout=60) == 0
    assert len(read_runs(folder / "runs")) == 2


# Files

WRITER = """
import itertools, sys
from pathlib import Path
from trl_pods.comparison.run_file import Run, write_run
for number in itertools.count():
    log = {"step": list(range(20_000)), "loss": [number % 10] * 20_000}
    write_run(Run("pods", number, "finished", {}, 60.0, 10.0, log=log), Path(sys.argv[1]))
    print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_a_whole_file(tmp_path):
    path = tmp_path / "run.json"
    environment = os.environ | {"PYTHONPATH": str(Path(trl_pods.__file__).parents[1])}
    for delay in (0.0, 0.003, 0.007, 0.011, 0.017):
        command = [sys.executable, "-c", WRITER, str(path)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(delay)
        process.kill()
        process.communicate(timeout=60)
        run = read_run(path)
        assert run.log["loss"] == [run.seed % 10] * 20_000


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "trl_pods.run/1"}', '{"format": "trl_pods.run/0"}'])
def test_what_is_no_file_of_a_run_is_refused_by_name(text, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="run.json is"):
        read_run(path)


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "run.json"
    write_run(Run("pods", 1, "finished", {}, 60.0, 10.0), path)
    with pytest.raises(TypeError):
        write_run(Run("pods", 2, "finished", {"a": object()}, 60.0, 10.0), path)
    assert read_run(path).seed == 1
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]


# A real one


@pytest.mark.slow
def test_a_comparison_on_the_embedded_task_runs_and_is_reported_on(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    by_steps, by_time = map(read_recipe, map(find_recipe, ("hardware/one-gpu-sleep", "gsm8k/qwen2.5-3b-lora-pods")))
    evaluation = {name: value for name, value in (by_steps | by_time).items() if "eval" in name}
    assert {
        "eval_strategy",
        "eval_steps",
        "eval_on_start",
        "eval_minutes",
        "num_generations_eval",
    } <= evaluation.keys()
    recipe.write_text(yaml.safe_dump(read_recipe(find_recipe("quickstart")) | evaluation))
    comparison = tmp_path / "comparison.yaml"
    comparison.write_text(
        f"recipe: {recipe}\nminutes: 0.08\naccuracy_minutes: 0.03\nnum_accuracy_problems: 50\nseeds: [1, 2]\n"
        "settings: {logging_steps: 1, per_device_train_batch_size: 32}\n"
        "arms: {grpo: {learning_rate: 3.0e-4}, pods: }\n"
    )
    out = tmp_path / "out"
    for command in (["compare", "--config", str(comparison), "--output_dir", str(out)], ["report", str(out)]):
        result = subprocess.run(
            [*COMMAND_LINE, *command], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    runs = read_runs(out / "runs")
    assert [(run.arm, run.seed) for run in runs] == [("grpo", 1), ("grpo", 2), ("pods", 1), ("pods", 2)]
    assert sorted(runs, key=lambda run: run.started)[0].arm == "grpo"
    assert sorted(runs, key=lambda run: run.started)[2].arm == "pods"
    for run in runs:
        assert run.accuracy["seconds"][0] < 1 < 4.8 <= run.accuracy["seconds"][-1]
        assert run.accuracy["step"] == sorted(set(run.accuracy["step"]))
        assert run.log["time/train"] == sorted(run.log["time/train"])
        assert {"step", "time/generate", "time/update", "reward", "completions/mean_length"} <= run.log.keys()
        assert run.rounds_per_step == 1.0
        assert {"trl", "torch", "python"} <= run.versions.keys()
        assert run.hardware["cpu_cores"] >= 1
    greedy = {run.accuracy["greedy"][0] for run in runs}
    assert len(greedy) == 1  # all start from the same policy
    assert "pods/kept_reward" in runs[2].log
    assert "| grpo | 2 |" in (out / "report" / "report.md").read_text()
    assert (out / "report" / "step_seconds.png").is_file()


# Shipped comparisons


def test_comparisons_are_shipped_and_are_no_recipes():
    assert shipped_comparisons()
    assert not [name for name in shipped_recipes() if "comparisons" in name]


@pytest.mark.parametrize("name", shipped_comparisons())
def test_the_arms_of_a_shipped_comparison_are_read_by_the_real_parser(name, tmp_path):
    comparison = read_comparison(find_comparison(name), {})
    first_of_each_arm = {run.arm: run for run in comparison.runs()}
    assert len(first_of_each_arm) == len(comparison.arms)
    for run in first_of_each_arm.values():
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(run.settings))
        with patch.object(transformers.TrainingArguments, "world_size", 1):
            script_args, config, _, _ = parse(["--config", str(path)])
        assert config.num_rollouts == run.settings["num_rollouts"]
        assert config.max_train_minutes == comparison.minutes
        assert script_args.accuracy_minutes == comparison.accuracy_minutes
