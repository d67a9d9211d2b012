"""
Runs under torchrun for DDP, and under `accelerate launch` with the settings of a ZeRO stage or of FSDP2:
`sharding_cases.py FOLDER`.

Trains the model in FOLDER/model in each of CASES and saves it to FOLDER/<case>; the assertions are in
test_sharding.py.
"""

import json
import os
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch


sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from accelerate import DistributedType, PartialState
from accelerate.state import AcceleratorState
from cases import STRADDLING, Spy
from datasets import Dataset
from launching import give_up_in_time
from peft import LoraConfig
from rig import Script, make_trainer, number_of_distinct_words, step_logs
from torch.distributed import destroy_process_group
from torch.distributed.fsdp import FSDPModule

from trl_pods import held_out_accuracy
from trl_pods.held_out_accuracy import AccuracyCallback, measure_accuracy


def judging(script):
    """Rewards of the script in training; of held-out problems the completions with an odd sum are right."""
    (reward,) = script.reward_functions()

    def f1(completion_ids, **columns):
        return reward(**columns) if "rollout" in columns else [float(sum(ids) % 2) for ids in completion_ids]

    return f1


# Three groups: with two kept of each, the second lies on both processes. Four groups: two lie on each.
NUM_GROUPS = {"straddling": 3, "inside": 4}
SAMPLED = {"rollout_func": None, "reward_funcs": [number_of_distinct_words]}
MEASURED = "full_measured"
CASES = {
    MEASURED: ("straddling", {}),
    "full_inside": ("inside", {}),
    "full_straddling": ("straddling", {}),
    "full_sampled": ("straddling", SAMPLED),
    "lora_inside": ("inside", {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}),
    "lora_straddling": ("straddling", {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}),
}


# Five problems on two processes, two at a time: the last part of one is empty. Completions end early, at other places.
PROBLEMS = Dataset.from_dict({"prompt": [f"w{20 + i} w3" + " w4" * i for i in range(5)]})
ENDS = list(range(0, 128, 3))


def let_accelerate_shard_on_a_cpu():
    """
    accelerate takes FSDP for GPUs alone and gives DDP on a CPU, without a word. This lifts that one condition; what
    accelerate, transformers and TRL do about FSDP2 then runs.
    """
    initialise = AcceleratorState.__init__

    def initialise_with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
        initialise(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = initialise_with_fsdp


def run(folder, case):
    where, trainer_kwargs = CASES[case]
    num_groups = NUM_GROUPS[where]
    script = Script((STRADDLING + STRADDLING)[:num_groups])
    if case == MEASURED:
        trainer_kwargs = {"reward_funcs": judging(script)}
    trainer = make_trainer(
        folder / case,
        script,
        Spy,
        trainer_kwargs={"model": str(folder / "model")} | trainer_kwargs,
        num_rollouts=4,
        num_generations=2,
        per_device_train_batch_size=num_groups,
        learning_rate=0.5,
        # Adam would make a full step of a gradient that is nothing but rounding.
        optim="sgd",
        lr_scheduler_type="constant",
        beta=0.1,  # with a reference model, or the adapter switched off
        max_steps=3,
    )
    measured = measuring(trainer) if case == MEASURED else nullcontext({})
    with measured as found:
        trainer.train()
        trainer.save_model(str(folder / case))
    return {
        "backend": _backend(trainer),
        **found,
        "trained": trainer.trained,
        "logs": [{key: value for key, value in logs.items() if "time" not in key} for logs in step_logs(trainer)],
    }


@contextmanager
def measuring(trainer):
    """Measures the accuracy before training, after each step and after training, and once where a process fails."""
    trainer.args.generation_kwargs = {"eos_token_id": ENDS}
    found = {"early": _outcome(lambda: measure_accuracy(trainer, PROBLEMS, 5))}
    trainer.add_callback(AccuracyCallback(trainer, PROBLEMS, 5, minutes=1e-9))
    with patch.object(held_out_accuracy, "_BATCH_SIZE", 2):
        yield found
        found["logged"] = [
            (entry["step"], entry["held_out_accuracy/sampled"], entry["held_out_accuracy/greedy"])
            for entry in trainer.state.log_history
            if "held_out_accuracy/greedy" in entry
        ]
        trainer.model.train()
        random_state = torch.get_rng_state()
        found["after"] = _outcome(lambda: measure_accuracy(trainer, PROBLEMS, 5))
        found["restored"] = trainer.model.training and torch.equal(torch.get_rng_state(), random_state)
        trainer.reward_funcs[0] = breaks_on_1
        found["failing"] = _outcome(lambda: measure_accuracy(trainer, PROBLEMS, 5))


def breaks_on_1(completions, **kwargs):
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("no score today")
    return [1.0] * len(completions)


def _outcome(function):
    try:
        return asdict(function())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _backend(trainer):
    """What there is, not what was asked for."""
    model = trainer.model_wrapped
    if hasattr(model, "zero_optimization_stage"):
        return f"ZeRO-{model.zero_optimization_stage()}"
    if isinstance(model, FSDPModule):
        parts = [weight.to_local().numel() * 2 == weight.numel() for weight in model.parameters()]
        return "FSDP2, sharded" if all(parts) else "FSDP2"
    return type(model).__name__


def main():
    give_up_in_time()
    if os.environ.get("ACCELERATE_USE_FSDP"):
        let_accelerate_shard_on_a_cpu()
    folder = Path(sys.argv[1])
    results = {case: run(folder, case) for case in CASES}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        destroy_process_group()


if __name__ == "__main__":
    main()
