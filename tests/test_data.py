import json
import os
from fractions import Fraction
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from rig import make_tokenizer

from trl_pods.data import (
    CHOICE_SYSTEM_PROMPT,
    EXPRESSION_SYSTEM_PROMPT,
    SYSTEM_PROMPT,
    load_gsm8k,
    load_math,
    load_sciknoweval,
)
from trl_pods.data.competition_math import SUBJECTS
from trl_pods.rewards import PAPER_REWARDS, math_accuracy_reward, multiple_choice_reward


ROWS = [
    {"question": "Ada packs 6 boxes of 3 pens. How many pens?", "answer": "6 * 3 = <<6*3=18>>18 pens.\n#### 18"},
    {"question": "What is 2 times 700?", "answer": "Twice 700 is 1,400.\n#### 1,400 \n"},
    {"question": "From 4 take 9.", "answer": "#### is the mark.\n#### -5"},
]


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


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


@pytest.mark.parametrize("system_prompt", [SYSTEM_PROMPT, EXPRESSION_SYSTEM_PROMPT, CHOICE_SYSTEM_PROMPT])
def test_a_completion_laid_out_as_the_system_message_asks_earns_every_layout_reward(system_prompt):
    completion = system_prompt[system_prompt.index("<think>") :]
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
    with pytest.raises(ValueError, match="'validation'.*'train', 'test', 'platinum'"):
        load_gsm8k("validation")


@pytest.mark.parametrize("answer", ["18", "", "6 * 3\n####", "6 * 3\n#### ,"])
def test_a_row_without_a_gold_answer_is_refused_by_its_number(folder, answer):
    rows = [ROWS[0], {"question": "?", "answer": answer}]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    with pytest.raises(ValueError, match="Row 1 .*####"):
        load_gsm8k("train", data_dir=folder)


@pytest.mark.parametrize(("split", "repository"), [("test", "gsm8k"), ("platinum", "gsm8k-platinum")])
def test_a_folder_may_hold_the_repositories_of_the_hub(tmp_path, split, repository):
    write_parquet(tmp_path / repository / "main" / "test-00000-of-00001.parquet", ROWS)
    assert load_gsm8k(split, data_dir=tmp_path)["solution"][:] == ["18", "1400", "-5"]
    with pytest.raises(ValueError, match="There is no file"):
        load_gsm8k("platinum" if split == "test" else "test", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("split", "call"),
    [
        ("train", (("openai/gsm8k", "main"), {"split": "train"})),
        ("platinum", (("madrylab/gsm8k-platinum", "main"), {"split": "test"})),
    ],
)
def test_without_a_folder_the_data_come_from_the_hub(monkeypatch, split, call):
    calls = []
    monkeypatch.setattr(
        "trl_pods.data.gsm8k.load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or ROWS
    )
    assert load_gsm8k(split)["solution"][:] == ["18", "1400", "-5"]
    assert calls == [call]


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


# MATH


def math_row(solution, **fields):
    return {"problem": f"Find it. {solution[:3]}", "solution": solution, **fields}


def write_math(folder, first_subject, split="train"):
    """The rows of the first subject, and one in each of the others."""
    for subject in SUBJECTS:
        rows = first_subject if subject == SUBJECTS[0] else [math_row(r"So $\boxed{7}$.", level="Level 1", type="x")]
        write_parquet(folder / "hendrycks_math" / subject / f"{split}-00000-of-00001.parquet", rows)


