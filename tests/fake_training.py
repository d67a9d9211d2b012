"""
Stands in for a training process of a comparison or a plan: writes the log of one, in no time.

`python fake_training.py recipe.yaml` does what `model_name_or_path` in the recipe says: "learn", "crash", "crash for
memory", "stop early", "sleep", or "leave a child" and a grandchild, each in a session of its own. `python
fake_training.py compare FOLDER MODEL` runs a comparison of two arms that starts itself, `python fake_training.py plan
FOLDER MODEL` a plan.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import yaml


def train(recipe_path):
    recipe = yaml.safe_load(Path(recipe_path).read_text())
    kind = recipe["model_name_or_path"]
    print("loading")
    if kind == "crash" or (kind == "crash for memory" and recipe.get("log_update_memory")):
        raise RuntimeError("out of memory")
    if kind == "leave a child":
        leave_a_child(Path(recipe["log_file"]).parent)
    if "max_train_minutes" in recipe:
        compared(recipe, kind)
    else:
        measured(recipe)
    if kind == "sleep":
        time.sleep(600)


def leave_a_child(folder):
    child = f"""
import os, subprocess, sys, time
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open({str(folder / "unfinished")!r}, "w") as file:
    print(os.getpid(), sleeper.pid, file=file)
os.rename({str(folder / "unfinished")!r}, {str(folder / "child")!r})
time.sleep(600)
"""
    subprocess.run([sys.executable, "-c", child], start_new_session=True, check=False)


def compared(recipe, kind):
    duration, log = 60 * recipe["max_train_minutes"], Path(recipe["log_file"])
    trainer = {
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 4,
        "num_iterations": 1,
        "seed": recipe["seed"],
    }
    lines = [{"settings": trainer, "versions": {"trl": "1"}, "hardware": {"cpu": "none"}}]
    # A step lasts a quarter of the training and generates 32 rollouts, or m.
    fast = recipe["num_rollouts"] > recipe["num_generations"]
    for step in range(5):
        accuracy = {"held_out_accuracy/sampled": 0.1 + (0.2 if fast else 0.1) * step, "held_out_accuracy/greedy": 0.9}
        lines.append({"step": step, "time/train": duration * step / 4, **accuracy})
        if step:
            phases = {
                "time/generate": 1.0,
                "time/reward": 0.5,
                "time/select": 0.25,
                "time/score": 0.0,
                "time/update": 2.0,
            }
            kept = {"pods/kept_reward": 0.5, "pods/kept_length": 3.0} if fast else {}
            entry = {"loss": -0.1, "reward": 0.1 * step, "completions/mean_length": 4.0, **phases, **kept}
            lines.append({"step": step, "time/train": duration * step / 4, **entry})
    if kind == "stop early":
        lines = lines[:5]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (Path(recipe["output_dir"])).mkdir()


def measured(recipe):
    """
    Rounds of 4 prompts, two steps each: prompt 0 is never solved, the others by one in 2, 3 and 4 rollouts. The first
    round is slow; the others take 1 s + 0.1 s n to generate, 0.02 s n for rewards and 0.5 s m to update.
    """
    import pyarrow
    import pyarrow.parquet as parquet  # in a fraction of the time of pandas

    n, m, rows = (recipe[name] for name in ("num_rollouts", "num_generations", "per_device_train_batch_size"))
    trainer = {"gradient_accumulation_steps": 1, "steps_per_generation": 2, "num_iterations": 1}
    lines = [{"settings": trainer | {"generation_batch_size": 4 * m}, "versions": {"trl": "1"}, "hardware": {}}]
    tables = Path(recipe["output_dir"]) / "completions"
    tables.mkdir(parents=True)
    for step in range(1, recipe["max_steps"] + 1):
        entry = {"step": step, "loss": 0.0, "rewards/right/mean": 0.3, "rewards/short/mean": 0.5}
        slow = 10 if step <= 2 else 1
        if step % 2:
            seconds = {"time/generate": slow * (1 + 0.1 * n), "time/reward": 0.02 * n, "time/select": 0.0}
            entry |= seconds | {"time/score": 0.0, "completions/mean_length": 5.0}
        else:
            entry |= {"time/update": slow * 0.5 * m}
        if recipe.get("log_update_memory"):
            entry["memory/update_peak"] = rows / 8
        lines.append(entry)
        table = [
            {"prompt": f"{step} {prompt}", "right": float(prompt > 0 and i % (prompt + 1) == 0), "short": i / n}
            for prompt in range(4)
            for i in range(n)
        ]
        parquet.write_table(pyarrow.Table.from_pylist(table), tables / f"completions_{step:05d}.parquet")
    lines.append({"step": recipe["max_steps"], "train_loss": 0.0})
    Path(recipe["log_file"]).write_text("".join(json.dumps(line) + "\n" for line in lines))


def compare(folder, model):
    from trl_pods.comparison import running, training_process

    running._POLL_SECONDS = 0.05
    training_process._COMMAND = [sys.executable, __file__]
    recipe = Path(folder) / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"num_rollouts": 32, "num_generations": 8, "model_name_or_path": model}))
    running.run_comparison(comparison_of(recipe, seeds=(1,)), Path(folder))


def plan(folder, model):
    from trl_pods.cli import plan
    from trl_pods.comparison import training_process
    from trl_pods.planning import measuring

    measuring._POLL_SECONDS = 0.05
    training_process._COMMAND = [sys.executable, __file__]
    plan._check = lambda *_: None
    Path(folder).mkdir()
    recipe = Path(folder) / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(PLANNED | {"model_name_or_path": model}))
    sys.exit(plan.plan(["--config", str(recipe), "--output_dir", folder, *PLAN], "plan"))


PLANNED = {"num_rollouts": 16, "num_generations": 4, "per_device_train_batch_size": 8, "steps_per_generation": 2}
GRID = ["--num_rollouts_grid", "8", "16", "32", "--num_generations_grid", "2", "4", "8"]
PLAN = [*GRID, "--memory_rows", "4", "8", "--steps", "3", "--warmup", "1"]


def comparison_of(recipe, **fields):
    from trl_pods.comparison.plan import Arm, Comparison

    defaults = {
        "recipe": str(recipe),
        "minutes": 1.0,
        "accuracy_minutes": 0.25,
        "num_accuracy_problems": 10,
        "seeds": (1, 2),
        "arms": (Arm("grpo", "grpo"), Arm("pods", "pods")),
    }
    return Comparison(**(defaults | fields))


if __name__ == "__main__":
    if sys.argv[1] in ("compare", "plan"):
        {"compare": compare, "plan": plan}[sys.argv[1]](*sys.argv[2:])
    else:
        train(sys.argv[1])
