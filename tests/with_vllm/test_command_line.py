"""
Recipes with `--use_vllm true`: the quickstart, and nightly a real model on real problems.

    TRL_PODS_SMOLLM2=FOLDER .ci/vllm "vllm and nightly"

FOLDER holds SmolLM2-135M-Instruct as transformers saves it; GSM8K is looked for as in test_real_model.py.
"""

import json
import subprocess

import pandas as pd
import pytest
from engine_settings import child_environment
from marks import needs_vllm


pytestmark = needs_vllm


def run(folder, timeout, *arguments):
    from rig import COMMAND_LINE

    result = subprocess.run(
        [*COMMAND_LINE, "grpo", *map(str, arguments), "--use_vllm", "true", "--output_dir", str(folder)],
        env=child_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-5000:]
    assert "Traceback" not in result.stderr  # nor in the end, when the engine goes
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [logs for logs in history if "loss" in logs], result.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("num_processes", "batch_size"), [(1, 16), (2, 12)])
def test_the_quickstart_generates_by_vllm(tmp_path, num_processes, batch_size):
    # With two processes, an engine in each, the second of three groups lies on both.
    settings = ["--max_steps", 3, "--logging_steps", 1, "--num_accuracy_problems", 64]
    settings += ["--num_processes", num_processes, "--per_device_train_batch_size", batch_size]
    steps, output = run(tmp_path, 500, "--config", "quickstart", *settings)
    assert len(steps) == 3
    table = pd.read_parquet(tmp_path / "completions" / "completions_00003.parquet")
    assert len(table) == 4 * num_processes * batch_size
    for start in range(0, len(table), 32):
        group = table[start : start + 32]
        assert group["prompt"].nunique() == 1
        assert group["kept"].sum() == 8
    for logs in steps:
        assert logs["grad_norm"] > 0
        assert 0 < logs["reward"] < 1
        # Of tokens sampled by the engine in bfloat16, as the policy in float32 sees them.
        assert logs["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.05)
    assert "Held-out accuracy" in output


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_real_model_generates_by_vllm(tmp_path):
    import test_real_model as real

    if not real.MODEL:
        pytest.skip("TRL_PODS_SMOLLM2 names no model folder")
    if not (real.SHARED / "data/gsm8k").is_dir():
        pytest.skip(f"no GSM8K in {real.SHARED}/data/gsm8k")
    settings = real.SETTINGS | {"max_steps": 6, "max_completion_length": 64, "vllm_max_model_length": 512}
    arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
    steps, _ = run(tmp_path, 3500, *arguments, "--reward_funcs", *real.REWARDS)
    assert len(steps) == 6
    for number, logs in enumerate(steps, start=1):
        assert logs["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.2)
        table = pd.read_parquet(tmp_path / "completions" / f"completions_{number:05d}.parquet")
        assert len(table) == 16
        assert table["kept"].sum() == 4
    assert (tmp_path / "adapter_model.safetensors").is_file()
