"""Tools and environments with down-sampling: prescribed conversations, against plain GRPO on the kept ones."""

import json
import re

import pytest
from conversations import chat_template, make_byte_tokenizer
from datasets import Dataset
from rig import LOGGED, LogRecorder, assert_trained_alike, kept_rows, make_config, make_model, read_table, step_logs
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer, PODSMixin


NUM_ROLLOUTS, NUM_KEPT = 4, 2
REWARDS = {0: [0.2, 0.9, 0.1, 0.5], 1: [1.0, 0.3, 0.4, 0.0]}  # by prompt
KEPT = {0: [1, 2], 1: [0, 3]}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tool_tokenizer()


def make_tool_tokenizer():
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = chat_template("qwen3")
    return tokenizer


def multiply(a: int, b: int) -> int:
    """
    Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


async def multiply_later(a: int, b: int) -> int:
    return multiply(a, b)


multiply_later.__doc__ = multiply.__doc__


class Board:
    """An environment that owns its reward, and that writes into what it is given."""

    made: list["Board"] = []

    def __init__(self):
        self.num_resets = 0
        Board.made.append(self)

    def reset(self, board, **kwargs) -> str:
        self.num_resets += 1
        self.board = board
        self.turns = []
        return " Play."

    def put(self, a: int, b: int) -> str:
        """
        Put a piece on the board.

        Args:
            a: The prompt.
            b: The rollout.

        Returns:
            What is on the board.
        """
        self.board.append(b)
        self.turns.append((a, b))
        return str(self.board)

    def get_reward(self) -> float:
        return REWARDS[self.turns[0][0]][self.turns[0][1]]


class Chest(Board):
    """Another environment, with a tool and an asynchronous reward of its own."""

    def look(self, a: int, b: int) -> str:
        """
        Look into the chest.

        Args:
            a: The prompt.
            b: The rollout.

        Returns:
            What is in it.
        """
        return self.put(a, b)

    async def get_reward(self) -> float:
        return Board.get_reward(self) - 1


class Scripted(GRPOTrainer):
    """Overrides the generation of a turn, as a subclass of a user's might."""

    only: dict[int, list[int]] | None = None
    tool: str | list[str] = "multiply"  # for all prompts, or by prompt
    everyone_calls = False

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        asked = [self.processing_class.decode(ids) for ids in prompt_ids]
        if "<tool_response>" in asked[0]:
            texts = [
                f"So {re.findall('<tool_response>(.*?)</tool_response>', a, re.DOTALL)[-1].strip()}" for a in asked
            ]
        else:
            texts = self._first_turn([int(re.findall(r"Question (\d)", a)[-1]) for a in asked])
        return [self.processing_class(text + "<|im_end|>")["input_ids"] for text in texts], None

    def _first_turn(self, numbers):
        texts = []
        for position, number in enumerate(numbers):
            choice = self.only[number] if self.only else range(NUM_ROLLOUTS)
            rollout = choice[numbers[:position].count(number)]
            tool = self.tool if isinstance(self.tool, str) else self.tool[number]
            call = json.dumps({"name": tool, "arguments": {"a": number, "b": rollout}})
            calls = self.everyone_calls or rollout % 2 == 0
            texts.append(f"<tool_call>\n{call}\n</tool_call>" if calls else f"Rollout {rollout} of {number}")
        return texts


class ScriptedPODS(PODSMixin, Scripted):
    pass


def reward(completions, **kwargs):
    rewards = []
    for completion in completions:
        message = completion[0]
        if message.get("tool_calls"):
            arguments = message["tool_calls"][0]["function"]["arguments"]
            number, rollout = arguments["a"], arguments["b"]
        else:
            rollout, number = map(int, re.findall(r"\d", message["content"]))
        rewards.append(REWARDS[number][rollout])
    return rewards


