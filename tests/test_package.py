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


def pairs_of_recipes():
    """Each PODS recipe that has a baseline beside it, with that baseline."""
    return [
        (pods, baseline)
        for pods in sorted((ROOT / "recipes").rglob("*-pods.yaml"))
        for baseline in pods.parent.glob(f"{pods.stem.removesuffix('-pods')}-grpo*.yaml")
    ]


@pytest.mark.parametrize(
    ("pods", "baseline"),
    [pytest.param(*pair, id=f"{pair[0].parent.name}/{pair[1].stem}") for pair in pairs_of_recipes()],
)
def test_a_baseline_differs_from_its_recipe_in_what_defines_the_arm_alone(pods, baseline):
    pods, baseline, arm = yaml.safe_load(pods.read_text()), yaml.safe_load(baseline.read_text()), baseline.stem
    n, m = pods.pop("num_rollouts"), pods["num_generations"]
    if arm.endswith("-grpo-ga"):  # as many rollouts a step, by more accumulation steps
        assert baseline.pop("gradient_accumulation_steps") * m == pods.pop("gradient_accumulation_steps") * n
    assert n > m
    assert pods == baseline


def test_every_setting_of_the_paper_has_both_arms():
    sizes = {
        f"{pods.parent.name}/{pods.stem}": tuple(
            yaml.safe_load(pods.read_text())[key]
            for key in ("num_rollouts", "num_generations", "max_train_minutes", "eval_minutes")
        )
        for pods, _ in pairs_of_recipes()
    }
    assert sizes == {
        "gsm8k/qwen2.5-3b-lora-pods": (64, 16, 360, 30),
        "math/qwen2.5-3b-lora-pods": (32, 8, 360, 30),
        "gsm8k/llama-3.2-3b-lora-pods": (64, 16, 120, 10),
        "chemistry/qwen2.5-3b-lora-pods": (64, 16, 360, 30),
        "gsm8k/qwen2.5-3b-8gpu-pods": (128, 32, 40, 2),
        "gsm8k/qwen2.5-7b-8gpu-pods": (128, 32, 40, 2),
    }


def test_lines_of_documents_and_recipes_are_no_longer_than_those_of_code():
    recipes = [path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".md", ".yaml")]
    assert len(recipes) > 20
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(ROOT / ".ci").iterdir(), *recipes):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            assert len(line) <= 119 or line.startswith("|"), f"{path}:{number}"  # a row of a table is one line


def test_the_readme_shows_settings_and_a_rule_that_work(tmp_path):
    readme = (ROOT / "README.md").read_text()
    ours, theirs = (re.search(rf"args=({name}\(.*\)),\n", readme)[1] for name in ("PODSGRPOConfig", "GRPOConfig"))
    options = f", output_dir={str(tmp_path)!r}, use_cpu=True, bf16=False)"
    scope = {"PODSGRPOConfig": trl_pods.PODSGRPOConfig, "GRPOConfig": GRPOConfig}
    assert eval(theirs.removesuffix(")") + options, scope).num_generations == 16
    assert eval(ours.removesuffix(")") + options, scope).num_rollouts == 64
    (with_vllm,) = re.findall(r"args=(PODSGRPOConfig\(\n.*?)\n    \),\n", readme, re.DOTALL)
    assert eval(with_vllm.removesuffix(",") + options, scope).num_rollouts == 64

    (rule,) = re.findall(r"```python\n(def right_and_short.*?)\n\n\n", readme, re.DOTALL)
    exec(f"import torch\n{rule}", scope)
    rewards = torch.tensor([[0.0, torch.nan, 1.0, 1.0, 0.0]], dtype=torch.float64)
    lengths = torch.tensor([[5, 1, 400, 4, 3]])
    kept = select(scope["right_and_short"], rewards, 3, completion_lengths=lengths)
    assert kept.tolist() == [[2, 3, 4]]


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
