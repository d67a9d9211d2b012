"""The formulas of traffic.py against what two and four real processes received, in the runs of test_geometries.py."""

import math
from dataclasses import replace

import pytest
from geometries import GEOMETRIES, ROUNDS
from traffic import Load, indices, lengths, lengths_and_rewards, moved_rows, texts_of_all, texts_of_kept


pytestmark = pytest.mark.slow

GEOMETRY = GEOMETRIES["long"]
PROMPT_TOKENS = 3


@pytest.fixture(params=[2, 4], name="world")
def _world(request):
    return request.param


@pytest.fixture
def seen(seen_in, world):
    return [rank["long"] for rank in seen_in(world)]


@pytest.fixture
def load(world):
    kept_lengths = [length for group in GEOMETRY.groups() for length in group.lengths]
    return Load(
        processes=world,
        prompts=GEOMETRY.prompts,
        n=GEOMETRY.n,
        m=GEOMETRY.m,
        completion_tokens=sum(kept_lengths) / len(kept_lengths),
        prompt_tokens=PROMPT_TOKENS,
        text_bytes=4,  # "w12 "
        id_bytes=2,
    )


def received(rank, *callers):
    """Bytes in a round, on average."""
    return sum(call["received"] for call in rank["collectives"] if call["caller"] in callers) / ROUNDS


def test_lengths_rewards_and_indices_are_as_many_bytes_as_computed(seen, load):
    for rank in seen:
        assert received(rank, "trl._generate", "trl._calculate_rewards") == lengths_and_rewards(load)
        assert received(rank, "trl_pods._completion_lengths") == lengths(load)
        assert indices(load) < received(rank, "trl_pods._on_main_process") < indices(load) + 700  # of pickling


def test_texts_are_about_as_many_bytes_as_computed(seen, load):
    constant = 200 * (load.processes - 1)
    for rank in seen:
        measured = received(rank, "trl._generate_and_score_completions") - constant
        assert measured == pytest.approx(texts_of_kept(load), rel=0.15)
        measured = received(rank, "trl_pods.log_completions") - constant
        assert measured == pytest.approx(texts_of_all(load), rel=0.15)


def test_rows_that_move_go_to_one_process_and_are_as_many_bytes_as_computed(seen, load, world):
    num_local, groups = load.rollouts // world, GEOMETRY.groups()
    num_moves = 0
    for process, rank in enumerate(seen):
        rows = [(prompt, rollout) for rows in rank["rounds"] for prompt, rollout, _ in rows]
        arrived = [
            groups[prompt].lengths[rollout]
            for prompt, rollout in rows
            if (prompt * load.n + rollout) % load.rollouts // num_local != process
        ]
        expected = sum(moved_rows(replace(load, completion_tokens=length), rows=1) for length in arrived)
        measured = sum(
            call["received"]
            for call in rank["collectives"]
            if call["caller"] == "trl_pods._exchange" and call["name"] == "all_to_all_single"
        )
        names = 55 * len(arrived)  # of the fields of the data set, and what pickling adds
        assert measured == pytest.approx(expected + names, rel=0.05), (arrived, expected)
        num_moves += len(arrived)
    assert num_moves > 0


def test_what_is_left_does_not_grow_with_the_rollouts(seen, load):
    named = ("trl._generate", "trl._calculate_rewards", "trl._generate_and_score_completions")
    for rank in seen:
        left = [call for call in rank["collectives"] if call["caller"] not in named]
        left = [call for call in left if not call["caller"].startswith("trl_pods.")]
        assert math.fsum(call["received"] for call in left) < 1000 * load.processes
