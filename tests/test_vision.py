"""Vision-language models with down-sampling: prescribed completions, against plain GRPO on the kept ones."""

import itertools
import json

import pytest
import torch
import trl
from conversations import chat_template, make_byte_tokenizer
from datasets import Dataset, Features, Image, List, Value
from packaging.version import Version
from rig import (
    LOGGED,
    Group,
    LogRecorder,
    Narrow,
    assert_trained_alike,
    kept_rows,
    make_config,
    number_of_distinct_words,
    read_table,
    step_logs,
    weights,
)
from trl import GRPOConfig, GRPOTrainer
from vision import FAMILIES, picture, qwen2_vl

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer, PODSMixin
from trl_pods.chunks import chunks_of_fields


GROUPS = [
    Group([0.2, 0.9, 0.1, 0.5], lengths=[3, 5, 2, 4]),
    Group([1.0, 0.3, 0.4, 0.0], lengths=[2, 2, 6, 3]),
    Group([0.0, 0.0, 1.0, 0.5], lengths=[4, 3, 3, 2]),
]
KEPT = {0: [1, 2], 1: [0, 3], 2: [0, 2]}
FIRST_PROMPT_WORD = 10

FAMILY_PARAMS = [
    pytest.param(
        family,
        marks=pytest.mark.skipif(
            family == "gemma3" and Version(trl.__version__) < Version("1.11"),
            reason="trl 1.10 gives rows of this family the pictures of others",
        ),
    )
    for family in FAMILIES
]

# Before 1.16 TRL cannot write a completions table of prompts with pictures.
TABLE = LOGGED if Version(trl.__version__) >= Version("1.16") else {}
ONE, TWO, NONE = [picture(1, 16, 16)], [picture(2, 24, 16), picture(3, 8, 8)], []


class Replay(GRPOTrainer):
    """Prescribed completions in place of the model's; notes how many rows it is asked for at once."""

    only: dict[int, list[int]] | None = None

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        numbers = [next(i - FIRST_PROMPT_WORD for i in ids if 10 <= i < 10 + len(GROUPS)) for ids in prompt_ids]
        first_row = self.accelerator.process_index * len(numbers)
        completions = []
        for row, number in enumerate(numbers, start=first_row):
            choice = self.only[number] if self.only else range(4)
            completions.append(GROUPS[number].completion(choice[row % len(choice)]))
        return completions, None


class ReplayPODS(PODSMixin, Replay):
    pass


class Shadow(Narrow, Replay):
    """Plain GRPO on the kept rollouts."""

    only = KEPT

    def _generate(self, prompts):
        *outputs, images, tool_images = super()._generate(prompts)
        # Processors take an empty list where a row has no picture, but not the `None` that TRL gives them.
        return *outputs, images and [pictures or [] for pictures in images], tool_images


