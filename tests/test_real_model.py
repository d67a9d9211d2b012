"""
The main job on real input: a real instruct model on real GSM8K problems, through the command line. Nightly.

    TRL_PODS_SMOLLM2=FOLDER pytest -m nightly tests/test_real_model.py

FOLDER holds SmolLM2-135M-Instruct as transformers saves it. GSM8K is looked for in the folder that TRL_PODS_SHARED
names (default: `shared` beside the checkout), as data/gsm8k/train.jsonl.
"""

import json
import math
import os
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from rig import COMMAND_LINE


ROOT = Path(__file__).parents[1]
SHARED = Path(os.environ.get("TRL_PODS_SHARED", ROOT.parent / "shared"))
MODEL = os.environ.get("TRL_PODS_SMOLLM2", "")
NUM_STEPS = 24

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not MODEL, reason="TRL_PODS_SMOLLM2 names no model folder"),
    pytest.mark.skipif(not (SHARED / "data/gsm8k").is_dir(), reason=f"no GSM8K in {SHARED}/data/gsm8k"),
]

SETTINGS = {
    "model_name_or_path": MODEL,
    "dtype": "float32",
    "use_peft": True,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_target_modules": "all-linear",
    "dataset_loader": "gsm8k",
    "dataset_kwargs": json.dumps({"data_dir": str(SHARED / "data/gsm8k")}),
    "num_rollouts": 16,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "max_completion_length": 128,
    "temperature": 0.9,
    "learning_rate": 1e-4,
    "loss_type": "grpo",
    "beta": 0.0,
    "max_steps": NUM_STEPS,
    "logging_steps": 1,
    "log_completions": True,
    "num_completions_to_print": 0,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
}
REWARDS = ["math_accuracy_reward", "graded_format_reward", "tag_count_reward"]


def test_a_real_model_trains_on_real_problems(tmp_path):
    command = [*COMMAND_LINE, "grpo"]
    for name, value in SETTINGS.items():
        command += [f"--{name}", str(value)]
    command += ["--reward_funcs", *REWARDS, "--reward_weights", "1.0", "0.1", "0.1", "--output_dir", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=3500, check=False)
    assert result.returncode == 0, result.stderr[-3000:]

    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    steps = [logs for logs in history if "loss" in logs]
    assert len(steps) == NUM_STEPS
    assert all(math.isfinite(logs["loss"]) and math.isfinite(logs["grad_norm"]) for logs in steps)
    assert any(logs["grad_norm"] > 0 for logs in steps)
    assert all(0 <= logs["reward"] <= 1.2 for logs in steps)
    for step in range(1, NUM_STEPS + 1):
        table = pd.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
        assert len(table) == 16
        assert table["kept"].sum() == 4
        assert {*REWARDS, "extracted_answer", "solution"} <= set(table.columns)
        total = table["math_accuracy_reward"] + 0.1 * (table["graded_format_reward"] + table["tag_count_reward"])
        dropped, kept = total[~table["kept"]], total[table["kept"]]
        assert kept.max() >= dropped.max()
        assert kept.min() <= dropped.min()
    assert (tmp_path / "adapter_model.safetensors").is_file()
