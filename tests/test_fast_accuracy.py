"""`fast_accuracy_reward` against TRL's own, and the processes behind it."""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal

import psutil
import pytest
from sympy import Float, I, Integer, Mul, Pow, Rational, Symbol, cos, log, pi, sin, sqrt, tan
from trl.rewards import accuracy_reward

from trl_pods.rewards import fast_accuracy, fast_accuracy_reward, math_accuracy_reward, worker_pool
from trl_pods.rewards.shortcuts import surely_differ
from trl_pods.rewards.worker_pool import WorkerPool, num_workers, shared_pool


# As in MATH: each family holds forms of the same value, near misses and other kinds.
FAMILIES = r"""
18 | -18 | 018 | 18.0 | 1,800 | 1800 | 1{,}800 | 18.5 | 0 | -0 | 18^\circ | 18\text{ cm}^2 | \$18 | 18\% |
\frac{18}{100} | 0.18 | 1e3 | 18! | 10^3 | 12345678901234567890 | 0.1234567 | 0.1234571 | \frac{1}{2} |
\frac{2}{4} | \frac12 | -\frac{1}{2} | \frac{-1}{2} | 1/2 | 0.5 | .5 | 50\% | \frac{1}{0} | \frac{4}{2} |
2 | 1\frac{1}{2} | \frac{3}{2} | \dfrac{3}{2} | \tfrac32 | \frac{1}{3} | 0.333333 | 0.33 | \sqrt{8} |
2\sqrt{2} | 2\sqrt2 | \sqrt[3]{8} | \frac{\sqrt{2}}{2} | \frac{1}{\sqrt{2}} | 1+\sqrt{2} | 2\pi |
\frac{4\pi}{2} | 6.2831853 | e^2 | \ln 2 | \log_2 8 | \sin 30^\circ | \cos\frac{\pi}{3} | x^2+1 | 1+x^2 |
(x+1)^2 | x^2+2x+1 | y^2+1 | x = 2 | y = 2x + 3 | 2x - y + 3 = 0 | f(x) = x^2 | x | (1, 2) |
\left(1, 2\right) | (2, 1) | [1, 2] | (1, 2] | \{1, 2\} | \{2, 1\} | 1, 2 | 2,1 | 1 and 2 |
1 \text{ and } 2 | (-\infty, 1)\cup(2, \infty) | x < 1 | 1 < x < 2 | x \ge 2 | x \in [1, 2] | \emptyset |
[2, \infty) | 3 + 4i | 4i + 3 | i | \pm 2 | 2, -2 | \{-2, 2\} | 12_5 | 0.\overline{3} |
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | \begin{pmatrix} 1 \\ 2 \end{pmatrix} |
\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix} | \text{even} | \text{Monday} | even | \text{(B)} | B |
\mathrm{odd} | \infty | -\infty | \frac{}{} | \frac{1}{ | (((1 | ? | \text{} | \sqrt{} | 1 2 | x^ |
\boxed{18} | \unknown{3} | 1.6 \times 10^{12} | 1600000000000 | 16 \times 10^{11} | 1.1\times 10^{10}\pi |
11000000000\pi | 11\times 10^9\pi | \sqrt{2}^{100} | 2^{50}
"""
ANSWERS = ["", *(answer.strip() for answer in re.split("[|]", FAMILIES))]
GOLDS = [f"${answer}$" for answer in ANSWERS] + [rf"\boxed{{{answer}}}" for answer in ANSWERS[::5]] + ANSWERS[::3]
TEMPLATES = [
    r"So we get $\boxed{%s}$.",
    r"\boxed{%s}",
    r"We have $\frac{3}{4} + x$, so \[ y = \boxed{%s} \] as $2 + 2 = 4$.",
    r"First $\boxed{7}$, no: the answer is $\boxed{%s}$",
    r"The final answer is $%s$. I hope it is correct.",
    r"Answer: $%s$",
    r"$\boxed{%s}$ and $\boxed{3}$",
    r"\boxed{%s}\%%",
    r"no box: $%s$",
    r"\boxed{%s} or {5}",
    r"\boxed{%s",
    "%s",
]


def as_completions(texts):
    return [[{"role": "assistant", "content": text}] for text in texts]


def rewards_and_columns(function, completions, solution):
    columns = {}
    return function(completions, solution, log_extra=columns.__setitem__, prompts=[]), columns


