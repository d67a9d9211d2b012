"""What PODS builds on in TRL. A release of TRL that changes it must fail here, not in a training."""

import ast
import inspect
import textwrap
import tomllib
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
import torch
import trl
from packaging.specifiers import SpecifierSet
from rig import F1, N8_M4, Script, make_trainer
from trl import GRPOTrainer
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from trl_pods import PODSGRPOTrainer
from trl_pods.padding import WIDE_FIELDS
from trl_pods.pods_grpo_trainer import _MOST_SEQUENCES, _PER_ROW_ATTRIBUTES, SUPPORTED_TRL


ROOT = Path(__file__).parents[1]


def positional(function):
    return [p.name for p in inspect.signature(function).parameters.values() if p.default is p.empty]


def syntax_of(method):
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(method)))).body[0]


def calls_in(method):
    """Names of the methods of `self` that a method of TRL calls, in order."""
    calls = [node.func for node in ast.walk(syntax_of(method)) if isinstance(node, ast.Call)]
    calls = [
        f for f in calls if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name) and f.value.id == "self"
    ]
    return [f.attr for f in sorted(calls, key=lambda f: (f.lineno, f.col_offset))]


def test_the_installed_trl_is_supported_and_the_range_is_that_of_the_package():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (requirement,) = [d for d in dependencies if d.startswith("trl")]
    assert SpecifierSet(requirement.removeprefix("trl")) == SUPPORTED_TRL
    assert trl.__version__ in SUPPORTED_TRL


@pytest.mark.parametrize("version", ["1.9.2", "1.17.0", "2.0.0"])
def test_another_trl_is_refused_by_one_clear_message(version, tmp_path, monkeypatch):
    monkeypatch.setattr(trl, "__version__", version)
    with pytest.raises(ImportError, match=rf"trl {version} is installed; trl_pods works with trl.*1\.10"):
        make_trainer(tmp_path, Script([F1]), **N8_M4)


def test_the_methods_that_are_overridden_take_these_arguments():
    assert positional(GRPOTrainer._generate_and_score_completions) == ["self", "inputs"]
    assert positional(GRPOTrainer._generate) == ["self", "prompts"]
    assert positional(GRPOTrainer._calculate_rewards) == [
        "self",
        "inputs",
        "prompts",
        "completions",
        "completion_ids_list",
    ]
    assert positional(GRPOTrainer._prepare_inputs) == ["self", "generation_batch"]
    assert positional(GRPOTrainer._log_completion_extra) == ["self", "column", "values"]
    assert positional(GRPOTrainer.training_step)[:3] == ["self", "model", "inputs"]


def test_a_trainer_that_is_built_without_init_as_in_tests_of_trl_generates(monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "_generate", lambda trainer, prompts: prompts)
    trainer = object.__new__(PODSGRPOTrainer)
    trainer.accelerator = SimpleNamespace(device=torch.device("cpu"))
    assert trainer._generate(["a"]) == ["a"]


def test_after_what_runs_on_one_process_alone_the_processes_meet_in_a_gather():
    scoring = inspect.unwrap(GRPOTrainer._calculate_rewards).__code__
    assert "gather" in scoring.co_names
    assert grpo_trainer.gather is accelerate.utils.gather
    assert "self.accelerator.gather(" in inspect.getsource(GRPOTrainer._generate)


def test_a_round_generates_then_computes_log_probs_then_scores():
    calls = calls_in(GRPOTrainer._generate_and_score_completions)
    assert calls.count("_generate") == calls.count("_calculate_rewards") == 1
    log_probs = [i for i, name in enumerate(calls) if name == "_get_per_token_logps_and_entropies"]
    assert log_probs
    assert calls.index("_generate") < log_probs[0]
    assert log_probs[-1] < calls.index("_calculate_rewards")
    assert "_generate_and_score_completions" in calls_in(GRPOTrainer._prepare_inputs)


