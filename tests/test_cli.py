"""The command line: what is told apart before the launch, and real launches of a tiny policy."""

import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import psutil
import pytest
import torch
import transformers
import yaml
from accelerate.commands.config import config_args, load_config_from_file
from rig import COMMAND_LINE, EOS, PAD, VOCABULARY, make_tokenizer
from safetensors.torch import load_file, save_file
from transformers import GraniteConfig, GraniteForCausalLM
from trl import DatasetMixtureConfig

import trl_pods
from trl_pods import PODSGRPOConfig, PODSGRPOTrainer, held_out_accuracy
from trl_pods.cli import launcher, main
from trl_pods.cli.arguments import separate
from trl_pods.cli.launcher import LaunchPlan, parse_launcher_args
from trl_pods.held_out_accuracy import Accuracy
from trl_pods.scripts import grpo as script
from trl_pods.scripts import recipe as recipe_module
from trl_pods.scripts.grpo import PODSScriptArguments, make_parser, parse
from trl_pods.scripts.recipe import find_recipe, read_recipe, shipped_recipes
from trl_pods.scripts.task import LOADERS, _import_by_name, load_reward, locate_policy, open_dataset


MODULE = "trl_pods.scripts.grpo"
CLI = [*COMMAND_LINE, "grpo"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "-m", MODULE]
LAUNCH_TIMEOUT = 240

TASK = """
import os
import time

from datasets import Dataset


def load(split, num_rows=8):
    return Dataset.from_dict({"prompt": [f"w{10 + i} w3 w4" for i in range(num_rows)]})


def reward(completions, trainer_state, **kwargs):
    with open("calls.txt", "a") as calls:
        print(trainer_state.global_step, os.environ.get("RANK", "0"), os.environ.get("GREETING"), file=calls)
    return [float(len(completion) % 3) for completion in completions]


def broken(completions, **kwargs):
    raise RuntimeError("the reward is broken")


def sleepy(completions, **kwargs):
    with open("pid.txt", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
"""
# n=4, m=2 and one kept row per process: right for two processes, too few for one.
RECIPE = {
    "dataset_loader": "tiny_task.load",
    "reward_funcs": "tiny_task.reward",
    "num_rollouts": 4,
    "num_generations": 2,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 4,
    "max_steps": 1,
    "learning_rate": "1e-3",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "output_dir": "run",
}


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    # Not the Qwen2 of the rig: beside a Qwen2, transformers loads any tokenizer as Qwen2's.
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = GraniteConfig(vocab_size=VOCABULARY, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None, **sizes)
    folder = tmp_path_factory.mktemp("policy")
    GraniteForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def write_recipe(tmp_path):
    def write(text=None, **settings):
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(RECIPE | settings) if text is None else text)
        return str(path)

    return write