def assert_equal_to_trl(texts, solution):
    ours, our_columns = rewards_and_columns(fast_accuracy_reward, as_completions(texts), solution)
    theirs, their_columns = rewards_and_columns(accuracy_reward, as_completions(texts), solution)
    cases = list(zip(texts, solution, strict=True))
    assert dict(zip(cases, ours, strict=True)) == dict(zip(cases, theirs, strict=True))
    assert our_columns == their_columns
    return ours


@pytest.mark.slow
def test_rewards_and_log_are_those_of_trl_for_all_kinds_of_answers():
    draw = random.Random(0)
    # Equal or nearly equal forms stand close to each other in the list.
    near = [(i, j) for i in range(len(ANSWERS)) for j in range(max(i - 4, 0), min(i + 5, len(ANSWERS)))]
    cases = [(f"${ANSWERS[i]}$", draw.choice(TEMPLATES[:4]) % ANSWERS[j]) for i, j in near]
    cases += [(draw.choice(GOLDS), draw.choice(TEMPLATES) % draw.choice(ANSWERS)) for _ in range(600)]
    draw.shuffle(cases)
    rewards = assert_equal_to_trl([text for _, text in cases], [gold for gold, _ in cases])
    assert min(map(rewards.count, [1.0, 0.0, None])) > 50


def test_integers_and_fractions_are_compared_as_trl_compares_them():
    numbers = [rf"\frac{{{top}}}{{{bottom}}}" for top in range(-2, 5) for bottom in range(1, 5)]
    numbers += ["0", "1", "-1", "2", "007", "-0", "1.0", "0.5", r"50\%", "1/2", "2,000", r"2^3", "1 000"]
    texts = [rf"it is \boxed{{{number}}}" for number in numbers]
    for gold in ["$1$", "-1", r"$\frac{1}{2}$", r"$\frac{2}{4}$", "0.5", "$0$", r"$50\%$", r"$\frac{-2}{1}$", "2000"]:
        assert_equal_to_trl(texts, [gold] * len(texts))


def test_what_is_no_text_and_what_does_not_fit_is_treated_as_by_trl():
    completions = [[{"content": content}] for content in (None, r"\boxed{5}", 5, "", r"\boxed{5}", "\ud800 \x00")]
    solution = ["$5$", 5, "$5$", "$5$", None, "$5$"]
    ours, theirs = (rewards_and_columns(f, completions, solution) for f in (fast_accuracy_reward, accuracy_reward))
    assert ours == theirs
    assert ours[0] == [0.0, None, 0.0, 0.0, None, 0.0]
    for wrong in ([[], ["$5$"]], [as_completions("5"), []], [[[]], ["$5$"]], [[[{}]], ["$5$"]], [["5"], ["$5$"]]):
        raised = []
        for function in (fast_accuracy_reward, accuracy_reward):
            with pytest.raises((ValueError, LookupError, TypeError)) as info:
                function(*wrong)
            raised.append((info.type, str(info.value)))
        assert raised[0] == raised[1]
    assert fast_accuracy_reward([], []) == accuracy_reward([], []) == []


def test_equal_answers_are_judged_once_and_numbers_not_at_all(monkeypatch):
    judged = []
    genuine = fast_accuracy.map_distinct

    def count(function, arguments, **kwargs):
        results = genuine(function, arguments, **kwargs)
        judged.extend(results if function == "judge" else [])
        return results

    monkeypatch.setattr(fast_accuracy, "map_distinct", count)
    answers = [r"\sqrt{8}", "3", r"\frac{1}{2}", r"2\sqrt{2}"] * 8
    texts = [rf"Way number {i}, so $\boxed{{{answer}}}$." for i, answer in enumerate(answers)]
    assert fast_accuracy_reward(as_completions(texts), [r"$\sqrt{8}$"] * 32) == [1.0, 0.0, 0.0, 1.0] * 8
    assert len(judged) == 4
    judged.clear()
    assert fast_accuracy_reward(as_completions(texts), ["$3$"] * 32) == [0.0, 1.0, 0.0, 0.0] * 8
    assert len(judged) == 2


