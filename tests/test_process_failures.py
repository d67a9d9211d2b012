import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, PrefixStore

from trl_pods import process_failures
from trl_pods.process_failures import ProcessFailures


def on_processes(work, num_processes, **kwargs):
    """Threads stand for processes: `work(process, failures)`; returns the store and what each returned or raised."""
    store = HashStore()

    def run(process):
        failures = ProcessFailures(process, num_processes, store=PrefixStore("test", store), **kwargs)
        try:
            return work(process, failures)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(num_processes) as pool:
        return store, list(pool.map(run, range(num_processes)))


def test_every_process_that_failed_is_named_to_those_that_did_not():
    def work(process, failures):
        with failures.shared():
            if process != 1:
                raise KeyError(f"from {process}")
            failures.meet()

    _, (first, second, third) = on_processes(work, 3)
    assert (repr(first), repr(third)) == ("KeyError('from 0')", "KeyError('from 2')")
    assert "Process 0 failed, and so this one ends: KeyError('from 0')" in str(second)
    assert "Process 2 failed, and so this one ends: KeyError('from 2')" in str(second)
    assert 'raise KeyError(f"from {process}")' in str(second)  # the traceback


def test_a_process_that_does_not_come_is_named_and_one_that_failed_keeps_its_own_exception():
    def work(process, failures):
        with failures.shared():
            if process == 1:
                failures.settle()
                return
            with failures.limit(1.0, "come in time"):
                if process == 2:
                    raise KeyError("mine")
                failures.meet()

    _, (first, _, third) = on_processes(work, 3)
    assert str(first).startswith("Process 2 failed, and so this one ends: KeyError('mine')")
    assert str(first).endswith("\n\nOf 3 processes, [1] have not come in time.")
    assert repr(third) == "KeyError('mine')"


def test_a_limit_outlasts_a_meeting_within_it_and_ends_with_its_block():
    def work(process, failures):
        with failures.shared(), failures.limit(0.5, "come in time"):
            failures.meet()  # a reward function that gathers by itself
            if process == 1:
                time.sleep(2.5)
                failures.settle()
                return
            failures.meet()

    _, (first, _) = on_processes(work, 2)
    assert str(first) == "Of 2 processes, [1] have not come in time."

    def late(process, failures):
        with failures.shared():
            with failures.limit(0.5, "come in time"):
                failures.meet()
            time.sleep(2 * process)
            failures.meet()

    assert on_processes(late, 2)[1] == [None, None]


@pytest.mark.parametrize("name", ["_BOOT", "_NAMESPACE"])
def test_process_ids_of_hosts_with_the_same_name_are_not_mixed_up(monkeypatch, tmp_path, name):
    machines = set()
    for host in ("a", "b"):
        (tmp_path / host).symlink_to(f"{host}.txt")
        (tmp_path / f"{host}.txt").write_text(host)
        monkeypatch.setattr(process_failures, name, tmp_path / host)
        machines.add(process_failures._machine())
    assert len(machines) == 2


def test_processes_meet_before_a_collective_within_the_block_only():
    class Backend:
        calls = 0

        def gather(self, value):
            self.calls += 1
            return [value]

    def work(process, failures):
        backend = Backend()
        with failures.shared((backend, "gather")):
            if process == 0:
                raise KeyError
            backend.gather(1)

    _, (_, second) = on_processes(work, 2)
    assert "Process 0 failed" in str(second)
    backend = Backend()
    with ProcessFailures(0, 2, store=HashStore()).shared((backend, "gather")):
        pass
    assert backend.gather(1) == [1]  # alone, and so it does not wait
    assert vars(backend) == {"calls": 1}


def test_the_store_does_not_grow():
    def work(process, failures):
        for _ in range(20):
            with failures.shared():
                failures.meet()
                failures.meet()

    store, errors = on_processes(work, 3)
    assert errors == [None] * 3
    assert store.num_keys() == 6 + 3  # of the last meeting: three processes, two counts, the reports; process ids


def test_one_process_meets_nobody():
    failures = ProcessFailures(0, 1)
    with failures.shared():
        failures.meet()
    with pytest.raises(KeyError, match="mine"), failures.shared():
        raise KeyError("mine")