@pytest.fixture
def start(tmp_path, policy):
    """Starts a command in a folder of its own, with the task beside it."""
    (tmp_path / "tiny_task.py").write_text(TASK)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(trl_pods.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        "HF_HOME": str(tmp_path / "hf"),  # no accelerate config of whoever runs the tests
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    started = []

    def start_command(command, *args):
        process = subprocess.Popen(
            [*command, "--config", "recipe.yaml", "--model_name_or_path", str(policy), *args],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start_command
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def run(start):
    def run_command(command, *args):
        process = start(command, *args)
        output, _ = process.communicate(timeout=LAUNCH_TIMEOUT)
        return SimpleNamespace(code=process.returncode, output=output)

    return run_command


@pytest.fixture
def no_launch(monkeypatch):
    """The arguments of launches, none of which takes place."""
    launches = []
    monkeypatch.setattr(launcher, "launch_command", launches.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return launches


@pytest.fixture
def no_default_config(monkeypatch, tmp_path):
    set_default_config(monkeypatch, tmp_path / "none.yaml")


def set_default_config(monkeypatch, path):
    monkeypatch.setattr(launcher, "default_config_file", str(path))
    monkeypatch.setattr(config_args, "default_config_file", str(path))


def plan_of(*args):
    return separate(list(args), make_parser())


def launcher_args(*args):
    return parse_launcher_args(MODULE, plan_of(*args))


def settings_of(recipe, *args):
    """What the training script reads, where it is one of two processes."""
    with patch.object(transformers.TrainingArguments, "world_size", 2):
        return parse(["--config", recipe, *args])


def calls(folder):
    return [line.split() for line in (folder / "calls.txt").read_text().splitlines()]


def trainer_state(folder):
    return json.loads((folder / "run" / "trainer_state.json").read_text())


# Real launches


@pytest.mark.slow
def test_a_run_makes_its_steps_and_says_where_things_are_and_resumes(run, write_recipe, tmp_path):
    write_recipe(
        per_device_train_batch_size=2,
        env={"GREETING": "hello"},
        max_steps=7,
        save_steps=1,
        logging_steps=1,
        log_completions=True,
    )
    result = run(CLI, "--max_steps", "1")
    assert result.code == 0, result.output
    assert calls(tmp_path) == [["0", "0", "hello"]]
    assert trainer_state(tmp_path)["global_step"] == 1
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert "Model: run\nLog: run/trainer_state.json\nCompletions: run/completions" in result.output
    assert list((tmp_path / "run" / "completions").iterdir())

    resumed = run(ACCELERATE, "--max_steps", "2", "--resume_from_checkpoint", "true")
    assert resumed.code == 0, resumed.output
    assert [step for step, *_ in calls(tmp_path)] == ["0", "1"]  # one more step, not two
    assert trainer_state(tmp_path)["global_step"] == 2


@pytest.mark.slow
def test_two_processes_named_in_the_recipe_share_a_step(run, write_recipe, tmp_path):
    write_recipe(num_processes=2, main_process_port=0)
    result = run(CLI)
    assert result.code == 0, result.output
    assert sorted(calls(tmp_path)) == [["0", "0", "None"], ["0", "1", "None"]]
    assert trainer_state(tmp_path)["global_step"] == 1
    assert result.output.count("Model: run") == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", ["1", "2"])
def test_a_reward_that_raises_fails_the_run_with_its_own_message(run, write_recipe, num_processes):
    write_recipe(per_device_train_batch_size=2, reward_funcs="tiny_task.broken", main_process_port=0)
    result = run(CLI, "--num_processes", num_processes)
    assert result.code == 1, result.output
    assert "RuntimeError: the reward is broken" in result.output
    assert "trl-pods: error: training failed with exit code 1" in result.output
    assert "ChildFailedError" not in result.output
    assert "CalledProcessError" not in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "num_processes"), [(signal.SIGINT, "1"), (signal.SIGTERM, "1"), (signal.SIGTERM, "2")]
)
def test_a_signal_ends_the_training_too(start, write_recipe, tmp_path, number, num_processes):
    write_recipe(per_device_train_batch_size=2, reward_funcs="tiny_task.sleepy", main_process_port=0)
    process = start(CLI, "--num_processes", num_processes)
    wait_until(lambda: (tmp_path / "pid.txt").is_file() and (tmp_path / "pid.txt").read_text())
    child = int((tmp_path / "pid.txt").read_text())
    assert child != process.pid
    process.send_signal(number)
    assert process.wait(timeout=60) == 128 + number
    wait_until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE)


