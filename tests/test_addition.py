import time
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from rig import make_model, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer
from trl_pods.data.addition import addition_reward, embedded_policy_path, load_addition
from trl_pods.held_out_accuracy import AccuracyCallback, measure_accuracy
from trl_pods.scripts import make_addition_policy


def summands(problem):
    return tuple(sorted(map(int, problem.rstrip("=").split("+"))))


def test_the_splits_share_no_pair_of_summands():
    train, test = load_addition("train"), load_addition("test")
    pairs_in_train, pairs_in_test = ({summands(p) for p in split["prompt"]} for split in (train, test))
    assert not pairs_in_train & pairs_in_test
    assert len(train) + len(test) == 90 * 90
    assert len(test) == 988
    for split in (train, test):
        assert all(sum(summands(p)) == int(s) for p, s in zip(split["prompt"], split["solution"], strict=True))


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split='validation' is unknown. Use 'train' or 'test'"):
        load_addition("validation")


def test_only_exactly_the_right_digits_are_rewarded():
    completions = ["85", " 85", "085", "8 5", "850", "", "84"]
    assert addition_reward(completions, ["85"] * 7) == [1, 1, 0, 0, 0, 0, 0]


def test_the_embedded_policy_is_what_its_script_makes():
    policy = AutoModelForCausalLM.from_pretrained(embedded_policy_path())
    tokenizer = AutoTokenizer.from_pretrained(embedded_policy_path())
    made = make_addition_policy.make_model(make_addition_policy.make_tokenizer())
    assert {n: p.shape for n, p in policy.named_parameters()} == {n: p.shape for n, p in made.named_parameters()}
    assert tokenizer.get_vocab() == make_addition_policy.make_tokenizer().get_vocab()
    assert tokenizer.decode(tokenizer("12+34=46")["input_ids"]) == "12+34=46"
    assert sum(file.stat().st_size for file in embedded_policy_path().iterdir()) < 5_000_000


def test_the_warm_up_stops_at_its_target(monkeypatch, capsys):
    monkeypatch.setattr(make_addition_policy, "BATCH_SIZE", 8)
    tokenizer = make_addition_policy.make_tokenizer()
    model = make_addition_policy.make_model(tokenizer)
    make_addition_policy.warm_up(model, tokenizer, target_accuracy=0.0)
    assert "step 50: sampled accuracy" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="did not reach 1.1 in 50 steps"):
        make_addition_policy.warm_up(model, tokenizer, target_accuracy=1.1, max_steps=50)


def trainer_on(tmp_path, model, tokenizer, dataset, reward, **settings):
    return PODSGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=PODSGRPOConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", max_completion_length=4, **settings
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
    )


def test_the_embedded_policy_starts_below_a_quarter_and_measuring_changes_nothing(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(embedded_policy_path())
    model = AutoModelForCausalLM.from_pretrained(embedded_policy_path())
    test = load_addition("test")
    trainer = trainer_on(tmp_path, model, tokenizer, load_addition("train"), addition_reward)
    trainer.model.train()
    random_state = torch.get_rng_state()
    accuracy = measure_accuracy(trainer, test, num_problems=988)
    assert accuracy == measure_accuracy(trainer, test, num_problems=988)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert trainer.model.training
    assert 0.1 < accuracy.sampled < 0.25
    assert accuracy.sampled < accuracy.greedy < 0.7


def test_accuracy_of_a_conversational_task_counts_full_marks_of_the_first_function(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    dataset = Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": "w5 w6"}]] * 4, "mark": [1.0, 0.5, 2.0, None]}
    )
    seen = []

    def marks(prompts, completions, mark, **kwargs):
        seen.extend(completion[0]["role"] for completion in completions)
        assert prompts[0][0]["content"] == "w5 w6"
        return mark

    accuracy = measure_accuracy(trainer_on(tmp_path, make_model(), tokenizer, dataset, marks), dataset, 100)
    assert accuracy.sampled == accuracy.greedy == 0.5
    assert seen == ["assistant"] * 8


def test_measuring_heeds_the_settings_of_generation_and_gives_the_function_what_training_does(tmp_path):
    def judge(prompts, completions, completion_ids, solution, trainer_state, log_extra, log_metric, **kwargs):
        log_extra("column", [1] * len(prompts))
        log_metric("metric", 1.0)
        lengths.extend(map(len, completion_ids))
        assert not any(tokenizer.eos_token_id in ids[:-1] for ids in completion_ids)  # padding is cut off
        steps.append(trainer_state.global_step)
        return addition_reward(completions, solution)

    lengths, steps = [], []
    tokenizer = AutoTokenizer.from_pretrained(embedded_policy_path())
    model = AutoModelForCausalLM.from_pretrained(embedded_policy_path())
    generation = {"max_new_tokens": 2, "do_sample": True, "temperature": 2.0}
    trainer = trainer_on(tmp_path, model, tokenizer, load_addition("train"), judge, generation_kwargs=generation)
    accuracy = measure_accuracy(trainer, load_addition("test"), num_problems=60)
    assert accuracy.sampled < accuracy.greedy
    assert max(lengths) == 2
    assert steps == [0, 0]
    assert not trainer._pending_extra_logs
    trainer.args.generation_kwargs = None
    measure_accuracy(trainer, load_addition("test"), num_problems=60)
    assert max(lengths) == 4


def test_fsdp1_is_refused_when_the_measurement_is_set_up():
    trainer = SimpleNamespace(is_fsdp_enabled=True, accelerator=SimpleNamespace(is_fsdp2=False))
    with pytest.raises(NotImplementedError, match="with FSDP1.* Use FSDP2 or DeepSpeed .*or num_accuracy_problems=0"):
        AccuracyCallback(trainer, load_addition("test"), num_problems=5)


def test_a_function_that_hangs_while_accuracy_is_measured_is_interrupted(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(embedded_policy_path())
    model = AutoModelForCausalLM.from_pretrained(embedded_policy_path())
    dataset = load_addition("test")
    trainer = trainer_on(tmp_path, model, tokenizer, dataset, lambda **kwargs: time.sleep(100), reward_timeout=0.2)
    with pytest.raises(TimeoutError, match="reward_timeout=0.2 s"):
        measure_accuracy(trainer, dataset, num_problems=2)
