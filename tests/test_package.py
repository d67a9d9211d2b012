"""The package as it is installed."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from rig import COMMAND_LINE
from trl import GRPOConfig

import trl_pods
from trl_pods.selectors import select


ROOT = Path(__file__).parents[1]


def run(arguments, folder, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_importing_it_is_light(tmp_path):
    code = (
        "import sys, trl_pods; "
        "heavy = {'torch', 'trl', 'transformers', 'vllm', 'datasets', 'matplotlib'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    result = run(["-c", code], tmp_path)
    assert result.returncode == 0, result.stderr


def test_public_names_are_there():
    for name in trl_pods.__all__:
        assert getattr(trl_pods, name) is not None
    assert set(trl_pods.__all__) <= set(dir(trl_pods))
    with pytest.raises(AttributeError, match="no attribute 'PPOTrainer'"):
        _ = trl_pods.PPOTrainer


def test_a_baseline_differs_from_its_recipe_in_what_defines_pods_alone():
    def settings(name):
        return yaml.safe_load((ROOT / "recipes" / "gsm8k" / f"qwen2.5-3b-lora-{name}.yaml").read_text())

    pods, grpo = settings("pods"), settings("grpo")
    assert pods.pop("num_rollouts") == 64
    assert pods == grpo


def test_the_readme_shows_settings_and_a_rule_that_work(tmp_path):
    readme = (ROOT / "README.md").read_text()
    ours, theirs = (re.search(rf"args=({name}\(.*\)),\n", readme)[1] for name in ("PODSGRPOConfig", "GRPOConfig"))
    options = f", output_dir={str(tmp_path)!r}, use_cpu=True, bf16=False)"
    scope = {"PODSGRPOConfig": trl_pods.PODSGRPOConfig, "GRPOConfig": GRPOConfig}
    assert eval(theirs.removesuffix(")") + options, scope).num_generations == 16
    assert eval(ours.removesuffix(")") + options, scope).num_rollouts == 64

    (rule,) = re.findall(r"```python\n(def shortest.*?)\n\n\n", readme, re.DOTALL)
    exec(rule, scope)
    rewards = torch.tensor([[0.0, torch.nan, 1.0, 0.0]], dtype=torch.float64)
    lengths = torch.tensor([[5, 1, 4, 3]])
    assert select(scope["shortest"], rewards, 2, completion_lengths=lengths).tolist() == [[2, 3]]


@pytest.mark.slow
def test_the_quickstart_learns_from_the_built_wheel_in_an_empty_folder(tmp_path):
    build = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    built = run(build, tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    empty = tmp_path / "empty"
    empty.mkdir()
    site = str(tmp_path / "site")
    where = run(["-c", "import trl_pods; print(trl_pods.__file__)"], empty, PYTHONPATH=site)
    assert where.stdout.startswith(site)

    result = run([*COMMAND_LINE[1:], "grpo", "--config", "quickstart"], empty, PYTHONPATH=site)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    accuracy = {
        name: (float(before), float(after))
        for name, before, after in re.findall(r"(sampled|greedy)\W+([\d.]+)\W+([\d.]+)", result.stdout)
    }
    assert accuracy["sampled"][0] < 0.25
    assert accuracy["sampled"][1] > 0.6
    assert accuracy["greedy"][1] > accuracy["greedy"][0] + 0.15
    output = empty / "pods-quickstart"
    assert (output / "model.safetensors").is_file()
    assert (output / "trainer_state.json").is_file()
    assert len(list((output / "completions").glob("*.parquet"))) >= 20
