"""Past selection nothing of the dropped rollouts is kept alive: token ids, log-probs, tensors and pictures."""

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from PIL import Image
from rig import N8_M4, Group, Script, make_trainer
from test_vision import ONE, TWO, LookingPODS, ReplayPODS, Shadow, train_to_look
from test_vision import train as train_with_pictures
from trl import GRPOConfig

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer


class Looks:
    """Looks around whenever log-probs are computed: before the update, where old ones are needed, and in it."""

    looks: list[tuple[str, object]]

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.looks.append(("update" if torch.is_grad_enabled() else "score", self.look()))
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


def looking(trainer_class, look):
    return type("LookingAround", (Looks, trainer_class), {"look": staticmethod(look), "looks": []})


# Token ids and log-probs

REWARDS = [0.1, 0.9, 0.5, 0.45, 0.0, 1.0, 0.55, 0.6]
KEPT, DROPPED = [0, 1, 4, 5], [2, 3, 6, 7]


def logprob(rollout: int) -> float:
    return -rollout - 0.25 - 2**-15  # exact in float32, and nothing else has it


def numbers_in_memory() -> Iterator[list]:
    """Every list of numbers, and the whole memory behind every small tensor, of which it may be a part."""
    seen = set()
    for thing in gc.get_objects():
        if type(thing) is list and thing and type(thing[0]) in (int, float):
            yield thing
        elif issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            if storage.device.type == "meta":  # no memory behind it, like the fake tensors that torch.compile leaves
                continue
            if storage.data_ptr() not in seen and 0 < storage.nbytes() < 10_000:
                seen.add(storage.data_ptr())
                yield torch.tensor([], dtype=thing.dtype).set_(storage).tolist()


def alive(completions: dict[int, tuple[int, ...]]) -> set[tuple[str, int]]:
    """Of which rollouts there are token ids or log-probs."""
    found = set()
    for numbers in numbers_in_memory():
        for rollout, tokens in completions.items():  # tuples: lists would be found
            starts = [i for i, number in enumerate(numbers) if number == tokens[0]]
            if any(tuple(numbers[i : i + len(tokens)]) == tokens for i in starts):
                found.add(("tokens", rollout))
            if logprob(rollout) in numbers:
                found.add(("log-probs", rollout))
    return found


@pytest.mark.parametrize("generated", [False, True])
def test_no_token_ids_or_log_probs_of_dropped_rollouts_are_alive(tmp_path, generated):
    completions = {}

    def reward(completion_ids, **kwargs):
        completions.update(enumerate(tuple(ids) for ids in completion_ids))
        return REWARDS

    script = Script([Group(REWARDS, [6] * 8, masks=[2] * 8, logprob=logprob)])
    own = {"rollout_func": None} if generated else {}
    trainer = make_trainer(
        tmp_path,
        script,
        looking(PODSGRPOTrainer, lambda: alive(completions)),
        trainer_kwargs={"reward_funcs": [reward], **own},
        generation_kwargs={"min_new_tokens": 8},
        num_iterations=2,
        max_steps=3,
        **N8_M4,
    )
    trainer.train()
    assert [phase for phase, _ in trainer.looks] == ["score", "update", "update", "score", "update"]
    kinds = ["tokens"] if generated else ["tokens", "log-probs"]
    for _, found in trainer.looks:
        assert found == {(kind, rollout) for kind in kinds for rollout in KEPT}


# Pictures


def pictures_in_memory() -> Counter:
    """By their sizes."""
    return Counter(thing.size for thing in gc.get_objects() if issubclass(type(thing), Image.Image))


def test_no_pictures_that_tools_gave_to_dropped_rollouts_are_alive(tmp_path):
    before = pictures_in_memory()
    trainer_class = looking(LookingPODS, lambda: pictures_in_memory() - before)
    # Rollouts 1 and 3 look at pictures of 8 x 8 and 24 x 8.
    rewards = [0.0, 0.5, 0.6, 1.0]
    trainer = train_to_look(tmp_path, trainer_class, PODSGRPOConfig, rewards, num_rollouts=4, num_iterations=2)
    assert [phase for phase, _ in trainer.looks] == ["score", "update", "update"]
    for _, found in trainer.looks:
        assert (8, 8) not in found
    assert (24, 8) in trainer.looks[0][1]


def test_no_more_pictures_of_the_data_are_alive_in_the_update_than_with_grpo(tmp_path):
    before = pictures_in_memory()

    def looks(name, trainer_class, config_class, **settings):
        trainer = train_with_pictures(
            tmp_path / name,
            "qwen2_vl",
            looking(trainer_class, lambda: pictures_in_memory() - before),
            [ONE, TWO, ONE],
            config_class,
            per_device_train_batch_size=2,
            log_completions=False,
            **settings,
        )
        return [found for phase, found in trainer.looks if phase == "update"]

    grpo = looks("grpo", Shadow, GRPOConfig)
    pods = looks("pods", ReplayPODS, PODSGRPOConfig, num_rollouts=4)
    assert len(grpo) == len(pods) == 2
    for ours, theirs in zip(pods, grpo, strict=True):
        assert theirs
        assert not ours - theirs