def reward(completion_ids, number, **kwargs):
    # The first token of a completion tells which rollout it is.
    return [GROUPS[n].rewards[(ids[0] - 3) // 7] for ids, n in zip(completion_ids, number, strict=True)]


def make_dataset(pictures):
    features = Features(
        {
            "prompt": List({"role": Value("string"), "content": Value("string")}),
            "images": List(Image()),
            "number": Value("int64"),
        }
    )
    rows = [
        {"prompt": [{"role": "user", "content": f"w{FIRST_PROMPT_WORD + i} w5"}], "images": images, "number": i}
        for i, images in enumerate(pictures)
    ]
    return Dataset.from_list(rows, features=features)


def train(folder, family, trainer_class, pictures, config_class=GRPOConfig, dataset=None, **settings):
    model, processor = FAMILIES[family]()
    if settings.get("beta"):  # TRL loads the reference model from where the model came from
        model.save_pretrained(folder / "model")
        model, settings["model_init_kwargs"] = str(folder / "model"), {"dtype": "float32"}
    recorder = LogRecorder()
    trainer = trainer_class(
        model=model,
        reward_funcs=[reward],
        args=make_config(
            folder,
            config_class,
            num_generations=2,
            learning_rate=1e-2,
            max_steps=2,
            max_completion_length=8,
            **(TABLE | settings),
        ),
        train_dataset=dataset or make_dataset(pictures),
        processing_class=processor,
        callbacks=[recorder],
    )
    trainer.recorder = recorder
    trainer.train()
    return trainer


ONE_BATCH = {"per_device_train_batch_size": 6}
ACCUMULATED = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6, "beta": 0.1}
SEVERAL_STEPS = {"per_device_train_batch_size": 2, "steps_per_generation": 3, "pad_to_multiple_of": 8}


@pytest.mark.parametrize(
    ("pictures", "settings"),
    [
        ([ONE, TWO, ONE], ONE_BATCH),
        ([ONE, TWO, ONE], ACCUMULATED),
        ([ONE, TWO, ONE], SEVERAL_STEPS),
        # No model takes a batch without pictures together with an empty tensor for them, so those with and without
        # stand in one batch.
        ([ONE, NONE, TWO], ONE_BATCH),
        ([NONE, NONE, NONE], ACCUMULATED),
    ],
    ids=["one batch", "accumulated", "several steps a round", "some without", "all without"],
)
@pytest.mark.parametrize("family", FAMILY_PARAMS)
def test_pictures_follow_their_rollouts(tmp_path, family, pictures, settings):
    shadow = train(tmp_path / "shadow", family, Shadow, pictures, **settings)
    pods = train(tmp_path / "pods", family, ReplayPODS, pictures, PODSGRPOConfig, num_rollouts=4, **settings)
    assert_trained_alike(pods, shadow)
    if TABLE:
        assert kept_rows(pods) == [1, 2, 4, 7, 8, 10]
        assert read_table(pods)["reward"].tolist() == pytest.approx([r for group in GROUPS for r in group.rewards])


@pytest.mark.skipif(not TABLE, reason=f"trl {trl.__version__} cannot write a table of prompts with pictures")
def test_a_round_without_pictures_does_not_show_those_of_the_round_before(tmp_path):
    pods = train(
        tmp_path, "qwen2_vl", ReplayPODS, [ONE, NONE], PODSGRPOConfig, num_rollouts=4, per_device_train_batch_size=2
    )
    assert list(pods._logs["prompt"])[0][0]["content"].split()[0] == f"w{FIRST_PROMPT_WORD + 1}"
    assert not pods._logs["images"]


def screen(size: int) -> list:
    """
    Look at the screen.

    Args:
        size: How large.

    Returns:
        A picture.
    """
    return [{"type": "image", "image": picture(size, 8 * size, 8)}, {"type": "text", "text": "Seen."}]


class Looking(GRPOTrainer):
    """Rollouts 1 and 3 of four look at the screen, each at a size of its own; the others answer at once."""

    only: list[int] | None = None

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        asked = self.processing_class.tokenizer.batch_decode(prompt_ids)
        if "<tool_response>" in asked[0]:
            texts = ["Done"] * len(asked)
        else:
            rollouts = self.only or range(4)
            texts = [self._first_turn(rollouts[i % len(rollouts)]) for i in range(len(asked))]
        return [self.processing_class.tokenizer(text + "<|im_end|>")["input_ids"] for text in texts], None

    @staticmethod
    def _first_turn(rollout):
        if rollout % 2 == 0:
            return f"I do not look {rollout}"
        call = {"name": "screen", "arguments": {"size": rollout}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


class LookingPODS(PODSMixin, Looking):
    pass


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([0.0, 0.5, 0.6, 1.0], [0, 3]), ([0.0, 1.0, 0.5, 0.9], [0, 1]), ([0.0, 0.5, 1.0, 0.5], [0, 2])],
    ids=["one that looked", "another", "none that looked"],
)
def test_pictures_that_tools_return_follow_their_rollouts(tmp_path, rewards, kept):
    pods = train_to_look(tmp_path / "pods", LookingPODS, PODSGRPOConfig, rewards, num_rollouts=4, **LOGGED)
    shadow = train_to_look(tmp_path / "shadow", type("Shadow", (Looking,), {"only": kept}), GRPOConfig, rewards)
    assert_trained_alike(pods, shadow)
    assert kept_rows(pods) == kept
    assert step_logs(pods)[0]["tools/call_frequency"] == 0.5
    # What is logged of every rollout is its own.
    logged = [[image.size for image in images or []] for images in pods._logs["images"]]
    assert logged == [[], [(8, 8)], [], [(24, 8)]]


