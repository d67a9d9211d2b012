"""
Runs under `accelerate launch`, with the settings of DDP or of a ZeRO stage: `sharding_cases.py FOLDER`.

Trains the model in FOLDER/model in each of CASES and saves it to FOLDER/<case>; the assertions are in
test_deepspeed.py.
"""

import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from cases import STRADDLING, Spy, distinct_words
from launching import give_up_in_time
from peft import LoraConfig
from rig import Script, make_trainer, step_logs
from torch.distributed import destroy_process_group


# Three groups: with two kept of each, the second lies on both processes. Four groups: two lie on each.
NUM_GROUPS = {"straddling": 3, "inside": 4}
SAMPLED = {"rollout_func": None, "reward_funcs": [distinct_words]}
CASES = {
    "full_inside": ("inside", {}),
    "full_straddling": ("straddling", {}),
    "full_sampled": ("straddling", SAMPLED),
    "lora_inside": ("inside", {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}),
    "lora_straddling": ("straddling", {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}),
}


def run(folder, case):
    where, trainer_kwargs = CASES[case]
    num_groups = NUM_GROUPS[where]
    script = Script((STRADDLING + STRADDLING)[:num_groups])
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
    trainer.train()
    trainer.save_model(str(folder / case))
    return {
        "backend": [str(trainer.accelerator.distributed_type), _zero_stage(trainer)],
        "trained": trainer.trained,
        "logs": [{key: value for key, value in logs.items() if "time" not in key} for logs in step_logs(trainer)],
    }


def _zero_stage(trainer):
    plugin = trainer.accelerator.state.deepspeed_plugin
    # What the engine does, not what was asked for.
    return trainer.model_wrapped.zero_optimization_stage() if plugin else None


def main():
    give_up_in_time()
    folder = Path(sys.argv[1])
    results = {case: run(folder, case) for case in CASES}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        destroy_process_group()


if __name__ == "__main__":
    main()
