"""What fails on one of two real processes (gloo) ends both, the cases of failing_cases.py."""

import json
from pathlib import Path

import pytest
from failing_cases import CASES
from launching import run_processes


SCRIPT = Path(__file__).parent / "failing_cases.py"
HANGS_FOR_GOOD = "reward_locks_up"

pytestmark = pytest.mark.slow


def outcomes(folder, names):
    status, output = run_processes(SCRIPT, folder, *names, num_processes=2)
    files = [folder / f"rank{rank}.json" for rank in (0, 1)]
    assert all(file.exists() for file in files), output[-8000:]
    return status, output, [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """By case, what each of the two processes raised; all cases in one process group, so none leaves it disturbed."""
    status, output, ranks = outcomes(
        tmp_path_factory.mktemp("failures"), [name for name in CASES if name != HANGS_FOR_GOOD]
    )
    assert status == 0, output[-8000:]
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


ZERO_DIVISION = ("ZeroDivisionError", "no score today", "in `breaks`")
TOO_FEW = "The reward function 'judge' returned {} rewards, but {} were expected"


@pytest.mark.parametrize(
    ("case", "failing", "error", "says", "where"),
    [
        ("reward_raises_on_1", 1, *ZERO_DIVISION),
        ("reward_raises_on_0", 0, *ZERO_DIVISION),
        ("async_reward_raises", 1, *ZERO_DIVISION),
        ("reward_exits", 1, "SystemExit", "gone", "in `leaves`"),
        ("reward_raises_without_down_sampling", 1, *ZERO_DIVISION),
        ("reward_raises_in_evaluation", 1, *ZERO_DIVISION),
        ("too_few_rewards", 1, "ValueError", TOO_FEW.format(3, 4), "'judge'"),
        ("too_few_rewards_on_0_in_evaluation", 0, "ValueError", TOO_FEW.format(1, 2), "'judge'"),
        ("no_numbers", 1, "ValueError", "too many dimensions", "_calculate_rewards"),
        ("rollouts_raise", 1, "ZeroDivisionError", "no rollouts today", "in `rollouts_break`"),
        ("rollouts_raise_without_down_sampling", 1, "ZeroDivisionError", "no rollouts today", "in `rollouts_break`"),
        ("rollouts_raise_in_evaluation", 1, "ZeroDivisionError", "no rollouts today", "in `rollouts_break`"),
        ("rollouts_lack_log_probs", 1, "ValueError", "rollout_func must return keys ['logprobs']", "_generate"),
        ("rollouts_are_too_few", 1, "RuntimeError", "returned 3 `prompt_ids` for 4 prompts", "in `counted`"),
        ("rollouts_are_too_few_without_down_sampling", 1, "RuntimeError", "returned 1 `prompt_ids`", "in `counted`"),
        ("rollouts_cannot_be_pickled", 1, "TypeError", "cannot pickle '_thread.lock' object", "in _exchange"),
        ("failing_rule", 0, "ZeroDivisionError", "no rule today", "in `failing_rule`"),
        (
            "reward_sleeps",
            1,
            "TimeoutError",
            "reward functions judge took longer than reward_timeout=1.5 s",
            "`sleeps`",
        ),
        ("reward_sleeps_on_0_in_evaluation", 0, "TimeoutError", "longer than reward_timeout=1.5 s", "`sleeps`"),
        ("async_reward_sleeps", 1, "TimeoutError", "reward functions judge_async took longer", "threading.py"),
        ("reward_swallows", 1, "TimeoutError", "longer than reward_timeout=1.5 s", "`sleeps_and_swallows`"),
        ("reward_gathers_and_sleeps", 1, "TimeoutError", "longer than reward_timeout=1.5 s", "`sleeps`"),
        ("reward_backtracks", 1, "TimeoutError", "longer than reward_timeout=1.5 s", "`match`"),
    ],
)
def test_a_failure_on_one_process_ends_both_and_the_other_names_it(seen, case, failing, error, says, where):
    own, other = seen[case][failing], seen[case][1 - failing]
    assert own["error"] == error
    assert says in own["message"]
    assert other["error"] == "RuntimeError"
    assert other["message"].startswith(f"Process {failing} failed, and so this one ends: {error}(")
    assert says in other["message"]
    assert where in other["message"]


@pytest.mark.parametrize("case", ["no_failure", "no_failure_where_one_scores_late"])
def test_a_run_without_failure_is_left_alone(seen, case):
    assert [rank["error"] for rank in seen[case]] == [None, None]


def test_a_process_that_hangs_for_good_is_killed_and_the_other_names_it(tmp_path):
    status, output, (other, own) = outcomes(tmp_path, ["no_failure", HANGS_FOR_GOOD])
    assert own.keys() == {"no_failure"}  # it never came back
    assert other[HANGS_FOR_GOOD]["error"] == "RuntimeError"
    assert other[HANGS_FOR_GOOD]["message"] == (
        "Of 2 processes, [1] have not finished scoring within reward_timeout=1.5 s."
    )
    assert "in locks_up" in output
    assert "Process 1 is killed: its reward functions hang" in output
    assert status != 0
