import copy
import itertools
import json
import pickle
import re

import pytest

from trl_pods import PODSGRPOConfig


def make(tmp_path, **settings):
    return PODSGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings)


# b kept rows a device, A accumulation steps, n rollouts, m kept
@pytest.mark.parametrize(
    ("b", "a", "n", "m"), [(4, 1, 64, 4), (2, 2, 8, 2), (1, 4, 16, 4), (4, 1, 7, 4), (4, 1, 4, 4), (4, 1, None, 4)]
)
def test_a_large_group_needs_no_large_batch(tmp_path, b, a, n, m):
    config = make(
        tmp_path,
        per_device_train_batch_size=b,
        gradient_accumulation_steps=a,
        num_rollouts=n,
        num_generations=m,
    )
    assert config.generation_batch_size == b * a
    assert config.num_rollouts == n


@pytest.mark.parametrize(
    ("settings", "named", "remedy"),
    [
        ({"num_generations": 1}, "num_generations=1 ", "num_generations=2 or more"),
        ({"num_generations": 0}, "num_generations=0 ", "num_generations=2 or more"),
        ({"num_generations": 8, "num_rollouts": 6}, "num_rollouts=6 ", "num_rollouts=8"),
        ({"num_generations": 8, "num_rollouts": 0}, "num_rollouts=0 ", "num_rollouts=8"),
        (
            {"num_generations": 2, "per_device_train_batch_size": 3},
            r"num_generations=2\.",
            "per_device_train_batch_size=4",
        ),
        (
            {"num_generations": 8, "num_rollouts": 16, "per_device_train_batch_size": 2, "steps_per_generation": 6},
            "steps_per_generation=6",
            "per_device_train_batch_size=4",
        ),
        ({"selector": "median"}, "selector='median'", "'max_variance'"),
        ({"selector": "random", "selector_kwargs": {"weights": 1}}, "weights", "selector_kwargs"),
        ({"selector_kwargs": "quick"}, "selector_kwargs='quick'", "my_keyword"),
        ({"selection_reward_funcs": []}, r"selection_reward_funcs=\[\]", "None"),
        ({"rollout_chunk_size": 0}, "rollout_chunk_size=0 ", "None"),
        ({"reward_timeout": 0}, "reward_timeout=0 ", "None"),
        ({"reward_timeout": float("nan")}, "reward_timeout=nan ", "600"),
        ({"min_reward_std": -0.1}, "min_reward_std=-0.1", "0.05"),
        ({"min_reward_std": float("nan")}, "min_reward_std=nan", "0.05"),
        ({"advantage_statistics": "most"}, "advantage_statistics='most'", "'kept'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size", "per_device_train_batch_size"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name_and_a_remedy(tmp_path, settings, named, remedy):
    with pytest.raises(ValueError, match=named) as error:
        make(tmp_path, **settings)
    assert remedy in str(error.value)


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("batching", ["steps_per_generation", "gradient_accumulation_steps", "generation_batch_size"])
def test_what_a_message_proposes_is_accepted(tmp_path, monkeypatch, processes, batching):
    monkeypatch.setattr(PODSGRPOConfig, "world_size", property(lambda self: processes))
    num_refused = 0
    for b, times, n, m in itertools.product((1, 3, 5), (1, 2), (None, 7, 9), (2, 4, 6)):
        value = b * processes * times if batching == "generation_batch_size" else times
        settings = {"per_device_train_batch_size": b, "num_rollouts": n, "num_generations": m, batching: value}
        try:
            make(tmp_path, **settings)
        except ValueError as error:
            num_refused += 1
            proposals = re.findall(
                r"(num_rollouts|per_device_train_batch_size|generation_batch_size)=(\d+)", str(error)
            )
            proposals = dict(proposals[-2:] if "shared evenly" in str(error) else proposals[-1:])
            assert proposals
            for setting, proposed in proposals.items():
                make(tmp_path, **(settings | {setting: int(proposed)}))
    assert num_refused > 5


def test_shares_that_cannot_be_even_are_refused_with_two_remedies(tmp_path, monkeypatch):
    monkeypatch.setattr(PODSGRPOConfig, "world_size", property(lambda self: 2))
    settings = {"per_device_train_batch_size": 1, "num_generations": 2}
    make(tmp_path, num_rollouts=8, **settings)  # one row a process stands for four rollouts
    with pytest.raises(ValueError, match="num_rollouts=7 cannot be shared evenly by 2 processes") as error:
        make(tmp_path, num_rollouts=7, **settings)
    assert "Use num_rollouts=8, or per_device_train_batch_size=2." in str(error.value)


def test_other_errors_of_trl_come_through_unchanged(tmp_path):
    with pytest.raises(ValueError, match="must be divisible by the global batch size"):
        make(tmp_path, num_generations=4, per_device_train_batch_size=4, generation_batch_size=6)


def test_statistics_over_all_are_undefined_where_functions_are_normalised_one_by_one(tmp_path):
    with pytest.raises(NotImplementedError, match="normalize_then_sum"):
        make(tmp_path, advantage_statistics="all", multi_objective_aggregation="normalize_then_sum")


def test_a_callable_rule_survives_saving(tmp_path):
    config = make(tmp_path, selector=lambda rewards, num_selected: None)
    assert "lambda" in pickle.loads(pickle.dumps(config)).selector
    assert "lambda" in json.loads(config.to_json_string())["selector"]
    assert callable(config.selector)


def test_a_copy_keeps_a_callable_rule(tmp_path):
    config = make(tmp_path, selector=lambda rewards, num_selected: None, selector_kwargs={})
    for duplicate in (copy.copy(config), copy.deepcopy(config)):
        assert duplicate.selector is config.selector
        assert duplicate.num_generations == config.num_generations
    assert copy.deepcopy(config).selector_kwargs is not config.selector_kwargs


def test_one_reward_function_to_look_at_may_be_named_without_a_list(tmp_path):
    assert make(tmp_path, selection_reward_funcs="accuracy").selection_reward_funcs == ["accuracy"]


def test_settings_of_a_rule_may_come_as_json(tmp_path):
    config = make(tmp_path, selector="rule_with_keyword.rule", selector_kwargs='{"bonus": 2}')
    assert config.selector_kwargs == {"bonus": 2}


@pytest.fixture(autouse=True)
def rule_with_keyword(tmp_path, monkeypatch):
    (tmp_path / "rule_with_keyword.py").write_text("def rule(rewards, num_selected, bonus): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
