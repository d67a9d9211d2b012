"""A trainer with an engine in its own process, on the embedded task, and what can be seen of that engine."""

import gc
from pathlib import Path
from typing import Any

import torch
from rig import LogRecorder, make_config
from trl import GRPOTrainer

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer
from trl_pods.data.addition import embedded_policy_path, load_addition


N16_M4 = {"num_rollouts": 16, "num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 6}


def by_number(completions, **kwargs):
    """Rewards that make the kept rollouts of a group of 16 the first two and the last two."""
    return [float(i % 16) for i in range(len(completions))]


KEPT = [0, 1, 14, 15]


def make_trainer(
    folder: Path, trainer_class: type = PODSGRPOTrainer, reward=by_number, trainer_settings=None, **settings: Any
) -> GRPOTrainer:
    recorder = LogRecorder()
    trainer = trainer_class(
        model=str(embedded_policy_path()),
        reward_funcs=reward,
        args=make_config(folder, PODSGRPOConfig, use_vllm=True, vllm_mode="colocate", **(N16_M4 | settings)),
        train_dataset=load_addition("train"),
        callbacks=[recorder],
        **(trainer_settings or {}),
    )
    trainer.recorder = recorder
    trainer.engine_calls = EngineCalls(trainer)
    return trainer


class EngineCalls:
    """Notes what a trainer asks of its engine."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.requests: list[int] = []  # per call of `LLM.generate`
        self.steps: list[int] = []  # of the engine, per call
        self.prompts: list[list[list[int]]] = []
        self.completions: list[list[list[int]]] = []
        self.logprobs: list[list[list[float]]] = []
        self.syncs = 0
        self._engine = trainer.vllm_generation.llm.llm_engine
        self._llm, self._generation = trainer.vllm_generation.llm, trainer.vllm_generation
        self._generate, self._step = self._llm.generate, self._engine.step
        self._sync = self._generation.sync_weights
        self._llm.generate, self._engine.step, self._generation.sync_weights = self.generate, self.step, self.sync

    def generate(self, prompts, **kwargs):
        self.requests.append(len(prompts))
        self.steps.append(0)
        outputs = self._generate(prompts, **kwargs)
        self.prompts.append([list(output.prompt_token_ids) for output in outputs])
        self.completions.append([list(output.outputs[0].token_ids) for output in outputs])
        self.logprobs.append(
            [[next(iter(at.values())).logprob for at in output.outputs[0].logprobs] for output in outputs]
        )
        return outputs

    def step(self):
        self.steps[-1] += 1
        return self._step()

    def sync(self):
        self.syncs += 1
        return self._sync()

    @property
    def max_num_seqs(self) -> int:
        return self._engine.engine_core.engine_core.scheduler.max_num_running_reqs

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        model = self._engine.model_executor.driver_worker.model_runner.model
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def shut_down(trainer: GRPOTrainer) -> None:
    """End the engine, and with it the process group that it made."""
    trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
    trainer.vllm_generation.llm = trainer.engine_calls = None
    gc.collect()
