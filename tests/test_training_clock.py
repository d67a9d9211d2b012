"""The training clock by a clock of our own: what takes time says how much."""

from types import SimpleNamespace

import pytest
from rig import F1, Script, make_config, make_model, make_tokenizer, make_trainer
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOTrainer, training_clock
from trl_pods.training_clock import TrainingClock


STEP, EVALUATION, SAVING, LOGGING = 10.0, 1_000.0, 10_000.0, 1.0
M4 = {"num_generations": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
KINDS = {
    "PODS": (PODSGRPOTrainer, {"num_rollouts": 8}),
    "GRPO": (GRPOTrainer, {"config_class": GRPOConfig}),
}


@pytest.fixture
def hands(monkeypatch):
    hands = SimpleNamespace(now=5.0)
    monkeypatch.setattr(training_clock, "time", SimpleNamespace(perf_counter=lambda: hands.now))
    return hands


class Delays(TrainerCallback):
    """Steps last 10 s, an evaluation 1,000 s, a log entry 1 s; notes at which steps there was an evaluation."""

    def __init__(self, hands):
        self.hands = hands
        self.evaluated = []

    def on_pre_optimizer_step(self, *args, **kwargs):
        self.hands.now += STEP

    def on_prediction_step(self, args, state, *_, **kwargs):
        self.hands.now += EVALUATION
        if state.global_step not in self.evaluated:
            self.evaluated.append(state.global_step)

    def on_log(self, args, state, control, logs, **kwargs):
        self.hands.now += LOGGING if "loss" in logs else 0


def make(folder, hands, monkeypatch, kind="PODS", clock=None, **settings):
    trainer_class, of_kind = KINDS[kind]
    trainer = make_trainer(
        folder,
        Script([F1]),
        trainer_class,
        trainer_kwargs={"eval_dataset": Script([F1]).dataset()},
        **(M4 | {"max_steps": 50} | of_kind | settings),
    )
    if clock is not None:
        trainer.add_callback(clock)
    trainer.delays = Delays(hands)
    trainer.add_callback(trainer.delays)
    save = trainer._save_checkpoint

    def slow_save(*args):
        hands.now += SAVING
        save(*args)
        hands.now += SAVING

    monkeypatch.setattr(trainer, "_save_checkpoint", slow_save)
    return trainer


def times(trainer):
    """Steps and seconds of the log entries, with the name of a metric that tells their kind."""
    kinds = ("eval_loss", "train_loss", "loss")
    return [
        (entry["step"], next(kind for kind in kinds if kind in entry), entry["time/train"])
        for entry in trainer.state.log_history
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_logging_count_and_evaluation_and_saving_do_not(tmp_path, hands, monkeypatch, kind):
    clock = TrainingClock() if kind == "GRPO" else None
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3, "max_steps": 4}
    trainer = make(tmp_path, hands, monkeypatch, kind, clock, **settings)
    trainer.train()
    # An entry is made before its second is over. That of steps 2 and 4 ends where evaluation begins and goes with it,
    # as that of step 3 goes with its saving.
    assert times(trainer) == [
        (1, "loss", 10.0),
        (2, "loss", 21.0),
        (2, "eval_loss", 21.0),
        (3, "loss", 31.0),
        (4, "loss", 41.0),
        (4, "eval_loss", 41.0),
        (4, "train_loss", 41.0),
    ]
    if kind == "PODS":  # also for trackers that come before the clock
        assert [entry["time/train"] for entry in trainer.recorder.logs] == [10, 21, 21, 31, 41, 41, 41]


def test_it_evaluates_after_every_so_many_minutes_and_stops_after_so_many(tmp_path, hands, monkeypatch):
    trainer = make(tmp_path, hands, monkeypatch, max_train_minutes=1.9, eval_minutes=0.5, logging_steps=100)
    trainer.train()
    # Steps end at 10, 20, ... seconds; 1.9 minutes are 114 seconds.
    assert trainer.delays.evaluated == [3, 6, 9, 12]
    assert trainer.state.global_step == 12
    assert times(trainer)[-3:] == [(12, "loss", 120.0), (12, "eval_loss", 120.0), (12, "train_loss", 120.0)]


@pytest.mark.parametrize("kind", KINDS)
def test_limits_of_the_clock_hold_where_the_settings_have_none(tmp_path, hands, monkeypatch, kind):
    settings = {"logging_steps": 100} | ({"max_train_minutes": None, "eval_minutes": None} if kind == "PODS" else {})
    trainer = make(tmp_path, hands, monkeypatch, kind, **settings)
    trainer.remove_callback(TrainingClock)
    trainer.add_callback(TrainingClock(max_train_minutes=1.0, eval_minutes=0.5))
    trainer.train()
    assert trainer.delays.evaluated == [3, 6]
    assert trainer.state.global_step == 6


def test_limits_of_the_settings_win_over_those_of_the_clock_one_by_one(tmp_path, hands, monkeypatch):
    trainer = make(tmp_path, hands, monkeypatch, max_train_minutes=0.5, logging_steps=100)
    trainer.remove_callback(TrainingClock)
    trainer.add_callback(TrainingClock(max_train_minutes=1.0, eval_minutes=0.25))
    trainer.train()
    assert trainer.delays.evaluated == [2, 3]
    assert trainer.state.global_step == 3


def test_a_resumed_run_goes_on_counting(tmp_path, hands, monkeypatch):
    settings = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 100, "eval_minutes": 0.75}
    make(tmp_path, hands, monkeypatch, max_steps=4, **settings).train()
    resumed = make(tmp_path, hands, monkeypatch, max_train_minutes=1.0, **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert resumed.training_clock.read() == 60.0
    assert resumed.delays.evaluated == [5, 6]  # past 45 seconds, and last
    assert (tmp_path / "checkpoint-6").is_dir()

    again = make(tmp_path, hands, monkeypatch, max_train_minutes=1.0, **settings)
    again.train(resume_from_checkpoint=True)
    assert (again.state.global_step, again.training_clock.read()) == (7, 70.0)


@pytest.mark.parametrize(
    ("limits", "num_steps"),
    [
        pytest.param({"max_train_minutes": 1.0}, 6, id="another"),
        pytest.param({"max_steps": 5}, 5, id="none"),
    ],
)
def test_transformers_may_restore_the_clock_but_new_limits_win(tmp_path, hands, monkeypatch, limits, num_steps):
    settings = {
        "save_strategy": "steps",
        "restore_callback_states_from_checkpoint": True,
        "logging_steps": 100,
    }
    make(tmp_path, hands, monkeypatch, max_train_minutes=0.5, **settings).train()
    resumed = make(tmp_path, hands, monkeypatch, **limits, **settings)
    monkeypatch.setattr(Delays, "__init__", lambda self: setattr(self, "hands", hands))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == num_steps


def test_a_checkpoint_without_a_clock_starts_it_at_zero(tmp_path, hands, monkeypatch, caplog):
    saved = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 100}
    make(tmp_path, hands, monkeypatch, "GRPO", max_steps=1, **saved).train()
    resumed = make(tmp_path, hands, monkeypatch, max_steps=2, **saved)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.training_clock.read() == STEP
    assert "the training clock starts at 0" in caplog.text


