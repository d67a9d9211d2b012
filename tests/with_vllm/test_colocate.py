"""PODS with a real vLLM engine in the trainer's process, on the embedded policy (head_dim 32), on a CPU."""

import functools
import importlib
import math
import os
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from marks import needs_vllm
from one_word_policy import push_to_always_say
from rig import ForwardCounter, kept_rows, step_logs
from transformers import TrainerCallback


pytestmark = [*needs_vllm, pytest.mark.timeout(600)]

MODES = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
CLIP = {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.25}


@pytest.fixture(scope="module")
def colocate():
    return importlib.import_module("colocate")  # only now: it imports vLLM


@pytest.fixture
def make_trainer(colocate, tmp_path):
    made = []

    def make(*args, **kwargs):
        made.append(colocate.make_trainer(tmp_path, *args, **kwargs))
        return made[-1]

    with patch.dict(os.environ):  # TRL and accelerate set the rank and the port of a process group
        yield make
        for trainer in made:
            colocate.shut_down(trainer)


@pytest.fixture
def float32_engine(monkeypatch):
    """vLLM runs a float32 model in bfloat16 by default, where another of two near tokens may be the likeliest."""
    generation = importlib.import_module("trl.generation.vllm_generation")
    monkeypatch.setattr(generation, "LLM", functools.partial(generation.LLM, dtype="float32"))


class AtStepEnd(TrainerCallback):
    def __init__(self, function):
        self.function = function

    def on_step_end(self, args, state, control, **kwargs):
        self.function(state.global_step)


@pytest.mark.parametrize(("sized_for", "max_num_seqs", "waves"), [("n", 16, 1), ("m", 4, 4)])
def test_all_rollouts_of_a_round_run_in_one_wave(make_trainer, monkeypatch, sized_for, max_num_seqs, waves):
    if sized_for == "m":  # as TRL sizes it
        monkeypatch.setattr("trl_pods.pods_grpo_trainer._engine_sized_for_rollouts", lambda trainer: nullcontext())
    length = 6
    trainer = make_trainer(max_steps=2, generation_kwargs={"ignore_eos": True}, max_completion_length=length)
    policy = ForwardCounter(trainer.model)
    trainer.train()
    calls = trainer.engine_calls
    print(f"sized for {sized_for}: max_num_seqs {calls.max_num_seqs}, {calls.steps[0] / length:g} waves of a round")
    assert calls.max_num_seqs == max_num_seqs
    assert calls.requests == [16, 16]  # one call a round
    assert calls.steps == [waves * length] * 2
    assert calls.syncs == 2
    assert policy.rows(with_grad=False) == policy.rows(with_grad=True) == [4, 4]  # old log-probs: of the kept alone


def test_completions_after_a_sync_come_from_the_new_weights(make_trainer, colocate):
    trainer = make_trainer(max_steps=3)
    seven = trainer.processing_class.convert_tokens_to_ids("7")

    def push(step):
        if step == 2:
            push_to_always_say(trainer.model, seven)

    trainer.add_callback(AtStepEnd(push))
    trainer.train()
    *before, after = [[set(ids) == {seven} for ids in completions] for completions in trainer.engine_calls.completions]
    assert [any(said) for said in before] == [False, False]
    assert all(after)
    assert len(after) == 16