class Speaking(Looking):
    """Goes on in the model's words where it has looked."""

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        if "<tool_response>" not in self.processing_class.tokenizer.decode(prompt_ids[0]):
            self.only = [next(self.rollouts) % 4 for _ in prompt_ids]
            return super()._generate_single_turn(prompt_ids, images, multimodal_fields, *args, **kwargs)
        self.spoken += GRPOTrainer._generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs)[
            0
        ]
        return self.spoken[-len(prompt_ids) :], None


def test_generation_in_chunks_takes_rows_to_which_a_tool_returned_no_picture(tmp_path):
    def glance(size: int) -> list | str:
        """
        Look at the screen.

        Args:
            size: How large.

        Returns:
            A picture, or none.
        """
        return screen(size) if size == 3 else "Nothing to see."

    def run(chunk_size):
        trainer_class = type("PODS", (PODSMixin, Speaking), {"rollouts": itertools.count(), "spoken": []})
        glance.__name__ = "screen"
        settings = {"top_k": 1, "max_steps": 1, "generation_kwargs": {"max_new_tokens": 4}}
        settings |= {"num_rollouts": 4, "rollout_chunk_size": chunk_size}
        trainer = train_to_look(tmp_path, trainer_class, PODSGRPOConfig, [0.0, 0.5, 0.6, 1.0], tool=glance, **settings)
        return trainer.spoken, step_logs(trainer)[0]["loss"]

    spoken, loss = run(None)
    assert [len(ids) for ids in spoken] == [4, 4]
    assert run(1) == (spoken, pytest.approx(loss, abs=1e-6))


def train_to_look(folder, trainer_class, config_class, rewards, tool=screen, **settings):
    def reward(completions, **kwargs):
        by_text = {Looking._first_turn(rollout): reward for rollout, reward in enumerate(rewards)}
        texts = []
        for first, *_ in completions:
            calls = first.get("tool_calls")
            texts.append(Looking._first_turn(calls[0]["function"]["arguments"]["size"]) if calls else _text(first))
        return [by_text[text] for text in texts]

    marks = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
    tokenizer = make_byte_tokenizer(*marks)
    tokenizer.image_token, tokenizer.image_token_id = marks[0], tokenizer.convert_tokens_to_ids(marks[0])
    model, processor = qwen2_vl(tokenizer, chat_template("qwen3_vl"))
    recorder = LogRecorder()
    trainer = trainer_class(
        model=model,
        reward_funcs=[reward],
        args=make_config(
            folder,
            config_class,
            num_generations=2,
            per_device_train_batch_size=2,
            max_completion_length=256,
            learning_rate=1e-2,
            **({"max_steps": 2} | settings),
        ),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "What do you see?"}]]}),
        processing_class=processor,
        tools=[tool],
        callbacks=[recorder],
    )
    trainer.recorder = recorder
    trainer.train()
    return trainer


def _text(message):
    content = message["content"]
    return content if isinstance(content, str) else content[0]["text"]