@pytest.mark.parametrize(
    ("solution", "gold"),
    [
        (r"So $x = \boxed{\frac{1}{\sqrt{2}}}$ at last.", r"\frac{1}{\sqrt{2}}"),
        (r"First $\boxed{1}$, then $\boxed{\text{two } x^{2}}$.", r"\text{two } x^{2}"),
        (r"The set is $\boxed{\{1, 2\}}$.", r"\{1, 2\}"),
        (r"It lies in $\boxed{\left(-\infty, 3\right]}$.", r"\left(-\infty, 3\right]"),
        (r"So $\boxed {5}$.", "5"),
        (r"So $\boxed 9$.", "9"),
        (r"So $\boxed\frac12$ of it.", r"\frac12"),
        (r"So $\fbox{3}$.", "3"),
        ("So $\\boxed{\n\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}\n}$.", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ],
)
def test_the_gold_of_math_is_all_that_the_last_box_holds(tmp_path, solution, gold):
    write_math(tmp_path, [math_row(solution)])
    dataset = load_math("train", data_dir=tmp_path)
    assert dataset["solution"][:] == [gold, *["7"] * 6]
    assert dataset[0]["prompt"][0] == {"role": "system", "content": EXPRESSION_SYSTEM_PROMPT}
    assert dataset[0]["prompt"][1]["content"].startswith("Find it.")


@pytest.mark.parametrize("solution", ["So 3.", r"So $\boxed{}$.", r"First $\boxed{1}$, then $\boxed{2"])
def test_a_problem_without_a_gold_is_left_out_with_a_warning(tmp_path, caplog, solution):
    write_math(tmp_path, [math_row(r"$\boxed{5}$"), math_row(solution)], split="test")
    assert load_math("test", data_dir=tmp_path)["solution"][:] == ["5", *["7"] * 6]
    assert "1 problems without a gold answer are left out, the first is row 1" in caplog.text


def test_math_without_any_gold_is_refused(tmp_path):
    (tmp_path / "MATH-500").mkdir()
    (tmp_path / "MATH-500" / "test.jsonl").write_text(json.dumps(math_row("?", answer=" ")))
    with pytest.raises(ValueError, match="No row of MATH has a gold answer"):
        load_math("math_500", data_dir=tmp_path)
    with pytest.raises(ValueError, match="'dev'.*'train', 'test', 'math_500'"):
        load_math("dev", data_dir=tmp_path)
    with pytest.raises(ValueError, match=r"algebra/train-\*\.parquet"):
        load_math("train", data_dir=tmp_path)


def test_math_500_is_read_with_its_answers_and_each_equals_itself_alone(tmp_path):
    golds = [
        r"\left( 3, \frac{\pi}{2} \right)",
        "x^2 + 1",
        r"\text{even}",
        r"90^\circ",
        "11,\\! 111",
        r"\frac43",
        "1,-2",
    ]
    rows = [math_row(r"$\boxed{0}$", answer=gold, subject="Algebra", level=2, unique_id="a") for gold in golds]
    (tmp_path / "MATH-500").mkdir()
    (tmp_path / "MATH-500" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = load_math("math_500", data_dir=tmp_path, system_prompt=None)["solution"][:]
    assert read == golds
    completions = [f"<answer>\n{gold}\n</answer>" for gold in golds]
    assert math_accuracy_reward(completions, read) == [1.0] * 7
    assert math_accuracy_reward(completions[1:] + completions[:1], read) == [0.0] * 7


def test_math_comes_from_the_hub_subject_by_subject(monkeypatch):
    calls = []
    rows = [math_row(r"$\boxed{7}$", answer="8")]
    monkeypatch.setattr(
        "trl_pods.data.competition_math.load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or rows
    )
    assert load_math()["solution"][:] == ["7"] * 7
    assert load_math("math_500")["solution"][:] == ["8"]
    assert calls[:7] == [(("EleutherAI/hendrycks_math", subject), {"split": "train"}) for subject in SUBJECTS]
    assert calls[7:] == [(("HuggingFaceH4/MATH-500",), {"split": "test"})]


# SciKnowEval


def choice_row(index, **fields):
    return {
        "prompt": {"default": "Answer at once."},
        "question": f"Which molecule has {index} atoms?",
        "choices": {"text": [f"C{index}", f"O{index}", f"N{index}", "none"], "label": ["A", "B", "C", "D"]},
        "answerKey": "ABCD"[index % 4],
        "type": "mcq-4-choices",
        "domain": "Chemistry",
        "details": {"level": "L3", "task": "counting", "subtask": "atoms"},
        "answer": "",
        **fields,
    }


def write_sciknoweval(folder, rows):
    path = folder / "SciKnowEval" / "data" / "v2" / "sciknoweval_test_v2.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)))


def test_a_question_is_shown_with_its_options_and_the_gold_is_the_letter(tmp_path):
    write_sciknoweval(tmp_path, [choice_row(index) for index in range(50)])
    dataset = load_sciknoweval("train", data_dir=tmp_path)
    assert dataset.column_names == ["prompt", "solution"]
    row = next(row for row in dataset if "has 2 atoms" in row["prompt"][1]["content"])
    assert row == {
        "prompt": [
            {"role": "system", "content": CHOICE_SYSTEM_PROMPT},
            {"role": "user", "content": "Which molecule has 2 atoms?\n\nA. C2\nB. O2\nC. N2\nD. none"},
        ],
        "solution": "C",
    }
    answers = [f"<answer>\n{gold}\n</answer>" for gold in dataset["solution"]]
    assert set(multiple_choice_reward(answers, dataset["solution"][:])) == {1.0}


def test_the_two_splits_share_no_question_whatever_the_order_of_the_rows(tmp_path):
    rows = [choice_row(index) for index in range(500)]
    other_options = choice_row(3) | {"choices": {"text": ["He", "Ne"], "label": ["A", "B"]}, "answerKey": "B"}

    def questions(split):
        prompts = load_sciknoweval(split, data_dir=tmp_path, system_prompt=None)["prompt"]
        return [prompt[0]["content"].partition("\n")[0] for prompt in prompts]

    write_sciknoweval(tmp_path, [*rows, other_options])
    train, test = questions("train"), questions("test")
    assert len(train) + len(test) == 501
    assert not set(train) & set(test)
    assert 70 < len(test) < 130
    write_sciknoweval(tmp_path, [other_options, *reversed(rows)])
    assert (questions("train"), questions("test")) == (train, test)


def test_only_fit_multiple_choice_questions_of_the_domain_and_level_are_taken(tmp_path, caplog):
    taken = [index for index in range(40) if index not in (3, 4, 5, 6, 7)]
    rows = [choice_row(index) for index in taken] + [
        choice_row(3, domain="Physics"),
        choice_row(4, details={"level": "L1"}),
        choice_row(5, type="filling", choices={"text": [], "label": []}, answerKey=""),
        choice_row(6, choices={"text": ["C", "O", "N"], "label": ["A", "B", "C", "D"]}),
        choice_row(7, answerKey="E"),
    ]
    write_sciknoweval(tmp_path, rows)
    sizes = [len(load_sciknoweval(split, data_dir=tmp_path)) for split in ("train", "test")]
    assert sum(sizes) == 35
    assert "2 questions with unfit options are left out" in caplog.text


def test_sciknoweval_comes_from_one_pinned_file_of_the_hub(tmp_path, monkeypatch):
    write_sciknoweval(tmp_path, [choice_row(index) for index in range(50)])
    calls = []

    def hf_hub_download(repository, file, **options):
        calls.append((repository, options["repo_type"], len(options["revision"])))
        return str(tmp_path / "SciKnowEval" / file)

    monkeypatch.setattr("trl_pods.data.sciknoweval.hf_hub_download", hf_hub_download)
    assert len(load_sciknoweval("train")) + len(load_sciknoweval("test")) == 50
    assert calls == [("hicai-zju/SciKnowEval", "dataset", 40)] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": "dev"}, "no split 'dev'; choose one of 'train', 'test'"),
        ({"domain": "chemistry"}, "no domain 'chemistry'.*'Chemistry'"),
        ({"level": "3"}, "no level '3'.*'L3'"),
        ({"domain": "Physics"}, "no multiple-choice question in 'Physics' at 'L3'"),
    ],
)
def test_what_sciknoweval_does_not_have_is_refused_with_the_choices(tmp_path, settings, message):
    write_sciknoweval(tmp_path, [choice_row(1)])
    with pytest.raises(ValueError, match=message):
        load_sciknoweval(data_dir=tmp_path, **settings)


# Long prompts


def test_prompts_over_the_limit_are_left_out_with_a_warning(tmp_path, caplog):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "w5 {% for message in messages %}{{ message['content'] }} {% endfor %}w6"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "MATH-500").mkdir()
    rows = [{"problem": " ".join(["w7"] * words), "answer": str(words)} for words in (3, 5, 4)]
    (tmp_path / "MATH-500" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"data_dir": tmp_path, "system_prompt": None}
    # The template adds two tokens.
    kept = load_math("math_500", max_prompt_tokens=6, tokenizer=str(tmp_path / "tokenizer"), **options)
    assert kept["solution"][:] == ["3", "4"]
    assert "1 of 3 prompts are longer than 6 tokens and are left out" in caplog.text
    with pytest.raises(ValueError, match="max_prompt_tokens=4 leaves no problem"):
        load_math("math_500", max_prompt_tokens=4, tokenizer=str(tmp_path / "tokenizer"), **options)
    with pytest.raises(ValueError, match="max_prompt_tokens=6 needs a tokenizer"):
        load_math("math_500", max_prompt_tokens=6, **options)