def wait_until(condition):
    deadline = time.monotonic() + LAUNCH_TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_script_evaluates_the_test_split_and_measures_its_accuracy_along_the_way(
    policy, write_recipe, tmp_path, monkeypatch, capsys
):
    (tmp_path / "tiny_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    measured = []

    def measure_accuracy(trainer, dataset, num_problems):
        measured.append((trainer.state.global_step, len(dataset), num_problems))
        return Accuracy(sampled=0.25 * len(measured), greedy=0.5)

    monkeypatch.setattr(held_out_accuracy, "measure_accuracy", measure_accuracy)
    recipe = write_recipe(
        model_name_or_path=str(policy),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        eval_strategy="steps",
        eval_steps=1,
        num_accuracy_problems=5,
        accuracy_minutes=1e-6,
        log_file="run/log.jsonl",
        logging_steps=1,
        max_steps=2,
    )
    script.main(*parse(["--config", recipe]))
    assert measured == [(0, 8, 5), (1, 8, 5), (2, 8, 5)]
    history = trainer_state(tmp_path)["log_history"]
    assert any("eval_reward" in log for log in history)
    accuracies = [log for log in history if "held_out_accuracy/sampled" in log]
    assert [(log["step"], log["held_out_accuracy/sampled"]) for log in accuracies] == [(0, 0.25), (1, 0.5), (2, 0.75)]
    assert [log["step"] for log in history if "loss" in log] == [1, 2]  # none lost to an entry of the accuracy
    assert "reward" not in accuracies[1]
    header, *lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert header["settings"]["num_rollouts"] == 4
    assert {"versions", "hardware"} < header.keys()
    assert lines == [json.loads(json.dumps(log)) for log in history]
    shown = capsys.readouterr().out
    assert "Held-out accuracy     before   after\n  sampled              0.250   0.750" in shown
    assert "Completions" not in shown


@pytest.mark.parametrize(
    ("measured_before", "shown"),
    [
        (5, "before   after\n  sampled              0.250   1.000"),
        (0, "step 1   after\n  sampled              0.250   0.500"),
    ],
)
def test_the_accuracy_that_a_resumed_run_is_compared_with_is_the_first_one_there_is(
    policy, write_recipe, tmp_path, monkeypatch, capsys, measured_before, shown
):
    (tmp_path / "tiny_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    shares = itertools.count(1)
    monkeypatch.setattr(held_out_accuracy, "measure_accuracy", lambda *_: Accuracy(0.25 * next(shares), 0.5))
    recipe = write_recipe(model_name_or_path=str(policy), per_device_train_batch_size=2, save_steps=1, max_steps=2)
    first = ["--max_steps", "1", "--num_accuracy_problems", str(measured_before)]
    script.main(*parse(["--config", recipe, *first]))
    capsys.readouterr()
    script.main(*parse(["--config", recipe, "--num_accuracy_problems", "5", "--resume_from_checkpoint", "true"]))
    assert f"Held-out accuracy     {shown}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("use_peft", "evaluation"), [(False, {"eval_strategy": "steps", "eval_steps": 100}), (True, {"eval_minutes": 100})]
)
def test_a_checkpoint_is_evaluated_without_training(
    policy, write_recipe, tmp_path, monkeypatch, capsys, use_peft, evaluation
):
    (tmp_path / "tiny_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    recipe = write_recipe(
        model_name_or_path=str(policy),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=4,
        num_generations_eval=1,
        **evaluation,
        save_steps=1,
        use_peft=use_peft,
        lora_target_modules=["q_proj", "v_proj"],
    )
    script.main(*parse(["--config", recipe]))
    checkpoint = tmp_path / "run" / "checkpoint-1"
    weights = checkpoint / ("adapter_model.safetensors" if use_peft else "model.safetensors")
    saved = {name: value + 0.01 for name, value in load_file(weights).items()}  # what no other run would hold
    save_file(saved, weights, metadata={"format": "pt"})
    evaluated = []
    evaluate = PODSGRPOTrainer.evaluate

    def spy(trainer):
        evaluated.append(trainer.model.state_dict())
        return evaluate(trainer)

    monkeypatch.setattr(PODSGRPOTrainer, "evaluate", spy)
    (tmp_path / "calls.txt").unlink()
    which = "--resume_from_checkpoint" if use_peft else "--model_name_or_path"
    script.main(
        *parse(["--config", recipe, "--evaluate_only", "true", "--output_dir", "evaluation", which, str(checkpoint)])
    )
    assert len(calls(tmp_path)) == 2  # 8 problems, once each, 4 in a batch
    assert [path.name for path in Path("evaluation").iterdir()] == ["eval_results.json"]
    results = json.loads((tmp_path / "evaluation" / "eval_results.json").read_text())
    assert 0 <= results["eval_rewards/reward/mean"] <= 2
    assert f"reward{results['eval_rewards/reward/mean']:>30.4f}" in capsys.readouterr().out
    assert_holds(evaluated[0], saved)


def assert_holds(state, saved):
    state = {name.replace(".default.", "."): value for name, value in state.items()}
    for name, value in saved.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "eval_strategy='no' and eval_minutes=None beside it. Use eval_strategy='steps'"),
        (
            {"eval_strategy": "steps", "resume_from_checkpoint": "run/checkpoint-1"},
            "Name the checkpoint of a whole model",
        ),
        ({"eval_strategy": "steps", "resume_from_checkpoint": True, "use_peft": True}, "there is no checkpoint in"),
    ],
)
def test_an_evaluation_alone_says_what_it_lacks(policy, write_recipe, tmp_path, monkeypatch, settings, message):
    (tmp_path / "tiny_task.py").write_text(TASK)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    fixed = {"evaluate_only": True, "per_device_train_batch_size": 2, "lora_target_modules": ["q_proj", "v_proj"]}
    recipe = write_recipe(model_name_or_path=str(policy), **fixed, **settings)
    with pytest.raises(ValueError, match=message):
        script.main(*parse(["--config", recipe]))


