"""Without down-sampling the trainer is GRPOTrainer; with it, it adds to a subclass of GRPOTrainer."""

import pytest
from rig import (
    F1,
    N8_M4,
    Script,
    assert_equal_weights,
    make_config,
    make_model,
    make_tokenizer,
    number_of_distinct_words,
    only_log,
    step_logs,
    train,
)
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOTrainer, PODSMixin


@pytest.mark.parametrize("num_iterations", [1, 2])
@pytest.mark.parametrize("num_rollouts", [None, 4])
def test_without_down_sampling_it_is_grpo_to_the_last_bit(tmp_path, num_rollouts, num_iterations):
    settings = {
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "num_iterations": num_iterations,
        "learning_rate": 1e-2,
        "max_steps": 6,
        "shuffle_dataset": True,
    }
    sampled = {"rollout_func": None, "reward_funcs": [number_of_distinct_words]}
    script = Script([F1, F1, F1])
    pods = train(
        tmp_path / "pods",
        script,
        trainer_kwargs=sampled.copy(),
        num_rollouts=num_rollouts,
        selector="random",
        **settings,
    )
    grpo = train(tmp_path / "grpo", script, GRPOTrainer, GRPOConfig, trainer_kwargs=sampled.copy(), **settings)
    ours, theirs = step_logs(pods), step_logs(grpo)
    assert len(ours) == len(theirs) == 6
    for ours_step, theirs_step in zip(ours, theirs, strict=True):
        assert set(ours_step) - set(theirs_step) <= {
            f"time/{p}" for p in ("generate", "reward", "select", "score", "update", "train")
        }
        for key in set(theirs_step) - {"step_time"}:
            assert ours_step[key] == theirs_step[key], key
    assert_equal_weights(pods, grpo)


def test_a_plain_grpo_config_gives_plain_grpo(tmp_path):
    trainer = train(tmp_path, Script([F1]), config_class=GRPOConfig, num_generations=8, per_device_train_batch_size=8)
    assert only_log(trainer)["loss"] == pytest.approx(-0.14777, abs=1e-5)
    assert trainer.num_rollouts == 8


def test_model_and_reward_function_may_be_given_by_position(tmp_path):
    script = Script([F1])
    config = make_config(tmp_path, **N8_M4)
    trainer = PODSGRPOTrainer(
        make_model(),
        script.reward_functions()[0],
        config,
        script.dataset(),
        processing_class=make_tokenizer(),
        rollout_func=script.rollout_func,
    )
    assert trainer.train().training_loss == pytest.approx(-0.19124, abs=1e-5)


def test_no_config_at_all_means_what_it_means_for_grpo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = Script([F1])

    def outcome(trainer_class):
        try:
            trainer = trainer_class(
                model=make_model(),
                reward_funcs=script.reward_functions(),
                train_dataset=script.dataset(),
                processing_class=make_tokenizer(),
            )
        except ValueError as error:  # TRL's default asks for bf16, which a machine without a GPU refuses
            return str(error)
        return trainer.num_generations, trainer.args.learning_rate

    assert outcome(PODSGRPOTrainer) == outcome(GRPOTrainer)


def test_the_mixin_adds_pods_to_a_subclass_of_grpo_trainer(tmp_path):
    class HalvedLoss(GRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) / 2

    class HalvedPODS(PODSMixin, HalvedLoss):
        pass

    trainer = train(tmp_path, Script([F1]), HalvedPODS, **N8_M4)
    assert only_log(trainer)["loss"] == pytest.approx(-0.19124 / 2, abs=1e-5)