def test_log_probs_and_importance_sampling_ratios_follow_their_rows(make_trainer, colocate):
    outputs = []

    class Spy(colocate.PODSGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            self.vllm_importance_sampling_mode = MODES[len(outputs)]
            outputs.append(super()._generate_and_score_completions(inputs))
            return outputs[-1]

    trainer = make_trainer(Spy, max_steps=4, log_completions=True, num_completions_to_print=0, **CLIP)
    calls, generation = trainer.engine_calls, trainer.vllm_generation
    # The policy leaves the engine behind, so that the ratios are far from 1.
    generation.sync_weights = lambda: None
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    generate = generation.generate

    def without_some_log_probs(*args, **kwargs):
        prompts, completions, logprobs, ids = generate(*args, **kwargs)
        for row in range(0, len(logprobs), 2):  # as where the engine says NaN
            logprobs[row][0] = [None]
        return prompts, completions, logprobs, ids

    generation.generate = without_some_log_probs
    trainer.train()
    clipped = set()
    for step, (mode, output) in enumerate(zip(MODES, outputs, strict=True), start=1):
        assert kept_rows(trainer, step) == colocate.KEPT
        for position, row in enumerate(colocate.KEPT):
            ids, logprobs = calls.completions[step - 1][row], torch.tensor(calls.logprobs[step - 1][row])
            mask = output["completion_mask"][position].bool()
            assert output["completion_ids"][position][mask].tolist() == ids
            sampled = output["sampling_per_token_logps"][position][mask]
            assert sampled[0].isnan() == (row % 2 == 0)
            difference = output["old_per_token_logps"][position][mask] - logprobs
            if row % 2 == 0:
                difference[0] = 0.0
            assert torch.equal(sampled[1:], logprobs[1:])
            if mode.startswith("sequence"):
                difference = difference.sum().view(1)
            expected = difference.exp()
            outside = (expected < 0.8) | (expected > 1.25)
            clipped |= {mode} if outside.any() else set()
            expected = expected.masked_fill(outside, 0.0) if mode.endswith("mask") else expected.clamp(0.8, 1.25)
            ratio = output["importance_sampling_ratio"][position]
            ratio = ratio if mode.startswith("sequence") else ratio[mask]
            assert ratio.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert clipped == set(MODES)
    assert all(math.isfinite(logs["loss"]) for logs in step_logs(trainer))


def test_merged_weights_of_an_adapter_reach_the_engine(make_trainer):
    from peft import LoraConfig

    adapter = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    trainer = make_trainer(max_steps=4, learning_rate=1e-2, trainer_settings={"peft_config": adapter})
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    merged, in_engine = [], []
    sync = trainer.vllm_generation.sync_weights

    def note():
        sync()
        layer = trainer.model.base_model.model.model.layers[0].self_attn
        with torch.no_grad():
            parts = [p.base_layer.weight + p.get_delta_weight("default") for p in (layer.q_proj, layer.k_proj)]
        merged.append(torch.cat(parts))
        in_engine.append(trainer.engine_calls.weights["model.layers.0.self_attn.qkv_proj.weight"][: 2 * 64])

    trainer.vllm_generation.sync_weights = note
    trainer.train()
    assert len(merged) == 4
    for ours, theirs in zip(merged, in_engine, strict=True):
        assert torch.equal(ours.to(theirs.dtype), theirs)
    assert not torch.equal(in_engine[0], in_engine[-1])
    for name, parameter in trainer.model.named_parameters():
        assert parameter.requires_grad == ("lora" in name)
        assert torch.equal(parameter, before[name]) == ("lora" not in name), name


def test_greedy_completions_are_those_of_transformers(make_trainer, float32_engine):
    trainer = make_trainer(
        max_steps=1,
        num_rollouts=2,
        num_generations=2,
        per_device_train_batch_size=128,
        generation_kwargs={"temperature": 0.0},
    )
    trainer.train()
    (prompts,), (completions,) = trainer.engine_calls.prompts, trainer.engine_calls.completions
    assert len({tuple(prompt) for prompt in prompts}) == 64
    eos = trainer.processing_class.eos_token_id
    for prompt, completion in zip(prompts, completions, strict=True):
        output = trainer.model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        greedy = output[0, len(prompt) :].tolist()
        assert completion == (greedy[: greedy.index(eos) + 1] if eos in greedy else greedy)


def test_the_engine_serves_evaluation_with_its_own_number(make_trainer, colocate):
    trainer = make_trainer(max_steps=1, num_generations_eval=2, per_device_eval_batch_size=4)
    trainer.train()
    logs = trainer.evaluate(colocate.load_addition("test").select(range(4)))
    assert trainer.engine_calls.requests == [16, 4, 4]
    first = trainer.engine_calls.prompts[1]
    assert first[0] == first[1] != first[2] == first[3]
    assert trainer.engine_calls.syncs == 2  # once more for the weights after the step
    assert logs["eval_rewards/by_number/mean"] == 1.5


def test_this_vllm_refuses_sleep_mode_on_a_cpu(make_trainer):
    with pytest.raises(ValueError, match="Sleep mode is not supported on current platform"):
        make_trainer(vllm_enable_sleep_mode=True)


def test_an_engine_that_forgets_its_weights_while_asleep_gets_them_again(make_trainer, colocate, monkeypatch):
    """Sleep mode at level 2 as far as a CPU goes: the trainer's calls are real, the sleep is played."""
    generation = importlib.import_module("trl.generation.vllm_generation")
    history = []

    class Sleeper(generation.LLM):
        def __init__(self, *args, enable_sleep_mode, **kwargs):
            assert enable_sleep_mode
            super().__init__(*args, **kwargs)

        def sleep(self, level):
            history.append(f"sleep {level}")
            for parameter in self.llm_engine.model_executor.driver_worker.model_runner.model.parameters():
                parameter.data.zero_()

        def wake_up(self, tags):
            history.append(f"wake {tags[0]}")

    monkeypatch.setattr(generation, "LLM", Sleeper)
    trainer = make_trainer(
        max_steps=2, vllm_enable_sleep_mode=True, steps_per_generation=1, gradient_accumulation_steps=2
    )
    seven = trainer.processing_class.convert_tokens_to_ids("7")
    push_to_always_say(trainer.model, seven)
    trainer.train()
    # Two rounds in each optimizer step; in the second the weights are new only to the engine.
    assert history == ["sleep 2", *["wake weights", "wake kv_cache", "sleep 2"] * 4]
    assert trainer.engine_calls.requests == [16] * 4
    assert trainer.engine_calls.syncs == 4
    assert all(set(ids) == {seven} for completions in trainer.engine_calls.completions for ids in completions)
