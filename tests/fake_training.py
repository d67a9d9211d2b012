"""
Stands in for a training process of a comparison: writes the log of one, in no time.

`python fake_training.py recipe.yaml` does what `model_name_or_path` in the recipe says: "learn", "crash", "stop early"
or "sleep". `python fake_training.py compare FOLDER MODEL` runs a comparison of two arms that starts itself.
"""

import json
import sys
import time
from pathlib import Path

import yaml


def train(recipe_path):
    recipe = yaml.safe_load(Path(recipe_path).read_text())
    duration, kind = 60 * recipe["max_train_minutes"], recipe["model_name_or_path"]
    print("loading")
    if kind == "crash":
        raise RuntimeError("out of memory")
    log = Path(recipe["log_file"])
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
    if kind == "sleep":
        time.sleep(600)


def compare(folder, model):
    from trl_pods.comparison import running, training_process

    running._POLL_SECONDS = 0.05
    training_process._COMMAND = [sys.executable, __file__]
    recipe = Path(folder) / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"num_rollouts": 32, "num_generations": 8, "model_name_or_path": model}))
    running.run_comparison(comparison_of(recipe, seeds=(1,)), Path(folder))


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
    if sys.argv[1] == "compare":
        compare(*sys.argv[2:])
    else:
        train(sys.argv[1])
