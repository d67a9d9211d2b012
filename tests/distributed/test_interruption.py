"""Trainings on two real processes that are killed by `kill -9` and resumed, see interrupted_runs.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from interrupted_runs import MOMENTS


SCRIPT = Path(__file__).parent / "interrupted_runs.py"
NUM_KILLS = int(os.environ.get("TRL_PODS_KILLS", "100"))


def report_of(folder, *what, timeout):
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *what], capture_output=True, text=True, timeout=timeout, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-5000:]
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return report_of(tmp_path_factory.mktemp("interruption"), *MOMENTS, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOMENTS)
def test_a_killed_run_goes_on_from_the_last_whole_checkpoint_as_if_nothing_had_happened(report, name):
    moment, found = MOMENTS[name], report[name]
    assert found["stopped"]
    assert not found["ended"]
    assert found["resumes_from"] == moment.resumes_from
    assert found["lost_rows"] == 0
    assert found["logs_whole"]
    assert found["resumed"]
    assert found["equal_weights"]
    assert found["equal_logs"]
    assert found["lost_rows_at_the_end"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, moment in MOMENTS.items() if moment.place.startswith("saving")])
def test_a_checkpoint_that_was_being_saved_is_skipped_with_a_warning(report, name):
    assert report[name]["torn"]["checkpoints"] == {"checkpoint-8": "its saving did not end"}
    assert report[name]["warned"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, moment in MOMENTS.items() if not moment.kill_all])
def test_a_process_that_waits_for_a_dead_one_ends_and_says_so(report, name):
    assert report[name]["hanging"] == 0
    assert report[name]["death_named"]


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_no_kill_at_a_random_moment_makes_a_run_lose_anything(tmp_path, capsys):
    found = report_of(tmp_path, "random", str(NUM_KILLS), timeout=7000).values()
    counts = {
        "kills": len(found),
        "runs that had ended before": sum(run["ended"] for run in found),
        "runs with a torn checkpoint": sum(bool(run["torn"]["checkpoints"]) for run in found),
        "torn tables after the last whole checkpoint": sum(run["torn"]["tables"] for run in found),
        "lost rows up to it": sum(run["lost_rows"] for run in found),
        "processes left hanging": sum(run["hanging"] for run in found),
        "failed resumes": sum(not run["resumed"] for run in found),
        "other weights or logs at the end": sum(not (run["equal_weights"] and run["equal_logs"]) for run in found),
        "lost rows at the end": sum(run["lost_rows_at_the_end"] for run in found if run["resumed"]),
    }
    with capsys.disabled():
        print(f"\n{json.dumps(counts, indent=2)}")
    assert counts["kills"] == NUM_KILLS
    assert all(run["logs_whole"] for run in found)
    harm = list(counts)[4:]
    assert {name: counts[name] for name in harm} == dict.fromkeys(harm, 0)