def train(
    folder, tokenizer, trainer_class, config_class=GRPOConfig, settings=None, trainer_settings=None, **attributes
):
    columns = {"prompt": [[{"role": "user", "content": f"Question {i}"}] for i in (0, 1)], "board": [[7], [8]]}
    if "environments_of_prompts" in attributes:
        columns["environment"] = attributes.pop("environments_of_prompts")
    dataset = Dataset.from_dict(columns)
    settings = {
        "num_generations": NUM_KEPT,
        "per_device_train_batch_size": 2 * NUM_KEPT,
        "max_completion_length": 256,
        "learning_rate": 1e-2,
        "max_steps": 2,
        **LOGGED,
    } | (settings or {})
    trainer_class = type(trainer_class.__name__, (trainer_class,), attributes)
    recorder = LogRecorder()
    trainer = trainer_class(
        model=make_model(
            vocab_size=len(tokenizer),
            max_position_embeddings=4096,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ),
        args=make_config(folder, config_class, **settings),
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[recorder],
        **({"reward_funcs": [reward]} | (trainer_settings or {})),
    )
    trainer.recorder = recorder
    trainer.train()
    return trainer


def assert_evaluated_alike(pods, shadow):
    """After equal trainings, on the first two rollouts of each prompt."""
    shadow.only = None
    ours, theirs = (trainer.evaluate(trainer.train_dataset) for trainer in (pods, shadow))
    assert ours["eval_reward"] == pytest.approx((0.2 + 0.9 + 1.0 + 0.3) / 4)
    for key in theirs:
        if key.startswith(("eval_reward", "eval_tools/", "eval_loss", "eval_entropy", "eval_completions/")):
            assert ours[key] == theirs[key], key
    assert any(key.startswith("eval_tools/") for key in theirs)


@pytest.mark.parametrize("tool", [multiply, multiply_later], ids=["sync", "async"])
def test_tools_train_as_plain_grpo_on_the_kept_conversations(tmp_path, tokenizer, tool):
    attributes = {"tool": tool.__name__, "trainer_settings": {"tools": [tool]}}
    many = {"num_rollouts": NUM_ROLLOUTS}
    pods = train(tmp_path / "pods", tokenizer, ScriptedPODS, PODSGRPOConfig, many, **attributes)
    shadow = train(tmp_path / "shadow", tokenizer, Scripted, only=KEPT, **attributes)
    assert_trained_alike(pods, shadow)
    # Of all rollouts, two of four call the tool; of the kept ones of this script one of two.
    assert step_logs(pods)[0]["tools/call_frequency"] == 0.5
    assert kept_rows(pods, step=1) == [1, 2, 4, 7]
    assert_evaluated_alike(pods, shadow)
    assert read_table(pods, step=1)["reward"].tolist() == pytest.approx(REWARDS[0] + REWARDS[1])


def test_each_rollout_has_an_environment_of_its_own(tmp_path, tokenizer):
    attributes = {
        "tool": "put",
        "everyone_calls": True,
        "trainer_settings": {"environment_factory": Board, "reward_funcs": None},
    }
    Board.made = []
    many = {"num_rollouts": NUM_ROLLOUTS}
    pods = train(tmp_path / "pods", tokenizer, ScriptedPODS, PODSGRPOConfig, many, **attributes)
    boards, Board.made = Board.made, []
    shadow = train(tmp_path / "shadow", tokenizer, Scripted, only=KEPT, **attributes)

    assert len(boards) == 2 * NUM_ROLLOUTS
    assert [board.num_resets for board in boards] == [2] * len(boards)
    assert [board.turns for board in boards] == [[(p, r)] for p in (0, 1) for r in range(NUM_ROLLOUTS)]
    assert [board.board for board in boards] == [[7 + p, r] for p in (0, 1) for r in range(NUM_ROLLOUTS)]
    assert step_logs(pods)[0]["rewards/Board/mean"] == pytest.approx(sum(REWARDS[0] + REWARDS[1]) / 8)
    assert_trained_alike(pods, shadow)
    Board.made = []
    assert_evaluated_alike(pods, shadow)
    assert Board.made == []  # those of the training are reset and used again