# Before the launch: two kinds of settings


def test_settings_of_two_processes_pass_the_launcher_though_one_process_would_refuse_them(write_recipe):
    recipe = write_recipe(num_processes=2)
    plan = plan_of("--config", recipe)
    assert plan.launcher == ["--num_processes=2"]
    assert plan.training == ["--config", recipe]
    with pytest.raises(ValueError, match="not a multiple of num_generations=2"):
        parse(["--config", recipe])


def test_the_command_line_wins_over_the_recipe_for_the_training(write_recipe):
    recipe = write_recipe(num_rollouts=8, learning_rate="2e-6")
    _, config, _, _ = settings_of(recipe, "--num_rollouts", "6", "--selector=random")
    assert (config.num_rollouts, config.num_generations, config.selector) == (6, 2, "random")
    assert config.learning_rate == 2e-6
    _, config, _, _ = settings_of(recipe, "--num_generations", "4", "--per_device_train_batch_size", "2")
    assert (config.num_rollouts, config.num_generations, config.generation_batch_size) == (8, 4, 4)


def test_the_command_line_wins_over_the_recipe_for_the_launch(write_recipe, tmp_path, no_default_config):
    own = tmp_path / "own.yaml"
    own.write_text("distributed_type: MULTI_GPU\nnum_processes: 3\n")
    recipe = write_recipe(num_processes=2, accelerate_config="zero2", multi_gpu=False)
    assert launcher_args("--config", recipe).config_file.endswith("zero2.yaml")
    args = launcher_args("--num-processes", "4", "--config", recipe, "--accelerate_config", str(own))
    assert args.num_processes == 4
    assert args.config_file == str(own)


def test_options_go_with_their_values_wherever_they_stand(write_recipe, no_default_config):
    recipe = write_recipe()
    plan = plan_of(
        "--beta", "-0.5", "--num_processes", "2", "--reward_funcs", "a", "b", "--quiet", "--config", recipe, "--seed=2"
    )
    assert plan.launcher == ["--num_processes", "2", "--quiet"]
    assert plan.training == ["--config", recipe, "--beta", "-0.5", "--reward_funcs", "a", "b", "--seed=2"]


def test_flags_of_the_launch_may_stand_in_the_recipe(write_recipe, no_default_config):
    args = launcher_args("--config", write_recipe(multi_gpu=True, quiet=False, num_processes=2, gpu_ids=None))
    assert args.multi_gpu
    assert not args.quiet
    assert args.gpu_ids is None


def test_the_training_script_is_run_as_a_module_with_its_arguments(write_recipe, no_launch, no_default_config):
    assert main(["grpo", "--config", write_recipe(), "--seed", "3"]) == 0
    (args,) = no_launch
    assert args.module
    assert args.training_script == MODULE
    assert args.training_script_args[-2:] == ["--seed", "3"]


def test_variables_of_the_recipe_are_set_before_the_launch(write_recipe, no_launch, no_default_config):
    with patch.dict(os.environ):
        assert main(["grpo", "--config", write_recipe(env={"GREETING": 1})]) == 0
        assert os.environ["GREETING"] == "1"


# Before the launch: how many processes


def test_without_a_number_there_is_one_process(no_default_config):
    args = launcher_args()
    assert args.num_processes == 1
    assert not args.multi_gpu


