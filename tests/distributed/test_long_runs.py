"""2,000 steps in one and in two real processes (gloo): nothing grows. `pytest -m nightly -s` prints the curve."""

import json
from pathlib import Path
from statistics import linear_regression, median

import pytest
from launching import launch
from long_run import EVERY, STEPS


pytestmark = [pytest.mark.nightly, pytest.mark.timeout(4000)]

SCRIPT = Path(__file__).parent / "long_run.py"
WARM_UP = 500


@pytest.mark.parametrize("world", [1, 2])
def test_neither_memory_nor_step_time_nor_logs_grow(tmp_path, world):
    launch(SCRIPT, tmp_path, num_processes=world, timeout=1800)
    for rank in range(world):
        samples = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert [sample["step"] for sample in samples] == list(range(EVERY, STEPS + 1, EVERY))
        for sample in samples[4::5]:
            print(f"process {rank} of {world}:", sample)

        steady = [sample for sample in samples if sample["step"] > WARM_UP]
        growth = linear_regression(
            [sample["step"] for sample in steady], [sample["megabytes"] for sample in steady]
        ).slope
        # Rollouts that were held on to, 24 a step with their objects, would come to some 20 kB a step.
        assert growth < 4 / 1024, f"{1024 * growth:.1f} kB a step"

        times = [sample["milliseconds_per_step"] for sample in steady]
        quarter = len(times) // 4
        assert median(times[-quarter:]) < 1.5 * median(times[:quarter]), times

        # A round has 24 rollouts; metrics are kept between logs; nothing waits from one round to the next.
        assert {sample["rows_in_logs"] for sample in samples} == {24}
        assert max(sample["values_in_metrics"] for sample in samples) <= EVERY
        assert {sample["pending"] for sample in samples} == {0}
