"""One, two, three and four real processes (gloo), the shapes of geometries.py; one run for each number of them."""

import itertools
from collections import Counter

import pytest
import torch
from collectives import assert_even
from geometries import GEOMETRIES, ROUNDS, SETTINGS


pytestmark = pytest.mark.slow

WORLDS = (1, 2, 3, 4)
SHARED = [(world, name) for name, geometry in GEOMETRIES.items() for world in geometry.worlds]
TIMES = ("time/", "step_time")
# Means over micro-steps, each of which has other rows in another number of processes.
OF_MICRO_STEPS = ("entropy", "clip_ratio/")


@pytest.fixture
def seen(seen_in, world, name):
    return [rank[name] for rank in seen_in(world)]


def best_subset(rewards, m):
    """By brute force: the rollouts of largest variance."""
    values = torch.tensor(rewards, dtype=torch.float64)
    subsets = torch.tensor(list(itertools.combinations(range(len(rewards)), m)))
    return subsets[values[subsets].var(dim=1, correction=0).argmax()].tolist()


def trained_on(seen, number):
    """(prompt, rollout) of the rows of a round over all processes, in order."""
    return [(prompt, rollout) for rank in seen for prompt, rollout, _ in rank["rounds"][number]]


@pytest.mark.parametrize(("world", "name"), SHARED)
def test_the_processes_train_on_the_best_subset_of_each_group(seen, world, name):
    geometry = GEOMETRIES[name]
    groups = geometry.groups()
    for number in range(ROUNDS):
        prompts = range(number * geometry.prompts, (number + 1) * geometry.prompts)
        trained = trained_on(seen, number)
        if geometry.selector == "max_variance":
            best = [(prompt, i) for prompt in prompts for i in best_subset(groups[prompt].rewards, geometry.m)]
            assert trained == best
        assert Counter(prompt for prompt, _ in trained) == dict.fromkeys(prompts, geometry.m)
        assert len(set(trained)) == len(trained)


@pytest.mark.parametrize(("world", "name"), SHARED)
def test_every_rollout_is_scored_once_and_rows_are_shared_out_evenly(seen, world, name):
    geometry = GEOMETRIES[name]
    scored = sorted(tuple(row) for rank in seen for row in rank["generated"])
    assert scored == [(prompt, i) for prompt in range(ROUNDS * geometry.prompts) for i in range(geometry.n)]
    assert {len(rank["generated"]) for rank in seen} == {len(scored) // world}
    kept_rows = geometry.batch_size(world) * geometry.micro_steps
    assert {len(rows) for rank in seen for rows in rank["rounds"]} == {kept_rows}
    assert {len(rank["rounds"]) for rank in seen} == {ROUNDS}


@pytest.mark.parametrize(("world", "name"), SHARED)
def test_no_collective_is_uneven(seen, folder_of, world, name):
    assert_even([rank["collectives"] for rank in seen])
    # Gradients are summed by C++ in every backward pass: as many of these, and over equally many rows.
    passes = [[(with_grad, rows) for with_grad, rows, _ in rank["forwards"]] for rank in seen]
    assert passes.count(passes[0]) == world
    assert {len(rank["logs"]) for rank in seen} == {len(seen[0]["logs"])}
    # And so the processes end with the same weights, to the last bit.
    final = [torch.load(folder_of(world) / f"{name}-{rank}.pt") for rank in range(world)]
    for weights in final[1:]:
        assert all(torch.equal(weights[key], final[0][key]) for key in final[0])


@pytest.mark.parametrize(("world", "name"), [(world, name) for world, name in SHARED if world > 1])
def test_the_number_of_processes_changes_nothing(seen, seen_in, folder_of, world, name):
    alone = [seen_in(1)[0][name]]
    for number in range(ROUNDS):
        assert trained_on(seen, number) == trained_on(alone, number)
        advantages = [a for rank in seen for _, _, a in rank["rounds"][number]]
        assert advantages == pytest.approx([a for _, _, a in alone[0]["rounds"][number]], abs=1e-6)
    if GEOMETRIES[name].updates > 1:  # each update has other rows then: TRL shuffles those of a process
        return
    assert alone[0]["moved"] > 1e-2
    assert max(abs(logs["loss"]) for logs in alone[0]["logs"]) > 1e-2
    for ours, theirs in zip(seen[0]["logs"], alone[0]["logs"], strict=True):
        assert set(ours) == set(theirs)
        for key in ours:
            if not key.startswith(TIMES if GEOMETRIES[name].micro_steps == 1 else TIMES + OF_MICRO_STEPS):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key
    ours, theirs = (torch.load(folder_of(w) / f"{name}-0.pt") for w in (world, 1))
    for key, weight in ours.items():
        torch.testing.assert_close(weight, theirs[key], atol=1e-6, rtol=0, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("world", WORLDS)
def test_what_cannot_be_shared_is_refused_on_every_process_with_numbers_that_can(seen_in, world):
    by_rank = [rank["refusals"] for rank in seen_in(world)]
    assert by_rank == [by_rank[0]] * world
    for settings, (message, remedies) in zip(SETTINGS, by_rank[0], strict=True):
        n, m = settings["num_rollouts"], settings["num_generations"]
        kept_rows = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
        can_be_shared = kept_rows * world % m == 0 and kept_rows * n % m == 0
        assert can_be_shared == (message is None), settings
        assert can_be_shared != any(refused is None for refused in remedies.values()), settings
        assert not any(remedies.values()), (message, remedies)


@pytest.mark.parametrize("world", WORLDS)
def test_kept_rows_reach_their_process_whatever_moves(seen_in, world):
    assert [rank["wrong_shares"] for rank in seen_in(world)] == [[]] * world
