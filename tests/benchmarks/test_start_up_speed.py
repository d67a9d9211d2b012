import json
import statistics
import subprocess
import sys

import pytest
from measuring import alternating_seconds


pytestmark = pytest.mark.benchmark

IMPORT = """
import json, time
start = time.perf_counter()
import trl
between = time.perf_counter()
import trl_pods
print(json.dumps([between - start, time.perf_counter() - between, trl_pods.__version__]))
"""
HELP = [sys.executable, "-X", "importtime", "-m", "trl_pods", "--help"]


def run(arguments):
    return subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=120)


def test_start_up_against_that_of_trl(report):
    run([sys.executable, "-c", IMPORT])  # compiles
    shares = []
    for _ in range(7):
        trl, trl_pods, version = json.loads(run([sys.executable, "-c", IMPORT]).stdout)
        assert version
        shares.append(trl_pods / trl)
    report("import trl_pods after import trl", f"{statistics.median(shares):.2%} of its time")

    shown = run(HELP)
    assert "trl-pods" in shown.stdout
    assert " torch" not in shown.stderr
    seconds = alternating_seconds(
        {"help": lambda: run(HELP), "torch": lambda: run([sys.executable, "-c", "import torch"])}, repeats=7
    )
    report("trl-pods --help", f"{seconds['help'] / seconds['torch']:.0%} of the time of python -c 'import torch'")