def test_without_a_number_every_gpu_gets_a_process_as_with_accelerate(no_default_config, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    args = launcher_args()
    assert args.num_processes == 2
    assert args.multi_gpu
    assert not args.use_cpu
    assert launcher_args("--cpu").num_processes == 1


def test_one_process_sees_one_gpu(no_default_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert launcher_args("--num_processes", "1").gpu_ids == "3"
    assert launcher_args("--gpu_ids", "all").gpu_ids == "all"


@pytest.mark.parametrize("options", [[], ["--cpu"]])
def test_several_processes_go_through_torchrun_without_a_gpu_too(options, no_default_config, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    args = launcher_args("--num_processes", "2", *options)
    assert (args.num_processes, args.multi_gpu, args.cpu, args.use_cpu) == (2, True, False, True)


def test_several_processes_are_put_on_the_cpu_of_a_gpu_machine_only_if_asked_for(no_default_config, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert launcher_args("--num_processes", "2", "--cpu").use_cpu
    assert not launcher_args("--num_processes", "2").use_cpu


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 3", [], 3),
        ("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 3", ["--num_processes", "2"], 2),
        ("distributed_type: 'NO'\nnum_processes: 8", [], 1),
        ("distributed_type: MULTI_GPU\nnum_processes: 8", [], None),  # left to accelerate
    ],
)
def test_the_users_accelerate_config_is_heeded(text, options, expected, tmp_path, monkeypatch):
    path = tmp_path / "default_config.yaml"
    path.write_text(text)
    set_default_config(monkeypatch, path)
    assert launcher_args(*options).num_processes == expected


@pytest.mark.parametrize("text", ["", "- 1\n- 2\n", "a: [1\n"])
def test_a_broken_accelerate_config_is_named_in_one_line(text, tmp_path, monkeypatch, capsys):
    path = tmp_path / "default_config.yaml"
    path.write_text(text)
    set_default_config(monkeypatch, path)
    assert main(["grpo", "--max_steps", "1"]) == 2
    assert f"{path} is not a valid accelerate config." in capsys.readouterr().err


def test_a_training_on_the_cpu_is_launched_on_the_cpu(write_recipe, no_default_config, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    assert parse_launcher_args(MODULE, plan_of("--use_cpu", "true")).num_processes == 1
    assert parse_launcher_args(MODULE, plan_of("--config", write_recipe(use_cpu=True))).num_processes == 1
    assert parse_launcher_args(MODULE, plan_of()).num_processes == 8


def test_deepspeed_is_left_to_accelerate(no_default_config):
    args = launcher_args("--accelerate_config", "zero2", "--num_processes", "2")
    assert (args.num_processes, args.multi_gpu) == (2, False)


# What is refused, by one line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping, lines of `setting: value`; it is empty"),
        ("- a\n- b\n", "must be a mapping, lines of `setting: value`; it is a list"),
        ("1: 2\n", "it is a mapping with other keys than strings"),
        ("a: [1\n", "is not valid YAML"),
        ("env: 3\n", "`env` in"),
        ("num_rollout: 4\n", "'num_rollout' in"),
        ("num_process: 4\n", "Did you mean 'num_processes'?"),
        ("max_steps: many\n", "argument --max_steps/--max-steps: invalid int value: 'many'"),
        ("multi_gpu: perhaps\n", "multi_gpu: 'perhaps' in the recipe must be true or false"),
        ("num_processes: many\n", "invalid int value: 'many'"),
        ("accelerate_config: zero9\n", "Accelerate config zero9 is neither a file nor a valid config"),
        ("module: true\n", "'module' in"),
    ],
)
def test_a_wrong_recipe_is_refused_by_one_line(text, message, write_recipe, no_launch, capsys):
    assert_refused(["--config", write_recipe(text)], message, no_launch, capsys)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config"], "--config needs a value"),
        (["--config", "missing.yaml"], "There is no recipe 'missing.yaml'"),
        (
            ["--num_rollout", "4"],
            "'--num_rollout' on the command line is neither a training setting nor a launch option",
        ),
        (["--num_rollout", "4"], "Did you mean '--num_rollouts'?"),
        (["--max_steps", "many"], "invalid int value: 'many'"),
        (["--max_steps", "1", "2"], "Unexpected argument '2' on the command line"),
        (["--num_processes", "2", "3"], "'3' is an unexpected argument"),
        (["recipe.yaml"], "Unexpected argument 'recipe.yaml'. A recipe is given by --config recipe.yaml"),
        (["--config_file", "missing.yaml"], "missing.yaml` does not exist"),
    ],
)
def test_a_wrong_command_line_is_refused_by_one_line(args, message, no_launch, capsys):
    assert_refused(args, message, no_launch, capsys)


