"""
DeepSpeed's ZeRO stages and FSDP2 against DDP, each in two real processes on a CPU, by TRL's own accelerate settings.

Those of DeepSpeed need deepspeed, which is not among the test dependencies: install it, or name a folder of it in
PYTHONPATH.
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
from sharding_cases import CASES, MEASURED
from transformers import AutoModelForCausalLM


pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "sharding_cases.py"
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)
# By the name of TRL's settings: what the model is then wrapped in.
BACKENDS = {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2, sharded"}
EACH_BACKEND = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NEEDS_DEEPSPEED if "zero" in name else ()) for name in BACKENDS]
)
FULL = [case for case in CASES if case.startswith("full")]
LORA = [case for case in CASES if case.startswith("lora")]


def train(folder, name):
    """All cases in one launch. The first under DeepSpeed on a machine also compiles its exchange for CPUs."""
    make_model().save_pretrained(folder / "model")
    if name == "ddp":
        launch(SCRIPT, folder, num_processes=2)
        return
    settings = yaml.safe_load((Path(trl.__file__).parent / "accelerate_configs" / f"{name}.yaml").read_text())
    settings |= {"use_cpu": True, "num_processes": 2, "mixed_precision": "no"}
    config_file = folder / "accelerate.yaml"
    config_file.write_text(yaml.safe_dump(settings))
    launch(SCRIPT, folder, num_processes=2, config_file=config_file, timeout=420, DS_ACCELERATOR="cpu")


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory):
    """By name of the settings, or "ddp": the folder of the models saved and of what each process saw."""
    return lambda name: once(tmp_path_factory, f"sharding-{name}", lambda folder: train(folder, name))


@pytest.fixture
def seen_by(saved_by):
    return lambda name: [json.loads((saved_by(name) / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def assert_equal(ours, theirs, atol=1e-6):
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        torch.testing.assert_close(weight, theirs[key], atol=atol, rtol=0, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("case", CASES)
@EACH_BACKEND
def test_losses_and_kept_rows_are_those_of_ddp(seen_by, name, case):
    for ours, theirs in zip(seen_by(name), seen_by("ddp"), strict=True):
        assert theirs[case]["backend"] == "DistributedDataParallel"
        assert ours[case]["backend"] == BACKENDS[name]
        assert ours[case]["trained"] == theirs[case]["trained"]
        assert len(ours[case]["logs"]) == 3
        assert max(logs["kl"] for logs in theirs[case]["logs"]) > 1e-5
        for our_logs, their_logs in zip(ours[case]["logs"], theirs[case]["logs"], strict=True):
            assert our_logs == pytest.approx(their_logs, abs=1e-6, rel=1e-5)


@pytest.mark.parametrize("case", FULL)
@EACH_BACKEND
def test_the_saved_weights_are_those_of_ddp(saved_by, name, case):
    ours, theirs = (load_file(saved_by(s) / case / "model.safetensors") for s in (name, "ddp"))
    start = load_file(saved_by(name) / "model" / "model.safetensors")
    assert max((weight - start[key]).abs().max() for key, weight in ours.items()) > 1e-2
    assert_equal(ours, theirs)
    reloaded = AutoModelForCausalLM.from_pretrained(saved_by(name) / case).state_dict()
    assert all(torch.equal(reloaded[key], weight) for key, weight in ours.items())


@pytest.mark.parametrize("case", LORA)
@EACH_BACKEND
def test_the_saved_adapter_is_that_of_ddp_and_can_be_loaded(saved_by, name, case):
    ours, theirs = (load_file(saved_by(s) / case / "adapter_model.safetensors") for s in (name, "ddp"))
    assert max(weight.abs().max() for key, weight in ours.items() if "lora_B" in key) > 1e-3  # 0 before training
    assert_equal(ours, theirs)
    base = AutoModelForCausalLM.from_pretrained(saved_by(name) / "model")
    reloaded = PeftModel.from_pretrained(base, saved_by(name) / case).state_dict()
    for key, weight in ours.items():
        assert torch.equal(reloaded[key.replace(".weight", ".default.weight")], weight), key


@EACH_BACKEND
def test_the_accuracy_on_held_out_problems_is_that_of_ddp_and_leaves_training_as_it_was(seen_by, name):
    ddp = seen_by("ddp")[0][MEASURED]
    assert [step for step, *_ in ddp["logged"]] == [0, 1, 2, 3]
    assert len({tuple(shares) for _, *shares in ddp["logged"]}) > 1
    assert {share for _, *shares in ddp["logged"] for share in shares} - {0.0, 1.0}
    for rank, ours in enumerate(seen_by(name)):
        measured = ours[MEASURED]
        assert measured["logged"] == ddp["logged"]
        assert measured["after"] == {"sampled": ddp["logged"][-1][1], "greedy": ddp["logged"][-1][2]}
        assert measured["restored"]
        assert measured["trained"] == ours["full_straddling"]["trained"]
        for logs, unmeasured in zip(measured["logs"], ours["full_straddling"]["logs"], strict=True):
            assert logs == pytest.approx(unmeasured, abs=1e-6, rel=1e-5)
        if name in ("zero3", "fsdp2"):
            assert measured["early"].startswith("NotImplementedError: With ZeRO-3 or FSDP2")
        failed = "ZeroDivisionError: no score today" if rank == 1 else "RuntimeError: Process 1 failed"
        assert measured["failing"].startswith(failed)
