"""Trainers that make one step at a time, in turn, so that a slow phase of the machine meets all of them."""

import os
import statistics
import time
from collections.abc import Callable

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from trl_pods.data.addition import embedded_policy_path
from trl_pods.scripts.measure_step import make_reward, settings_for_equal_work, watch


SMOLLM2 = "TRL_PODS_SMOLLM2"  # a folder with the model and its tokenizer

# Model and tokens of a completion.
MODELS = [
    pytest.param("the embedded policy", 24, id="embedded"),
    pytest.param(
        "SmolLM2-135M",
        16,
        id="smollm2",
        marks=pytest.mark.skipif(SMOLLM2 not in os.environ, reason=f"{SMOLLM2} names no folder of SmolLM2-135M"),
    ),
]


def folder_of(model: str) -> str:
    return str(embedded_policy_path()) if model == "the embedded policy" else os.environ[SMOLLM2]


class Arm:
    """
    A trainer and its steps: rows that were `generated` and `trained` on, seconds of the `step` and of its `rollouts`
    (generation, rewards and what TRL does with them before the update).
    """

    def __init__(
        self,
        trainer_class: type,
        config_class: type,
        model: str,
        folder,
        completion_tokens: int,
        prompts: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        use_cpu: bool = not torch.cuda.is_available(),
        **settings,
    ) -> None:
        self.steps: list[dict] = []
        tokenizer = AutoTokenizer.from_pretrained(folder_of(model))
        self.trainer = trainer_class(
            model=folder_of(model),
            reward_funcs=self._keeping(make_reward(completion_tokens, self.steps)),
            args=config_class(
                output_dir=str(folder),
                use_cpu=use_cpu,
                bf16=False,
                model_init_kwargs={"dtype": "float32"},
                max_steps=1,
                lr_scheduler_type="constant",
                **settings_for_equal_work(tokenizer, completion_tokens),
                **settings,
            ),
            train_dataset=Dataset.from_dict({"prompt": [f"{10 + i}+{20 + i}=" for i in range(prompts)]}),
            processing_class=tokenizer,
        )
        watch(self.trainer, self.steps, clock)
        self._time_rollouts(clock)
        self._note_what_is_trained_on()

    def step(self) -> None:
        self.trainer.train()

    def _keeping(self, reward_function):
        def keeping(completion_ids, **kwargs):
            rewards = reward_function(completion_ids, **kwargs)
            self.steps[-1]["rewards"] = rewards
            self.steps[-1]["reward_of"] = dict(zip(map(tuple, completion_ids), rewards, strict=True))
            return rewards

        return keeping

    def _time_rollouts(self, clock) -> None:
        make = self.trainer._generate_and_score_completions

        def timed(inputs):
            start = clock()
            output = make(inputs)
            self.steps[-1]["rollouts"] = clock() - start
            return output

        self.trainer._generate_and_score_completions = timed

    def _note_what_is_trained_on(self) -> None:
        compute_loss = self.trainer._compute_loss

        def noted(model, inputs):
            rows = map(tuple, inputs["completion_ids"].tolist())
            self.steps[-1].setdefault("kept_rewards", []).extend(self.steps[-1]["reward_of"][row] for row in rows)
            return compute_loss(model, inputs)

        self.trainer._compute_loss = noted


def step_in_turn(arms: dict[str, Arm], passes: int, warmup: int = 1) -> None:
    in_turn = list(arms.values())
    for _ in range(warmup + passes):
        for arm in in_turn:
            arm.step()
        in_turn = [*in_turn[1:], in_turn[0]]  # a step leaves memory and caches to the next one
    for arm in arms.values():
        del arm.steps[:warmup]


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Of the ratios in each pass, whose steps stand close together in time."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))