def test_nothing_by_row_outlives_generation_but_what_is_known():
    # What TRL makes before it generates has an entry for every rollout; afterwards it goes on with the kept ones.
    method = syntax_of(GRPOTrainer._generate_and_score_completions)
    (generation,) = [s for s in method.body if "_generate" in {n.attr for n in nodes(s, ast.Attribute)}]
    before = [s for s in method.body if s.end_lineno < generation.lineno]
    after = [s for s in method.body if s.lineno > generation.end_lineno]

    names = {argument.arg for argument in method.args.args}
    names |= {n.id for s in before for n in nodes(s, ast.Name) if is_set(n)}
    set_anew = {n.id for n in nodes(generation, ast.Name) if is_set(n)} | loop_variables(method)
    used = {n.id for s in after for n in nodes(s, ast.Name)}
    assert (names - set_anew) & used == {"self", "inputs", "prompts", "dataset_images", "device", "mode"}

    attributes = {n.attr for s in before for n in nodes(s, ast.Attribute) if is_set(n)}
    assert attributes == _PER_ROW_ATTRIBUTES
    used = {n.attr for s in after for n in nodes(s, ast.Attribute)}
    assert attributes & used <= {"_batch_environments"}  # the one that shrinks


def test_of_every_field_of_a_round_it_is_known_how_wide_it_is():
    method = syntax_of(GRPOTrainer._generate_and_score_completions)
    values = {n.targets[0].id: n.value for n in method.body if isinstance(n, ast.Assign) and is_name(n.targets[0])}
    fields = {key.value for key in values["output"].keys}
    fields |= {n.slice.value for n in nodes(method, ast.Subscript) if is_name(n.value, "output") and is_set(n)}
    assert fields - {"num_items_in_batch", "num_images", "num_tiles"} == WIDE_FIELDS


def is_name(node, name=None):
    return isinstance(node, ast.Name) and name in (None, node.id)


def nodes(tree, kind):
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def loop_variables(tree):
    return {n.id for loop in nodes(tree, ast.For | ast.comprehension) for n in nodes(loop.target, ast.Name)}


def is_set(node):
    return isinstance(node.ctx, ast.Store)


def test_generation_returns_eight_values_of_which_the_sixth_is_a_dictionary(tmp_path):
    returned = []

    class Spy(GRPOTrainer):
        def _generate(self, prompts):
            returned.append(super()._generate(prompts))
            return returned[-1]

    make_trainer(tmp_path, Script([F1]), Spy, num_generations=4, per_device_train_batch_size=4).train()
    (outputs,) = returned
    assert len(outputs) == 8
    assert isinstance(outputs[5], dict)
    assert [len(outputs[i]) for i in (0, 1, 3, 4)] == [4, 4, 4, 4]


def test_the_trainer_has_the_attributes_that_are_used(tmp_path):
    trainer = make_trainer(tmp_path, Script([F1]), GRPOTrainer, num_generations=4, per_device_train_batch_size=4)
    for name in (
        "_metrics",
        "_step",
        "_tokenizer",
        "_pending_extra_logs",
        "environment_factories",
        "log_completions",
        "log_multimodal",
        "mask_truncated_completions",
        "multi_objective_aggregation",
        "num_generations",
        "num_iterations",
        "reward_func_names",
        "reward_weights",
        "scale_rewards",
    ):
        assert hasattr(trainer, name), name
    kinds = {name: type(log) for name, log in trainer._logs.items()}
    assert kinds == {
        "images": deque,
        "prompt": deque,
        "completion": deque,
        "rewards": defaultdict,
        "advantages": deque,
        "extra": defaultdict,
    }


def test_the_engine_is_built_from_the_name_that_is_replaced():
    source = inspect.getsource(GRPOTrainer.__init__)
    assert "VLLMGeneration(" in source
    assert "max_num_seqs=" in source
    assert hasattr(grpo_trainer, "VLLMGeneration")
    built = inspect.getsource(vllm_generation.VLLMGeneration._init_vllm)
    assert f"max_num_batched_tokens={_MOST_SEQUENCES}," in built


def test_a_turn_by_a_server_exchanges_rows_by_the_names_that_are_replaced():
    generate = inspect.unwrap(vllm_generation.VLLMGeneration.generate)
    assert positional(generate) == ["self", "prompts", "images", "num_generations"]
    source = inspect.getsource(generate)
    assert "= gather_object(prompts)" in source
    assert "    broadcast_object_list(" in source
    assert "self.vllm_generation.generate(" in inspect.getsource(GRPOTrainer._generate_single_turn)
    assert "_generate_single_turn" in calls_in(GRPOTrainer._tool_call_loop)


def test_a_weight_sync_reads_named_parameters_between_merging_and_unmerging_an_adapter():
    source = inspect.getsource(vllm_generation.VLLMGeneration)
    start, end = source.index("model.merge_adapter()"), source.index("model.unmerge_adapter()")
    assert "in model.named_parameters():" in source[start:end]