def test_several_threads_may_ask_at_once():
    golds = [f"$x + {i}$" for i in range(12)]
    completions = as_completions([rf"\boxed{{{i % 3} + x}}" for i in range(12)])
    results = {}

    def ask(name):
        results[name] = fast_accuracy_reward(completions, golds), math_accuracy_reward(completions, golds)

    threads = [threading.Thread(target=ask, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == dict.fromkeys(range(4), ([1.0] * 3 + [0.0] * 9,) * 2)


EQUAL = [
    (sqrt(8), 2 * sqrt(2)),
    (1 / (sqrt(2) - 1), sqrt(2) + 1),
    (sin(1) ** 2 + cos(1) ** 2, Rational(1)),
    ((Symbol("x") + 1) ** 20, ((Symbol("x") + 1) ** 10) ** 2),
    ((Symbol("x") + 1) ** 12, ((Symbol("x") + 1) ** 12).expand()),
    (log(8), 3 * log(2)),
    (10**30 * pi + sqrt(2), 10**30 * pi + sqrt(8) / 2),
    (I**2, Rational(-1)),
]


@pytest.mark.parametrize(("left", "right"), EQUAL)
def test_a_point_where_they_differ_is_found_for_different_expressions_alone(left, right):
    assert not surely_differ(left, right)
    assert surely_differ(left, right + Rational(1, 1000))


def power(base, exponent):
    return Pow(base, exponent, evaluate=False)


UNDECIDED = [
    # A decimal is rounded to a binary number, so that the difference is not zero, but it is simplified to zero.
    (Mul(Float("1.6"), power(10, 12), evaluate=False), Integer(1_600_000_000_000)),
    (Mul(Float("1.1"), power(10, 10), pi, evaluate=False), 11 * 10**9 * pi),
    # More digits cancel than are evaluated.
    (power(power(2, 50), 100), power(power(sqrt(2), 100), 100)),
    # The tangent is evaluated for a rounded argument.
    (tan(3**50), sin(3**50) / cos(3**50)),
]


@pytest.mark.parametrize(("left", "right"), UNDECIDED)
def test_no_difference_is_claimed_where_the_digits_do_not_show_one(left, right):
    assert not surely_differ(left, right)
    assert not surely_differ(right, left)


def test_a_decimal_and_a_power_of_ten_are_compared_as_trl_compares_them():
    cases = []
    for digits in ("1.6", "0.3"):
        for exponent in (9, 11, 12):
            scientific = rf"{digits} \times 10^{{{exponent}}}"
            plain = int(Decimal(digits) * 10**exponent)
            forms = [scientific, str(plain), rf"{scientific}\pi", rf"{plain}\pi", str(plain + 1)]
            cases += [(gold, answer) for gold, answer in itertools.permutations(forms, 2)]
    rewards = assert_equal_to_trl([rf"\boxed{{{answer}}}" for _, answer in cases], [f"${gold}$" for gold, _ in cases])
    assert rewards[0] == 1.0  # 1.6 * 10^9 and 1600000000


# The processes


# Neither is known to end. No alarm interrupts the first, which is one operation of Python.
ENDLESS = [r"9^{10^{9}}", r"\sum_{k=1}^{10^{9}} \frac{1}{k}"]


def workers_of(process):
    return [child for child in process.children() if "trl_pods.rewards.worker" in " ".join(child.cmdline())]


def test_a_worker_that_was_killed_is_replaced():
    pool = WorkerPool(1)
    before = workers_of(psutil.Process())
    assert pool.map("judge_reading", [("x+1", "1+x")], if_ended=None) == [1.0]
    (worker,) = set(workers_of(psutil.Process())) - set(before)
    worker.kill()
    worker.wait(timeout=10)
    assert pool.map("judge_reading", [("x+1", "1+x"), ("x+1", "x")], if_ended=None) == [1.0, 0.0]


def count_starts(monkeypatch):
    starts = []
    popen = subprocess.Popen

    def start(command, **kwargs):
        starts.append(command)
        return popen(command, **kwargs)

    monkeypatch.setattr(worker_pool.subprocess, "Popen", start)
    return starts


def test_an_error_in_a_worker_is_raised_here_and_one_that_cannot_start_as_well(monkeypatch):
    pool = WorkerPool(1)
    with pytest.raises(KeyError, match="no_such_function"):
        pool.map("no_such_function", [("1",)], if_ended=None)
    assert pool.map("can_read", [("x+1",)], if_ended=None) == [True]
    monkeypatch.setattr(sys, "path", [])
    starts = count_starts(monkeypatch)
    with pytest.raises(RuntimeError, match="exit code 1"):
        WorkerPool(1).map("can_read", [("x+1",)] * 5, if_ended=None)
    assert len(starts) == 1  # and not once for each argument


def test_a_path_and_the_current_directory_among_the_places_to_import_from_do_no_harm(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise RuntimeError('not the json of Python')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])  # Python passes over what is no string
    assert WorkerPool(1).map("can_read", [("x+1",)], if_ended=None) == [True]


def test_the_time_to_start_is_not_that_of_an_answer_and_one_that_is_never_ready_is_an_error(monkeypatch):
    monkeypatch.setattr(worker_pool, "_PROGRAM", "import time; time.sleep(2)" + worker_pool._PROGRAM)
    monkeypatch.setattr(worker_pool, "_MAX_SECONDS", 1)
    with pytest.raises(KeyError, match="answers_at_once"):
        WorkerPool(1).map("answers_at_once", [("1",)], if_ended=None)
    monkeypatch.setattr(worker_pool, "_MAX_SECONDS_TO_START", 0.5)
    with pytest.raises(RuntimeError, match="did not start: no word from it in 0.5 s"):
        WorkerPool(1).map("can_read", [("x+1",)] * 5, if_ended=None)


def test_an_endless_answer_holds_up_no_one_even_where_one_process_works_at_a_time():
    pool = WorkerPool(1)
    before = workers_of(psutil.Process())
    assert pool.map("can_read", [("x+1",)], if_ended=None) == [True]
    (worker,) = set(workers_of(psutil.Process())) - set(before)
    answers = []

    def ask(name, *request):
        answers.append((name, pool.map(*request, if_ended="ended")))

    endless = threading.Thread(
        target=ask, args=("endless", "judge", [("$5$", rf"\boxed{{{ENDLESS[0]}}}")]), daemon=True
    )
    start = sum(worker.cpu_times()[:2])
    endless.start()
    while endless.is_alive() and sum(worker.cpu_times()[:2]) < start + 0.3:  # until the answer is being judged
        time.sleep(0.05)
    ask("other", "can_read", [("x+2",), ("x+3",)])
    assert answers == [("other", [True, True])]
    worker.kill()
    endless.join(timeout=30)
    assert answers[1:] == [("endless", ["ended"])]


def test_there_is_a_worker_for_each_core_of_a_training_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(12)))
    assert num_workers() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert num_workers() == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert num_workers() == 1