def test_what_accelerate_itself_refuses_is_one_line_too(capsys):
    assert_refused(["--cpu", "--use_deepspeed"], "You can only use one of", [], capsys)


def assert_refused(args, message, launches, capsys):
    assert main(["grpo", *args]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("trl-pods: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not launches


def test_the_training_script_refuses_what_nobody_reads(write_recipe):
    with pytest.raises(ValueError, match="'num_rollout' in .*Did you mean 'num_rollouts'"):
        parse(["--config", write_recipe(num_rollout=3)])
    with pytest.raises(ValueError, match="--num_rollout 3"):
        settings_of(write_recipe(), "--num_rollout", "3")


def test_the_training_script_leaves_options_of_the_launch_in_the_recipe_alone(write_recipe):
    _, config, _, _ = settings_of(write_recipe(num_processes=2, accelerate_config="zero2"))
    assert config.num_rollouts == 4


# Help


def test_help_and_version_do_without_torch():
    code = (
        "import sys; from trl_pods.cli import main\n"
        "for args in (['--help'], ['--version'], ['compare', '--help'], ['plan', '--help'], ['report', '--help']):\n"
        "    try: main(args)\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "assert main([]) == 0\n"
        "assert not {'torch', 'trl', 'transformers'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(trl_pods.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    for command in ("trl-pods", "trl-pods compare", "trl-pods plan", "trl-pods report"):
        assert f"usage: {command} [-h]" in result.stdout
    assert trl_pods.__version__ in result.stdout


def test_help_of_the_training_shows_all_settings_with_their_defaults(capsys):
    assert main(["grpo", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "usage: trl-pods grpo --config" in shown
    assert "plain GRPO. (default: None)" in shown
    for default in ("(default: max_variance)", "(default: kept)", "--learning_rate", "--lora_r", "--dataset_loader"):
        assert default in shown


# Rewards, data, policy


def test_rewards_are_found_by_name_and_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_here.py").write_text("def mine(completions, **kwargs): return [1.0]")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_reward("my_rewards_here.mine")(["a"]) == [1.0]
    assert load_reward("think_format_reward").__name__ == "think_format_reward"
    assert load_reward("get_soft_overlong_punishment")(completion_ids=[[1, 2]]) == [0.0]


@pytest.mark.parametrize("name", ["math_acuracy_reward", "no_such_module.reward", "math.no_such_reward"])
def test_an_unknown_reward_is_named_beside_the_choices(name):
    with pytest.raises(ValueError, match=f"reward_funcs='{name}'.*math_accuracy_reward.*dotted import path"):
        load_reward(name)


def test_a_loader_gets_the_split_and_its_keywords(tmp_path, monkeypatch):
    (tmp_path / "my_data_here.py").write_text("def load(split, size): return [split] * size")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    arguments = PODSScriptArguments(dataset_loader="my_data_here.load", dataset_kwargs='{"size": 2}')
    assert open_dataset(arguments, DatasetMixtureConfig())("test") == ["test", "test"]


def test_a_dataset_on_disk_is_loaded_by_trl_and_a_missing_split_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    mixture = DatasetMixtureConfig(datasets=[{"path": "json", "data_files": str(path)}])
    load_split = open_dataset(PODSScriptArguments(), mixture)
    assert load_split("train")["prompt"] == ["a", "b"]
    with pytest.raises(ValueError, match="no split 'test', only \\['train'\\]"):
        load_split("test")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "No data set is set. Set dataset_loader"),
        ({"dataset_loader": "gsm8k", "dataset_name": "x"}, "dataset_loader='gsm8k' is set beside"),
        (
            {"dataset_loader": "gsm9k"},
            "dataset_loader='gsm9k' is unknown. Use one of gsm8k, math, sciknoweval, addition",
        ),
    ],
)
def test_a_wrong_choice_of_data_says_what_to_set(settings, message):
    with pytest.raises(ValueError, match=message):
        open_dataset(PODSScriptArguments(**settings), DatasetMixtureConfig())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accuracy_minutes": 0, "num_accuracy_problems": 5}, "accuracy_minutes=0 is no time"),
        ({"accuracy_minutes": 2.0}, "num_accuracy_problems=0, no problems .* num_accuracy_problems=500"),
    ],
)
def test_measurements_along_the_way_need_a_time_and_problems(settings, message):
    with pytest.raises(ValueError, match=message):
        PODSScriptArguments(**settings)


