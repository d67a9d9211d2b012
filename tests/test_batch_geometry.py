"""Rows, rounds and steps: what is scored, what enters the model, in which order prompts come."""

import pytest
import torch
from peft import LoraConfig
from rig import (
    F1,
    LOGGED,
    N8_M4,
    ForwardCounter,
    Group,
    Script,
    assert_equal_weights,
    make_trainer,
    read_table,
    step_logs,
    train,
)
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer


@pytest.mark.parametrize(("b", "a", "n", "m"), [(4, 1, 64, 4), (2, 2, 8, 2), (1, 4, 16, 4), (4, 1, 7, 4)])
def test_every_rollout_is_scored_once_and_the_model_sees_no_more_than_a_batch(tmp_path, b, a, n, m):
    num_groups = b * a // m
    lengths = [2 + 31 * (i % 3) for i in range(n)]  # 2, 33 and 64 tokens
    script = Script([Group([i % 3 for i in range(n)], lengths) for _ in range(num_groups)])
    trainer = make_trainer(
        tmp_path,
        script,
        num_rollouts=n,
        num_generations=m,
        per_device_train_batch_size=b,
        gradient_accumulation_steps=a,
        max_completion_length=64,
    )
    counter = ForwardCounter(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 1
    (call,) = script.calls
    assert sorted(call) == [(group, i) for group in range(num_groups) for i in range(n)]
    assert counter.rows(with_grad=True) == [b] * a
    assert counter.rows(with_grad=False) == []


def test_the_update_holds_as_much_for_the_backward_pass_as_that_of_grpo_on_the_kept_rollouts(tmp_path):
    rewards, lengths = [0] * 62 + [1] * 2, [8] * 30 + [5] * 34
    kept = [0, 1, 62, 63]

    def bytes_held(name, script, trainer_class, config_class, **settings):
        held = []

        class Counting(trainer_class):
            def _compute_loss(self, *args):
                with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.nbytes) or t, lambda t: t):
                    return super()._compute_loss(*args)

        settings |= {"num_generations": 4, "per_device_train_batch_size": 4}
        train(tmp_path / name, script, Counting, config_class, **settings)
        return sum(held)

    groups = [Group(rewards, lengths)]
    pods = bytes_held("pods", Script(groups), PODSGRPOTrainer, PODSGRPOConfig, num_rollouts=64)
    assert pods == bytes_held("grpo", Script(groups, only={0: kept}), GRPOTrainer, GRPOConfig) > 0


@pytest.mark.parametrize(("num_iterations", "num_steps"), [(1, 4), (2, 8)])
def test_an_epoch_has_as_many_steps_as_with_grpo(tmp_path, num_iterations, num_steps):
    script = Script([Group([0, 1, 0, 1, 0, 0, 1, 1])] * 8)
    trainer = train(
        tmp_path,
        script,
        num_rollouts=8,
        num_generations=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_iterations=num_iterations,
        max_steps=-1,
        num_train_epochs=1,
    )
    assert [len(call) for call in script.calls] == [16] * 4
    assert sorted(row for call in script.calls for row in call) == [(p, i) for p in range(8) for i in range(8)]
    assert trainer.state.global_step == trainer.state.max_steps == num_steps
    assert trainer.state.epoch == 1.0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streamed_data_keep_their_groups(tmp_path, num_workers):
    script = Script([Group([0, 1, 0.2, 0.9])] * 7)
    stream = {"train_dataset": script.dataset().to_iterable_dataset()}
    settings = {"num_rollouts": 4, "num_generations": 2, "per_device_train_batch_size": 4}
    trainer = train(
        tmp_path, script, trainer_kwargs=stream, max_steps=4, dataloader_num_workers=num_workers, **settings
    )
    assert trainer.args.dataloader_num_workers == 0  # reduced by TRL, since workers would tear groups apart
    rounds = [[number for number, _ in call] for call in script.calls]
    assert rounds == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4, [4] * 4 + [5] * 4, [0] * 4 + [1] * 4]

    with pytest.raises(ValueError, match="max_steps"):
        train(tmp_path, script, trainer_kwargs=stream, max_steps=-1, **settings)


@pytest.mark.parametrize(("selector", "adapter"), [("max_variance", False), ("random", False), ("max_variance", True)])
def test_a_resumed_run_ends_with_the_weights_of_the_straight_run(tmp_path, selector, adapter):
    trainer_kwargs = {"peft_config": LoraConfig(r=4, target_modules="all-linear")} if adapter else {}
    settings = {
        "num_rollouts": 4,
        "num_generations": 2,
        "per_device_train_batch_size": 1,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": -1,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "save_strategy": "steps",
        "save_steps": 4,
        "selector": selector,
    }
    groups = [Group([0, 1, 0.5, 0.25], [2, 3, 4, 5])] * 6
    straight = train(tmp_path, Script(groups), trainer_kwargs=trainer_kwargs, **settings)
    assert straight.state.global_step == 12
    script = Script(groups)
    resumed = make_trainer(tmp_path, script, trainer_kwargs=trainer_kwargs, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert [sorted({number for number, _ in call}) for call in script.calls] == [[2, 3], [4, 5]]
    assert resumed.state.global_step == resumed.state.max_steps == 12
    assert [logs["loss"] for logs in step_logs(resumed)] == [logs["loss"] for logs in step_logs(straight)[4:]]
    rounds = step_logs(resumed)[::4], step_logs(straight)[4::4]
    for ours, theirs in zip(*rounds, strict=True):
        for key in ("num_tokens", "reward", "pods/kept_reward", "epoch"):
            assert ours[key] == theirs[key], key
    assert_equal_weights(resumed, straight)


def test_the_random_rule_draws_anew_in_each_round_and_depends_on_the_seed(tmp_path):
    def drawn(seed, **settings):
        trainer = train(
            tmp_path, Script([F1]), selector="random", seed=seed, max_steps=6, **(N8_M4 | settings), **LOGGED
        )
        return [read_table(trainer, step)["kept"].tolist() for step in range(1, 7)]

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    assert len({tuple(row) for row in drawn(0)}) > 1
    # Two rounds in one optimizer step draw differently too.
    seen = []

    def rule(rewards, num_selected, generator):
        seen.append(generator.initial_seed())
        return torch.arange(num_selected)[None]

    script = Script([F1] * 4)
    train(tmp_path, script, selector=rule, gradient_accumulation_steps=2, steps_per_generation=1, max_steps=2, **N8_M4)
    assert len(set(seen)) == 4