@pytest.mark.slow
def test_endless_answers_are_wrong_when_their_time_is_over_and_the_others_are_judged_meanwhile():
    texts = [
        rf"\boxed{{{answer}}}" for answer in [ENDLESS[0], *[rf"\frac{{{i}x}}{{7}}" for i in range(9)], ENDLESS[1]]
    ]
    results = []

    def ask():
        results.append(fast_accuracy_reward(as_completions(texts), [r"$\frac{4x}{7}$"] * len(texts)))

    thread = threading.Thread(target=ask, daemon=True)
    start = time.monotonic()
    thread.start()
    # One worker of two or more is busy; another caller is served all the same.
    thread.join(timeout=90)
    assert results == [[0.0] * 5 + [1.0] + [0.0] * 5]
    assert time.monotonic() - start < 60
    assert fast_accuracy_reward(as_completions([r"\boxed{x}"]), ["$x$"]) == [1.0]


@pytest.mark.slow
def test_who_gives_up_waiting_frees_the_worker():
    class GivesUpError(BaseException):
        pass

    def give_up(*args):
        raise GivesUpError

    before = signal.signal(signal.SIGALRM, give_up)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3)
        with pytest.raises(GivesUpError):
            fast_accuracy_reward(as_completions([rf"\boxed{{{ENDLESS[0]}}}"]), ["$5$"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert shared_pool().map("can_read", [("x+1",)] * 4, if_ended=None) == [True] * 4


ASK = r"""
import os, sys, threading, time
from trl_pods.rewards import fast_accuracy_reward

def ask(answer):
    return fast_accuracy_reward([[{"content": rf"\boxed{{{answer}}}"}]], ["$1 + x$"])

assert ask("x + 1") == [1.0]
if sys.argv[1] == "forks":
    child = os.fork()
    assert ask("x + 1") == [1.0]  # parent and child each
    if child == 0:
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    assert ask("x + 1") == [1.0]
if sys.argv[1] == "is killed while a worker is busy":
    threading.Thread(target=ask, args=("9^{10^{9}}",), daemon=True).start()
    time.sleep(2)
print("ready", flush=True)
input()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "forks", "is killed", "is killed while a worker is busy"])
def test_no_worker_outlives_the_process_that_asked(how):
    # The script has no main guard: a second run of it would ask again.
    process = subprocess.Popen(
        [sys.executable, "-c", ASK, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        workers = workers_of(psutil.Process(process.pid))
        assert workers
        if "killed" in how:
            process.kill()
        process.communicate("\n" if "killed" not in how else None, timeout=60)
    assert process.returncode == (-signal.SIGKILL if "killed" in how else 0)
    # What no alarm interrupts has its limit of processor time.
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
