"""
DeepSpeed's ZeRO stages and DDP, each in two real processes on a CPU, by TRL's own accelerate settings.

Needs deepspeed, which is not among the test dependencies: `pip install deepspeed`, or a folder of it in PYTHONPATH.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import trl
import yaml
from launching import launch, once
from peft import PeftModel
from rig import make_model
from safetensors.torch import load_file
from sharding_cases import CASES
from transformers import AutoModelForCausalLM


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

SCRIPT = Path(__file__).parent / "sharding_cases.py"
STAGES = (1, 2, 3)
FULL = [case for case in CASES if case.startswith("full")]
LORA = [case for case in CASES if case.startswith("lora")]


def settings_on_a_cpu(stage):
    """TRL's settings of a ZeRO stage, as they are but for the machine."""
    settings = yaml.safe_load((Path(trl.__file__).parent / "accelerate_configs" / f"zero{stage}.yaml").read_text())
    assert settings["deepspeed_config"]["zero_stage"] == stage
    return settings | {"use_cpu": True, "num_processes": 2, "mixed_precision": "no"}


def train(folder, stage):
    """All cases in one launch. The first under DeepSpeed on a machine also compiles its exchange for CPUs."""
    make_model().save_pretrained(folder / "model")
    if stage == 0:
        launch(SCRIPT, folder, num_processes=2)
        return
    config_file = folder / "accelerate.yaml"
    config_file.write_text(yaml.safe_dump(settings_on_a_cpu(stage)))
    launch(SCRIPT, folder, num_processes=2, config_file=config_file, timeout=420, DS_ACCELERATOR="cpu")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """By ZeRO stage, 0 for DDP: the models saved, and what each process saw."""
    return lambda stage: once(tmp_path_factory, f"zero-{stage}", lambda folder: train(folder, stage))


@pytest.fixture
def seen_in(folder_of):
    return lambda stage: [json.loads((folder_of(stage) / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def assert_equal(ours, theirs, atol=1e-6):
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        torch.testing.assert_close(weight, theirs[key], atol=atol, rtol=0, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("stage", STAGES)
def test_losses_and_kept_rows_are_those_of_ddp(seen_in, stage, case):
    for ours, theirs in zip(seen_in(stage), seen_in(0), strict=True):
        assert theirs[case]["backend"] == ["DistributedType.MULTI_CPU", None]
        assert ours[case]["backend"] == ["DistributedType.DEEPSPEED", stage]
        assert ours[case]["trained"] == theirs[case]["trained"]
        assert len(ours[case]["logs"]) == 3
        assert max(logs["kl"] for logs in theirs[case]["logs"]) > 1e-5
        for our_logs, their_logs in zip(ours[case]["logs"], theirs[case]["logs"], strict=True):
            assert our_logs == pytest.approx(their_logs, abs=1e-6, rel=1e-5)


@pytest.mark.parametrize("case", FULL)
@pytest.mark.parametrize("stage", STAGES)
def test_the_saved_weights_are_those_of_ddp(folder_of, stage, case):
    ours, theirs = (load_file(folder_of(s) / case / "model.safetensors") for s in (stage, 0))
    start = load_file(folder_of(stage) / "model" / "model.safetensors")
    assert max((weight - start[key]).abs().max() for key, weight in ours.items()) > 1e-2
    assert_equal(ours, theirs)
    reloaded = AutoModelForCausalLM.from_pretrained(folder_of(stage) / case).state_dict()
    assert all(torch.equal(reloaded[key], weight) for key, weight in ours.items())


@pytest.mark.parametrize("case", LORA)
@pytest.mark.parametrize("stage", STAGES)
def test_the_saved_adapter_is_that_of_ddp_and_can_be_loaded(folder_of, stage, case):
    ours, theirs = (load_file(folder_of(s) / case / "adapter_model.safetensors") for s in (stage, 0))
    assert max(weight.abs().max() for key, weight in ours.items() if "lora_B" in key) > 1e-3  # 0 before training
    assert_equal(ours, theirs)
    base = AutoModelForCausalLM.from_pretrained(folder_of(stage) / "model")
    reloaded = PeftModel.from_pretrained(base, folder_of(stage) / case).state_dict()
    for key, weight in ours.items():
        assert torch.equal(reloaded[key.replace(".weight", ".default.weight")], weight), key