def test_each_prompt_may_name_an_environment(tmp_path, tokenizer):
    attributes = {
        "tool": ["look", "put"],
        "everyone_calls": True,
        "environments_of_prompts": ["chest", "board"],
        "trainer_settings": {"environment_factory": {"board": Board, "chest": Chest}, "reward_funcs": None},
    }
    Board.made = []
    pods = train(
        tmp_path / "pods", tokenizer, ScriptedPODS, PODSGRPOConfig, {"num_rollouts": NUM_ROLLOUTS}, **attributes
    )
    boards, Board.made = Board.made, []
    shadow = train(tmp_path / "shadow", tokenizer, Scripted, only=KEPT, **attributes)

    for kind, prompt in ((Chest, 0), (Board, 1)):
        of_kind = [board for board in boards if type(board) is kind]
        assert [board.turns for board in of_kind] == [[(prompt, rollout)] for rollout in range(NUM_ROLLOUTS)]
        assert [board.num_resets for board in of_kind] == [2] * NUM_ROLLOUTS
    logs = step_logs(pods)[0]
    assert logs["rewards/Chest/mean"] == pytest.approx(sum(REWARDS[0]) / 4 - 1)
    assert logs["rewards/Board/mean"] == pytest.approx(sum(REWARDS[1]) / 4)
    assert kept_rows(pods, step=1) == [1, 2, 4, 7]
    assert_trained_alike(pods, shadow)


class Client:
    """In place of the client of a vLLM server: two of three rollouts call the tool; notes what it is asked for."""

    def __init__(self, tokenizer):
        self.tokenizer, self.requests = tokenizer, []

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def generate(self, prompts, n, **kwargs):
        self.requests.append((len(prompts), n))
        texts = [text for ids in prompts for text in self._answers(self.tokenizer.decode(ids), n)]
        completions = [self.tokenizer(text + "<|im_end|>")["input_ids"] for text in texts]
        logprobs = [[[-0.1]] * len(ids) for ids in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": logprobs}

    def _answers(self, conversation, n):
        results = re.findall("<tool_response>(.*?)</tool_response>", conversation, re.DOTALL)
        if results:
            return [f"So {results[-1].strip()}"] * n
        number = int(re.findall(r"Question (\d)", conversation)[-1])
        calls = [json.dumps({"name": "multiply", "arguments": {"a": number + 5, "b": b}}) for b in range(n)]
        return [f"<tool_call>\n{call}\n</tool_call>" if b % 3 else "Nothing." for b, call in enumerate(calls)]


def test_a_server_gets_each_prompt_once_and_each_row_that_goes_on(tmp_path, tokenizer, monkeypatch):
    # Before 1.14 TRL itself asks for a group of completions of every n-th row that goes on.
    client, said = Client(tokenizer), []
    monkeypatch.setattr(
        "trl.generation.vllm_generation.VLLMGeneration._init_vllm", lambda self: setattr(self, "vllm_client", client)
    )
    monkeypatch.setattr("trl.generation.vllm_generation.VLLMGeneration.sync_weights", lambda self: None)

    def note(completions, **kwargs):
        said.extend(completion[-1]["content"].strip() for completion in completions)
        return [float(i) for i in range(len(completions))]

    settings = {"num_rollouts": NUM_ROLLOUTS, "num_generations_eval": 3, "max_steps": 1, "learning_rate": 0.0}
    settings |= {"use_vllm": True, "vllm_mode": "server", "per_device_eval_batch_size": 3}
    trainer = train(
        tmp_path,
        tokenizer,
        PODSGRPOTrainer,
        PODSGRPOConfig,
        settings,
        trainer_settings={"tools": [multiply], "reward_funcs": [note]},
    )
    assert client.requests == [(2, 4), (4, 1)]
    assert said == ["Nothing.", "So 5", "So 10", "Nothing.", "Nothing.", "So 6", "So 12", "Nothing."]

    client.requests.clear(), said.clear()
    trainer.evaluate(trainer.train_dataset)
    assert client.requests == [(1, 3), (2, 1)] * 2
    assert said == ["Nothing.", "So 5", "So 10", "Nothing.", "So 6", "So 12"]


def test_a_plain_trainer_of_pods_takes_the_same_arguments(tmp_path, tokenizer):
    # Generation by the model itself: it calls no tool, and its rollouts are ordinary completions.
    def lengths(completion_ids, **kwargs):
        return [float(len(set(ids))) for ids in completion_ids]

    trainer = train(
        tmp_path,
        tokenizer,
        PODSGRPOTrainer,
        PODSGRPOConfig,
        {"num_rollouts": NUM_ROLLOUTS, "max_completion_length": 4},
        trainer_settings={"tools": [multiply], "reward_funcs": [lengths]},
    )
    assert len(step_logs(trainer)) == 2
