import json
import pickle

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
        ({"advantage_statistics": "most"}, "advantage_statistics='most'", "'kept'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size", "per_device_train_batch_size"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name_and_a_remedy(tmp_path, settings, named, remedy):
    with pytest.raises(ValueError, match=named) as error:
        make(tmp_path, **settings)
    assert remedy in str(error.value)


def test_the_batch_sizes_that_messages_propose_are_accepted(tmp_path):
    make(tmp_path, num_generations=2, per_device_train_batch_size=4)
    make(tmp_path, num_generations=8, num_rollouts=16, per_device_train_batch_size=4, steps_per_generation=6)


def test_shares_that_cannot_be_even_are_refused_with_two_remedies(tmp_path, monkeypatch):
    monkeypatch.setattr(PODSGRPOConfig, "world_size", property(lambda self: 2))
    settings = {"per_device_train_batch_size": 1, "num_generations": 2}
    make(tmp_path, num_rollouts=8, **settings)  # one row a process stands for four rollouts
    with pytest.raises(ValueError, match="num_rollouts=7 cannot be shared evenly by 2 processes") as error:
        make(tmp_path, num_rollouts=7, **settings)
    assert "Use num_rollouts=8, or per_device_train_batch_size=2." in str(error.value)
    make(tmp_path, num_rollouts=7, num_generations=2, per_device_train_batch_size=2)


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


def test_settings_of_a_rule_may_come_as_json(tmp_path):
    config = make(tmp_path, selector="rule_with_keyword.rule", selector_kwargs='{"bonus": 2}')
    assert config.selector_kwargs == {"bonus": 2}


@pytest.fixture(autouse=True)
def rule_with_keyword(tmp_path, monkeypatch):
    (tmp_path / "rule_with_keyword.py").write_text("def rule(rewards, num_selected, bonus): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