def test_training_anew_starts_it_at_zero(tmp_path, hands, monkeypatch):
    trainer = make(tmp_path, hands, monkeypatch, max_steps=2, logging_steps=100)
    trainer.train()
    hands.now += 500
    trainer.train()
    assert trainer.training_clock.read() == 20.0


def test_a_paused_block_is_left_out(tmp_path, hands, monkeypatch):
    trainer = make(tmp_path, hands, monkeypatch, max_steps=2, logging_steps=100)

    class Measure(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            with trainer.training_clock.paused():
                hands.now += 300
                assert trainer.training_clock.read() in (10.0, 20.0)

    trainer.add_callback(Measure())
    trainer.train()
    assert trainer.training_clock.read() == 20.0


def test_a_clock_of_the_user_is_the_only_one(tmp_path):
    clock = TrainingClock()
    trainer = PODSGRPOTrainer(
        model=make_model(),
        reward_funcs=Script([F1]).reward_functions(),
        args=make_config(tmp_path, **M4),
        train_dataset=Script([F1]).dataset(),
        processing_class=make_tokenizer(),
        callbacks=[clock],
    )
    assert [c for c in trainer.callback_handler.callbacks if isinstance(c, TrainingClock)] == [clock]


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["max_train_minutes", "eval_minutes"])
def test_a_limit_that_is_no_time_is_refused(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"{name}={value} is no time .* for instance"):
        make_config(tmp_path, **{name: value})


@pytest.mark.parametrize("evaluation", [{"eval_minutes": 2.0}, {"eval_on_start": True}])
def test_evaluation_by_time_needs_whole_groups_as_that_by_steps_does(tmp_path, evaluation):
    message = (
        r"The 6 rows of a step of evaluation .* 4 completions .* per_device_eval_batch_size=8 or num_generations_e"
    )
    sizes = {"num_generations": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 6}
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **sizes, **evaluation)
    make_config(tmp_path, **sizes, **evaluation, num_generations_eval=3)
    make_config(tmp_path, **sizes)


def test_evaluation_needs_data(tmp_path):
    with pytest.raises(ValueError, match="eval_minutes=2.0 is set but there is no eval_dataset"):
        make_trainer(tmp_path, Script([F1]), eval_minutes=2.0, **M4)