@pytest.mark.parametrize("value", ["[1]", "{", [1]])
def test_keywords_of_the_loader_must_be_a_mapping(value):
    with pytest.raises(ValueError, match="dataset_kwargs="):
        PODSScriptArguments(dataset_kwargs=value)


def test_the_policy_must_be_named():
    assert locate_policy("some/model") == "some/model"
    with pytest.raises(ValueError, match="model_name_or_path is not set"):
        locate_policy(None)


# Shipped recipes


def test_a_shipped_recipe_is_found_by_its_name_and_a_file_goes_first(tmp_path, monkeypatch):
    shipped = tmp_path / "recipes"
    (shipped / "gsm8k").mkdir(parents=True)
    (shipped / "gsm8k" / "pods.yaml").write_text("seed: 1")
    monkeypatch.setattr(recipe_module, "recipes_folder", lambda: shipped)
    monkeypatch.chdir(tmp_path)
    assert find_recipe("gsm8k/pods") == find_recipe("gsm8k/pods.yaml") == shipped / "gsm8k" / "pods.yaml"
    with pytest.raises(FileNotFoundError, match=r"no recipe 'missing'.*\(gsm8k/pods\)"):
        find_recipe("missing")
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "pods.yaml").write_text("seed: 2")
    assert read_recipe(find_recipe("gsm8k/pods.yaml")) == {"seed": 2}


def test_recipes_are_shipped():
    assert shipped_recipes()


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_is_read_by_the_real_parser(name, no_default_config):
    recipe = str(find_recipe(name))
    num_processes = processes_of(launcher_args("--config", recipe))
    with patch.dict(os.environ), patch.object(transformers.TrainingArguments, "world_size", num_processes):
        script_args, config, _, _ = parse(["--config", recipe, "--use_cpu", "true", "--bf16", "false"])
    assert isinstance(config, PODSGRPOConfig)
    loader = _import_by_name(script_args.dataset_loader, LOADERS, "dataset_loader")
    inspect.signature(loader).bind("train", **script_args.dataset_kwargs or {})
    for reward in script_args.reward_funcs:
        assert callable(load_reward(reward))


def processes_of(args: Namespace) -> int:
    return args.num_processes or load_config_from_file(args.config_file).num_processes


@pytest.mark.parametrize(
    ("command", "interrupted"),
    [
        (["report", "."], "trl_pods.report.summary.read_summary"),
        (["compare", "--recipe", "quickstart", "--output_dir", "out"], "trl_pods.cli.compare.read_comparison"),
        (["plan", "--config", "quickstart", "--output_dir", "out"], "trl_pods.cli.plan.plan_processes"),
        (["grpo", "--config", "quickstart"], "trl_pods.cli.arguments.separate"),
    ],
)
def test_an_interruption_before_there_is_anything_to_end_is_told_in_one_line(
    command, interrupted, monkeypatch, capsys
):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(interrupted, interrupt)
    assert main(command) == 130
    assert capsys.readouterr().err == "trl-pods: interrupted.\n"


def test_nothing_is_launched_from_an_empty_plan_but_one_process(no_launch, no_default_config):
    assert launcher.launch(MODULE, LaunchPlan()) == 0
    assert no_launch[0].num_processes == 1