@pytest.mark.parametrize("column", ["image", "prompt"])
def test_a_picture_may_stand_in_a_column_of_its_own_or_in_the_prompt(tmp_path, column):
    def rows(batch):
        """Made on the fly: stored in a table, pictures within messages would become dictionaries."""
        pictures = [picture(i, 16, 16) for i in batch["number"]]
        texts = [{"type": "text", "text": f"w{FIRST_PROMPT_WORD + i} w5"} for i in batch["number"]]
        if column == "image":
            contents = [text["text"] for text in texts]
            columns = {"image": pictures}
        else:
            contents = [[{"type": "image", "image": image}, text] for image, text in zip(pictures, texts, strict=True)]
            columns = {}
        prompts = [[{"role": "user", "content": content}] for content in contents]
        return {"prompt": prompts, "number": batch["number"], **columns}

    dataset = Dataset.from_dict({"number": [0, 1], "prompt": ["", ""], "image": [None, None]}).with_transform(rows)
    settings = {"per_device_train_batch_size": 4, "dataset": dataset}
    pods = train(tmp_path / "pods", "qwen2_vl", ReplayPODS, (), PODSGRPOConfig, num_rollouts=4, **settings)
    assert_trained_alike(pods, train(tmp_path / "shadow", "qwen2_vl", Shadow, (), **settings))


def without_image_tokens(model):
    """A random model may say one, which would want a picture; TRL suppresses them since 1.16 only."""
    return {"suppress_tokens": [model.config.image_token_id]}


@pytest.mark.parametrize("family", FAMILY_PARAMS)
def test_a_vision_language_model_generates_and_is_evaluated(tmp_path, family):
    model, processor = FAMILIES[family]()
    pictures = [ONE, TWO, ONE]
    trainer = PODSGRPOTrainer(
        model=model,
        reward_funcs=[number_of_distinct_words],
        args=make_config(
            tmp_path,
            num_rollouts=4,
            num_generations=2,
            per_device_train_batch_size=2,
            per_device_eval_batch_size=3,
            num_generations_eval=1,
            learning_rate=1e-2,
            max_steps=3,
            generation_kwargs=without_image_tokens(model),
            **TABLE,
        ),
        train_dataset=make_dataset(pictures),
        eval_dataset=make_dataset(pictures),
        processing_class=processor,
    )
    before = weights(trainer)
    trainer.train()
    changed = {name for name, weight in weights(trainer).items() if not torch.equal(weight, before[name])}
    assert any("vision" in name or "visual" in name for name in changed)
    assert trainer.evaluate()["eval_reward"] > 0


@pytest.mark.parametrize("pictures", [[ONE, TWO, ONE], [TWO, NONE, ONE]], ids=["all with", "some without"])
@pytest.mark.parametrize("family", FAMILY_PARAMS)
def test_generation_in_chunks_gives_the_same_without_sampling(tmp_path, family, pictures):
    def run(chunk_size):
        completions = []

        def reward(completion_ids, **kwargs):
            completions.append(completion_ids)
            return [float(i % 3) for i in range(len(completion_ids))]

        settings = {"num_generations": 2, "per_device_train_batch_size": 6, "num_rollouts": 3, "top_k": 1}
        model, processor = FAMILIES[family]()
        settings["generation_kwargs"] = without_image_tokens(model)
        rows, generate = [], model.generate
        model.generate = lambda input_ids, **kwargs: rows.append(len(input_ids)) or generate(input_ids, **kwargs)
        trainer = PODSGRPOTrainer(
            model=model,
            reward_funcs=[reward],
            args=make_config(tmp_path, rollout_chunk_size=chunk_size, learning_rate=1e-2, max_steps=2, **settings),
            train_dataset=make_dataset(pictures),
            processing_class=processor,
        )
        trainer.train()
        return completions, rows, weights(trainer)

    whole, whole_rows, whole_weights = run(None)
    parts, parts_rows, parts_weights = run(4)
    assert (whole_rows, parts_rows) == ([9, 9], [4, 4, 1] * 2)
    assert parts == whole
    for name, weight in parts_weights.items():
        assert torch.allclose(weight, whole_weights[name], atol=1e-6), name


def test_chunks_are_refused_where_nothing_says_which_tiles_belong_to_a_row():
    fields = {"pixel_values": torch.zeros(5, 3, 8, 8)}  # two pictures in five tiles
    with pytest.raises(NotImplementedError, match="cuts images into tiles"):
        list(chunks_of_fields(fields, images=[ONE, ONE], num_rows=2, size=1))
