"""The script that measures what a step costs, with a small model on a CPU."""

import re

import pytest

from trl_pods.scripts import measure_step


TINY = "--device cpu --completion_tokens 5 --prompt_tokens 4 --steps 2 --passes 1"
SHAPE = "--shape vocab_size=512 hidden_size=32 intermediate_size=64 num_hidden_layers=1 num_attention_heads=2"


@pytest.mark.slow
def test_the_table_shows_what_was_generated_and_trained_on_and_the_parts_of_a_step(capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    measure_step.main([*TINY.split(), "--micro_batch_size", "8", *SHAPE.split()])
    printed = capsys.readouterr().out
    columns, _, *rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line.startswith("|")]
    assert columns[:8] == ["arm", "generated", "trained on", "step (range)", "generate", "reward", "score", "update"]
    assert columns[8:] == ["peak memory, GiB (resident set of the process)"]
    assert [row[:3] for row in rows] == [
        ["PODS, n = 64, m = 16", "64", "16"],
        ["GRPO with 16", "16", "16"],
        ["GRPO with 64", "64", "64"],
    ]
    for _, _, _, step, *parts in rows:
        median, lowest, highest = map(float, re.findall(r"[\d.]+", step))
        generate, reward, score, update, memory = map(float, parts)
        assert 0 < lowest <= median <= highest
        assert generate > 0
        assert update > 0
        assert generate + reward + score + update < highest * 2  # medians of two steps
        assert 0.1 < memory < 10
    assert "hidden_size=32" in printed
    assert "micro-batches of 8 rows" in printed
    assert re.search(r"Device: .+\. Date: \d{4}-\d\d-\d\d\.", printed)
    assert re.search(r"Versions: .*trl \d.*torch \d", printed)


@pytest.mark.slow
def test_a_run_that_fails_is_reported_with_its_message(monkeypatch):
    monkeypatch.setattr(measure_step, "TIMEOUT", 240)
    with pytest.raises(RuntimeError, match="num_rollouts=2 is less than num_generations=16"):
        measure_step.main([*TINY.split(), "--num_rollouts", "2", *SHAPE.split()])


def test_an_arm_that_ran_out_of_memory_has_a_row_that_says_so():
    step = {"step": 1.0, "generated": 4, "trained": 2} | dict.fromkeys(measure_step.PHASES, 0.25)
    measured, ran_out = {"steps": [step], "memory": 2**29}, {"steps": [], "memory": 0}
    text = measure_step.table({"small": [measured], "large": [measured, ran_out]}, "cuda")
    *_, small, large = text.splitlines()
    assert small == "| small | 4 | 2 | 1.000 (1.000 to 1.000) | 0.250 | 0.250 | 0.250 | 0.250 | 0.50 |"
    assert large.startswith("| large | out of memory |")
    assert text.splitlines()[0].endswith("| peak memory, GiB (allocated on the GPU) |")
    assert len({line.count("|") for line in text.splitlines()}) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--shape", "hidden=64"], "Use for instance hidden_size=64"),
        (["--micro_batch_size", "12"], "Use for instance 16"),
        (["--steps", "0"], "Use 1 or more"),
    ],
)
def test_a_wrong_option_is_refused_by_a_message_that_says_what_works(wrong, message, capsys):
    with pytest.raises(SystemExit):
        measure_step.main([*wrong, "--device", "cpu"])
    assert message in capsys.readouterr().err
