import json
import os
from fractions import Fraction
from pathlib import Path

import pytest

from trl_pods.data import SYSTEM_PROMPT, load_gsm8k
from trl_pods.rewards import PAPER_REWARDS, math_accuracy_reward


ROWS = [
    {"question": "Ada packs 6 boxes of 3 pens. How many pens?", "answer": "6 * 3 = <<6*3=18>>18 pens.\n#### 18"},
    {"question": "What is 2 times 700?", "answer": "Twice 700 is 1,400.\n#### 1,400 \n"},
    {"question": "From 4 take 9.", "answer": "#### is the mark.\n#### -5"},
]


@pytest.fixture
def folder(tmp_path):
    lines = [json.dumps(row) for row in ROWS]
    (tmp_path / "test.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return tmp_path


def test_rows_become_a_system_message_a_question_and_the_gold_number(folder):
    dataset = load_gsm8k("test", data_dir=folder)
    assert dataset.column_names == ["prompt", "solution"]
    assert dataset["solution"][:] == ["18", "1400", "-5"]
    assert dataset[1]["prompt"] == [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": "What is 2 times 700?"},
    ]


def test_the_system_message_can_be_replaced_or_left_out(folder):
    own = load_gsm8k("test", data_dir=str(folder), system_prompt="Be brief.")
    assert own[0]["prompt"][0] == {"role": "system", "content": "Be brief."}
    bare = load_gsm8k("test", data_dir=folder, system_prompt=None)
    assert bare[0]["prompt"] == [{"role": "user", "content": ROWS[0]["question"]}]


def test_a_completion_laid_out_as_the_system_message_asks_earns_every_layout_reward():
    completion = SYSTEM_PROMPT[SYSTEM_PROMPT.index("<think>") :]
    rewards = [
        function([completion], solution=["1"])[0] for r in PAPER_REWARDS.values() for function in r.reward_funcs
    ]
    # Accuracy is 0: "your result" is no number.
    assert rewards == [0.0, 1.0, 1.0, 0.0, 1.0, 1.0]


def test_a_missing_file_is_named_with_the_option_that_points_to_it(folder):
    with pytest.raises(ValueError, match=r"train\.jsonl.*`data_dir`") as error:
        load_gsm8k("train", data_dir=folder)
    assert str(folder / "train.jsonl") in str(error.value)


def test_an_unknown_split_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="'validation'.*'train', 'test'"):
        load_gsm8k("validation")


@pytest.mark.parametrize("answer", ["18", "", "6 * 3\n####", "6 * 3\n#### ,"])
def test_a_row_without_a_gold_answer_is_refused_by_its_number(folder, answer):
    rows = [ROWS[0], {"question": "?", "answer": answer}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(ValueError, match="Row 1 .*####"):
        load_gsm8k("train", data_dir=folder)


def test_without_a_folder_the_data_come_from_the_hub(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "trl_pods.data.gsm8k.load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or ROWS
    )
    assert load_gsm8k()["solution"][:] == ["18", "1400", "-5"]
    assert calls == [(("openai/gsm8k", "main"), {"split": "train"})]


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_gsm8k_gold_equals_itself_and_not_its_neighbour(split):
    shared = Path(os.environ.get("TRL_PODS_SHARED", Path(__file__).resolve().parents[2] / "shared"))
    data_dir = shared / "data" / "gsm8k"
    if not (data_dir / f"{split}.jsonl").is_file():
        pytest.skip(f"no GSM8K in {data_dir}; set TRL_PODS_SHARED to a folder with data/gsm8k/{split}.jsonl")
    golds = load_gsm8k(split, data_dir=data_dir)["solution"][:]
    assert len(golds) > 1000
    right = math_accuracy_reward([f"<answer>\n{gold}\n</answer>" for gold in golds], golds)
    wrong = math_accuracy_reward([f"<answer>\n{Fraction(gold) + 1}\n</answer>" for gold in golds], golds)
    assert set(right) == {1.0}
    assert set(wrong) == {0.0}
