import json
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig import make_config, make_model, make_tokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_pods.data import load_gsm8k
from trl_pods.rewards import (
    PAPER_REWARDS,
    graded_format_reward,
    math_accuracy_reward,
    multiple_choice_reward,
    strict_format_reward,
    strict_tag_count_reward,
    tag_count_reward,
)


LAYOUT = "<think>\n6 boxes of 3\n</think>\n<answer>\n18\n</answer>"


def score(gold, completion):
    return math_accuracy_reward([completion], [gold])[0]


def score_tagged(gold, content):
    # The numbers in the think block must not matter.
    return score(gold, f"<think>\n3 or 18 or 5\n</think>\n<answer>\n{content}\n</answer>")


def as_message(text):
    return [{"role": "assistant", "content": text}]


# Which piece of the text is judged


@pytest.mark.parametrize(
    "completion",
    [
        "<answer>18</answer>",
        "<answer>17</answer> no, <answer>18</answer>",
        "<answer>18</answer> or <answer>17",
        "<answer>17 <answer>18</answer>",
        r"\boxed{17} <answer>18</answer> 19",
        r"<answer>17 and so \boxed{18}</answer>",
        r"\boxed{17} and then \boxed{18}, not 19",
        r"\boxed{18} and then \boxed{17",
        r"\boxed{\boxed{18}}",
        r"\boxed{\text{18}}",
        "18",
        "it is 18, ok.",
        "1. We add.\n2. The answer is **18**.",
        "9 * $2 = $18 a day",
        "#### 18",
        "$$\n18\n$$",
        "so $x = 18$.",
        "<answer>18",
    ],
)
def test_the_last_tag_else_the_last_box_else_the_last_number_is_the_answer(completion):
    assert score("18", completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "<answer>17</answer> so 18",
        "<answer></answer> 18",
        "<answer> \n </answer> 18",
        r"<answer>17</answer> \boxed{18}",
        r"<answer>\boxed{}</answer> \boxed{18}",
        r"<answer>18 and so \boxed{17}</answer>",
        r"\boxed{17} so 18",
        r"\boxed{} 18",
        "18 or rather 17",
        "eighteen",
        "",
        "H18O",
        "$x > 18$",
    ],
)
def test_a_wrong_or_empty_answer_scores_zero_even_if_the_right_number_stands_elsewhere(completion):
    assert score("18", completion) == 0.0


@pytest.mark.parametrize(
    ("gold", "completion", "reward"),
    [
        ("5", "she has 10-5", 1.0),
        ("-5", "she has 10-5", 0.0),
        ("-5", "she has 10 -5", 0.0),
        ("-5", "so it is -5", 1.0),
        ("-5", "x = - 5", 1.0),
        ("5", "- 5 apples", 1.0),
        ("2", "that is 1/2", 0.0),
        ("1/2", "that is 1/2", 1.0),
        ("5/2", "it takes 2 1/2 hours", 1.0),
        ("2", "that is x/2", 0.0),
        ("2", "that is x^2", 0.0),
        ("5", "an area of 5 m^2", 1.0),
        ("5", r"so $2\sqrt{5}$", 0.0),
        (r"2\sqrt{5}", r"so $2\sqrt{5}$.", 1.0),
        (r"2\sqrt{5}", r"so 2\sqrt{5} it is", 1.0),
        ("x^2+1", "we get $1+x^2$", 1.0),
        ("0.5", "it is 50 percent", 1.0),
        ("7", "$7 and $5 off the $12; what is left is $7", 1.0),
    ],
)
def test_the_last_number_is_taken_whole_and_with_its_sign(gold, completion, reward):
    assert score(gold, completion) == reward


# How the piece reads


@pytest.mark.parametrize(
    ("gold", "contents"),
    [
        (
            "18",
            ["18", "$18", r"\$18", "18 dollars", "18.", "18,", "18!", "The answer is 18.", "**18**", "(18)", "+18"],
        ),
        ("18", ["18.0", "018", "36/2", "9 * 2", "x = 18", "9 * 2 = 18", "9 eggs * $2 = $18", "It's 18.", "18 a day"]),
        ("18", [r"$18$", r"\(18\)", r"\[18\]", r"\boxed{18}", r"\text{18}", "$18 a day", "Answer: 18", "#### 18"]),
        (
            "18",
            ["18 km", r"18\text{ km}", r"18\,\mathrm{km}", "18 m^2", r"18\text{ cm}^2", "18 km/h", "18 m/s", "18kg"],
        ),
        (
            "18",
            ["18 sq. ft.", "18\u00b0C", r"18^\circ", "18th", "US$18", "Rs.18", "18 USD", "18\u20ac", "\u7b54\u684818"],
        ),
        ("1000", ["1,000", "1{,}000", r"1\,000", r"1,\!000", "1 000", "$1,000.00", "1\u202f000", "1e3", "1 thousand"]),
        ("1,000", ["1000", r"10^3", "1,000 km"]),
        ("-18", ["-18", "\u221218", "-$18", r"-\$18", "$-18", "- 18", "negative 18", "x = -18", "It is -18."]),
        ("50", ["50%", r"50\%", "50 percent", r"$50\%$"]),
        ("50%", ["50%", "50", "0.5", r"50\%"]),
        ("0.5", ["50%", ".5", "1/2", r"\frac{1}{2}", "50 percent"]),
        ("1/2", ["1/2", "0.5", r"\frac{1}{2}", r"\frac12", r"\dfrac{1}{2}", "\u00bd", "1/2 cup", "1:2"]),
        ("1/3", ["0.333333", r"\frac{2}{6}"]),
        ("2 1/2", ["2.5", "5/2", r"2\frac{1}{2}", "2\u00bd", "2 and 1/2"]),
        ("-2.5", ["-2 1/2", r"-\frac{5}{2}"]),
        ("5", ["x = 5", "10-5", "10 minus 5"]),
        ("x = 5", ["5", "x=5"]),
        (r"2\sqrt{5}", [r"2\sqrt{5}", r"\sqrt{20}", r"2\sqrt5", "2*sqrt(5)", "2\u221a5", r"2\sqrt{5}\text{ km}"]),
        (r"\frac{1}{2}", ["1/2", "0.5", r"\frac{2}{4}"]),
        (r"7.41\%", [r"7.41\%", "7.41%", "7.41"]),
        ("x^2+1", ["1+x^2", "x**2 + 1", "x\u00b2 + 1"]),
        (r"5\pi", ["5 pi", "5\u03c0 cm"]),
        (r"\frac{25\pi}{4}", [r"\frac{25\pi}{4}\text{ cm}^2"]),
        ("(3, 100)", ["(3,100)", r"\left(3, 100\right)"]),
        (r"(-\infty,3]", [r"\left(-\infty, 3\right]"]),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", [r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"]),
        ("3, 5", ["x = 3 or x = 5", "5 and 3"]),
        ("12_5", ["12_5", "12_{5}"]),
        ("(x+1)^{50}", ["(x + 1)^{50}"]),
        (r"\frac{1024}{59049}", [r"\left(\frac{2}{3}\right)^{10}"]),
    ],
)
def test_answers_are_read_as_a_person_would_read_them(gold, contents):
    assert {content: score_tagged(gold, content) for content in contents} == dict.fromkeys(contents, 1.0)


@pytest.mark.parametrize(
    ("gold", "contents"),
    [
        ("18", ["-18", "17", "1/18", "180", "1.8", "18,000", "18 million", "x > 18", "18x", "18^2", r"2\sqrt{18}"]),
        (
            "18",
            ["17 or 18", "17, 18", "18 and 17", "17 18", "18/0", "A", "eighteen", "x", r"\boxed{17} 18", "18\u201320"],
        ),
        ("2", ["1/2", r"\frac{1}{2}", "x/2", "2xy"]),
        ("50", ["0.5"]),
        ("50%", ["0.5%"]),
        ("-5", ["5", "10-5"]),
        ("5", ["-5", r"\sqrt{5}", "5x"]),
        ("1/3", ["0.33"]),
        ("0.0000001", ["0.0000002", "0"]),
        ("35", ["17 18"]),
        ("1234", ["12 34"]),
        ("3/2", ["2 1/2"]),
        ("2x+3", ["2x+3t"]),
        ("x = 5", ["y = 5"]),
        ("(3,4)", ["(4,3)"]),
        ("(3,100)", ["3100"]),
        ("12_5", ["12_6", "12"]),
        (r"2\sqrt{5}", ["5", "2", "4.47"]),
    ],
)
def test_what_a_person_would_not_take_for_the_answer_scores_zero(gold, contents):
    assert {content: score_tagged(gold, content) for content in contents} == dict.fromkeys(contents, 0.0)


@given(
    value=st.integers(min_value=-(10**12), max_value=10**12).filter(bool),
    grouping=st.sampled_from(["", ",", "{,}", r"\,", r",\!"]),
    currency=st.sampled_from(["", "$", r"\$", "\u20ac"]),
    unit=st.sampled_from(["", " km", r"\text{ km}", " dollars", " m^2", " per day", "."]),
    prefix=st.sampled_from(["", "The answer is ", "x = ", "Answer: ", "So it's "]),
)
@settings(deadline=None)
def test_any_integer_equals_itself_and_not_its_negative_however_it_is_written(value, grouping, currency, unit, prefix):
    digits = f"{abs(value):,}".replace(",", grouping)
    written = f"{prefix}{'-' if value < 0 else ''}{currency}{digits}{unit}"
    assert score_tagged(str(value), written) == 1.0
    assert score_tagged(str(-value), written) == 0.0
    assert score(str(value), written) == 1.0
    assert score(str(value + 1), written) == 0.0


@given(
    top=st.integers(min_value=-999, max_value=999),
    bottom=st.integers(min_value=1, max_value=99),
    scale=st.integers(1, 9),
)
@settings(deadline=None)
def test_any_fraction_equals_its_multiples(top, bottom, scale):
    gold = f"{top}/{bottom}"
    assert score_tagged(gold, rf"\frac{{{top * scale}}}{{{bottom * scale}}}") == 1.0
    assert score_tagged(gold, f"{top * scale}/{bottom * scale}") == 1.0
    assert score_tagged(gold, f"{top + 1}/{bottom}") == 0.0


# The reward function as the trainer calls it


@pytest.mark.parametrize(
    ("gold", "content", "expected"),
    [
        (r"\text{Paris}", "Paris", 1.0),
        (r"\text{Paris}", r"$\text{paris}$.", 1.0),
        (r"\text{Paris}", r"\boxed{\textbf{Paris}}", 1.0),
        (r"\text{(B)}", "B", 1.0),
        (r"\text{(B)}", "(C)", 0.0),
        (r"\text{Paris}", "18", 0.0),
        (r"\text{Paris}", "", 0.0),
    ],
)
def test_a_gold_set_as_text_is_compared_as_it_stands(gold, content, expected):
    assert score_tagged(gold, content) == expected


@pytest.mark.parametrize("gold", ["Paris", "", "  ", "A", "(A)", "N/A", None, r"\text{}", r"\frac{1}{"])
def test_an_unreadable_gold_makes_the_completion_unscorable(gold):
    assert score_tagged(gold, "18") is None


@pytest.mark.parametrize(
    "completion",
    [
        LAYOUT,
        as_message(LAYOUT),
        as_message([{"type": "text", "text": "<answer>1"}, {"type": "image"}, {"type": "text", "text": "8</answer>"}]),
        [*as_message("17"), {"role": "tool", "content": "17"}, *as_message("18"), {"role": "tool", "content": "17"}],
        [{"content": "18"}],
    ],
)
def test_every_shape_of_completion_is_read(completion):
    assert score("18", completion) == 1.0


@pytest.mark.parametrize("completion", ["", [], as_message(None), as_message("")])
def test_a_completion_without_text_scores_zero_everywhere(completion):
    assert score("18", completion) == 0.0
    formatting = (graded_format_reward, tag_count_reward, strict_format_reward, strict_tag_count_reward)
    assert [reward([completion]) for reward in formatting] == [[0.0]] * 4


def test_a_gold_for_each_completion_is_required():
    with pytest.raises(ValueError, match="zip"):
        math_accuracy_reward(["18", "18"], ["18"])


def test_the_extracted_answer_of_every_completion_is_logged():
    columns = {}
    completions = ["<answer>$18.</answer>", r"\boxed{17}", "none", "is -5"]
    rewards = math_accuracy_reward(
        completions, ["18", "18", "18", "Paris"], log_extra=columns.__setitem__, prompts=[], completion_ids=[]
    )
    assert rewards == [1.0, 0.0, 0.0, None]
    assert columns == {"extracted_answer": ["$18.", "17", "", "-5"], "solution": ["18", "18", "18", "Paris"]}


HARD_TO_READ = [
    r"\boxed{x^2+1}",
    r"\boxed{\sqrt{20}}",
    r"\boxed{\frac{}{}}",
    r"\boxed{}{}",
    r"\boxed{1/0}",
    r"\boxed{(((1}",
    r"\boxed{\begin{pmatrix}1\\2}",
    r"\boxed{2^{2^{2^{2^{2^{2}}}}}}",
    r"\boxed{9**9**9**9}",
    r"\boxed{(x+1)^{5000}}",
    r"\boxed{(x+y+z)^{99}}",
    r"\boxed{\int_0^1 \sin(x^2)e^x dx}",
    r"\boxed{99999999!}",
    r"\boxed{((9!)!)!}",
    "<answer>" + "9" * 6000 + "</answer>",
    "<answer>" + "(" * 2000 + "</answer>",
    "\\boxed{" * 3000,
    "1." * 20000,
    "\x00\ud800 \u0663",
]


@pytest.mark.parametrize("gold", ["1+x^2", r"2\sqrt{5}", "18"])
def test_odd_text_scores_zero_soon_and_alike_in_a_worker_thread(gold):
    start = time.monotonic()
    here, there = math_accuracy_reward(HARD_TO_READ, [gold] * len(HARD_TO_READ)), []
    worker = threading.Thread(
        target=lambda: there.extend(math_accuracy_reward(HARD_TO_READ, [gold] * len(HARD_TO_READ))), daemon=True
    )
    worker.start()
    worker.join(timeout=20)
    right = {"1+x^2": [0], r"2\sqrt{5}": [1], "18": []}[gold]
    assert here == [float(i in right) for i in range(len(HARD_TO_READ))]
    assert there == here
    assert time.monotonic() - start < 10


@pytest.mark.filterwarnings("error")
def test_each_gold_and_answer_is_judged_once_per_call(monkeypatch):
    from trl_pods.rewards import accuracy

    seen = []
    monkeypatch.setattr(
        accuracy, "read_answer", lambda piece, read=accuracy.read_answer: seen.append(piece) or read(piece)
    )
    completions = [r"\boxed{x+1}", r"\boxed{1+x}", r"\boxed{x+1}"] * 3
    assert math_accuracy_reward(completions, ["1+x+0"] * 9) == [1.0] * 9
    assert seen == ["1+x+0", "x+1", "1+x"]


def test_importing_the_rewards_loads_no_heavy_library():
    heavy = "{'math_verify', 'sympy', 'torch', 'transformers', 'trl', 'datasets'}"
    code = f"import sys; from trl_pods.rewards import math_accuracy_reward; print({heavy} & set(sys.modules))"
    # The plain path must not load them either.
    code += f"; math_accuracy_reward(['<answer>18 km</answer>'], ['18']); print({heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["set()", "set()"]


# Layout


@pytest.mark.parametrize(
    ("completion", "graded", "tags", "strict", "strict_tags"),
    [
        (LAYOUT, 1.0, 1.0, 1.0, 1.0),
        # 7 characters follow: the graded reward loses 0.07, the strict one asks only for the line to end.
        (LAYOUT + "\nDone. ", 0.93, 1.0, 1.0, 1.0),
        (LAYOUT + " Done.", 0.94, 1.0, 0.0, 1.0),
        ("Hello " + LAYOUT, 0.94, 1.0, 0.0, 1.0),
        (LAYOUT + "." * 100, 0.0, 1.0, 0.0, 1.0),
        (LAYOUT + "." * 150, 0.0, 1.0, 0.0, 1.0),
        ("<think>6 * 3</think><answer>18</answer>", 1.0, 1.0, 0.0, 0.0),
        ("<think>6 * 3</think> <answer>18</answer>", 1.0, 1.0, 0.0, 0.0),
        # Only the closing answer tag has its newline.
        ("<think>6 * 3</think>\n<answer>18\n</answer>", 1.0, 1.0, 0.0, 0.25),
        # A blank line between the blocks.
        (LAYOUT.replace("\n<answer>", "\n\n<answer>"), 0.0, 1.0, 0.0, 1.0),
        # Answer first.
        ("<answer>\n18\n</answer>\n<think>\n6 * 3\n</think>", 0.0, 1.0, 0.0, 0.5),
        # Blocks repeated: all between the first and the last tag is free, but no tag occurs once.
        (LAYOUT + "\n" + LAYOUT, 1.0, 0.0, 1.0, 0.0),
        ("<answer>18</answer>", 0.0, 0.5, 0.0, 0.0),
        ("<think><think>6", 0.0, 0.0, 0.0, 0.0),
        ("18", 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_layout_rewards_follow_the_published_rules(completion, graded, tags, strict, strict_tags):
    assert graded_format_reward([completion]) == pytest.approx([graded])
    assert tag_count_reward([completion]) == [tags]
    assert strict_format_reward([completion]) == [strict]
    assert strict_tag_count_reward([completion]) == [strict_tags]
    assert strict_tag_count_reward([as_message(completion)], prompts=["?"]) == [strict_tags]


@pytest.mark.parametrize(("name", "total", "without_layout"), [("single_gpu", 1.2, 1.0), ("multi_gpu", 3.0, 1.0)])
def test_both_published_weightings_add_up(name, total, without_layout):
    recipe = PAPER_REWARDS[name]

    def reward(completion):
        values = [function(completions=[completion], solution=["18"])[0] for function in recipe.reward_funcs]
        return sum(weight * value for weight, value in zip(recipe.reward_weights, values, strict=True))

    assert reward(LAYOUT) == pytest.approx(total)
    assert reward("18") == pytest.approx(without_layout)


@pytest.mark.parametrize("name", ["single_gpu", "multi_gpu"])
def test_stock_grpo_trains_on_gsm8k_with_the_rewards_of_the_paper(name, tmp_path):
    rows = [{"question": f"w{5 + i} w6", "answer": f"w7\n#### {i}"} for i in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    recipe = PAPER_REWARDS[name]
    trainer = GRPOTrainer(
        model=make_model(),
        reward_funcs=list(recipe.reward_funcs),
        args=make_config(
            tmp_path,
            GRPOConfig,
            num_generations=4,
            per_device_train_batch_size=4,
            reward_weights=list(recipe.reward_weights),
        ),
        train_dataset=load_gsm8k("train", data_dir=tmp_path),
        processing_class=tokenizer,
    )
    trainer.train()
    logged = {key for logs in trainer.state.log_history for key in logs}
    assert {f"rewards/{function.__name__}/mean" for function in recipe.reward_funcs} <= logged


# Multiple choice


@pytest.mark.parametrize(
    "completion",
    [
        "<think>\nA or C?\n</think>\n<answer>\nB\n</answer>",
        "<answer>A</answer> no, <answer>b</answer>",
        "<answer>(B)</answer>",
        "<answer>**B.**</answer>",
        "<answer>B. A salt of C</answer>",
        "<answer>B) CCO</answer>",
        "<answer>The answer is B</answer>",
        "<answer>Option B: water</answer>",
        r"<answer>$\boxed{\text{B}}$</answer>",
        r"so \boxed{B}, not C",
        "Option A is wrong. The answer is (B).",
        "Answer: **B**",
        "A: no\nB: yes\n\nB",
    ],
)
def test_the_letter_that_a_completion_settles_on_is_matched(completion):
    assert multiple_choice_reward([completion], ["B"]) == [1.0]
    assert multiple_choice_reward([as_message(completion)], ["B"]) == [1.0]
    assert multiple_choice_reward([completion], ["C"]) == [0.0]


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "<answer></answer> B",
        "<answer>A or B</answer>",
        "<answer>B, C</answer>",
        "<answer>answer A, or answer B</answer>",
        "<answer>BC</answer>",
        "<answer>water</answer>",
        "<answer>A bond of B</answer>",
        "the answer is a bond",
        "The answer is A bond.",
        "B is a salt and A is not",
        "<answer>C</answer> The answer is B",
    ],
)
def test_where_no_letter_or_another_is_given_the_choice_is_wrong(completion):
    assert multiple_choice_reward([completion], ["B"]) == [0.0]
    assert multiple_choice_reward([completion], ["A"]) == [0.0]


def test_the_choices_that_were_read_are_logged_and_a_gold_that_is_no_letter_is_not_scored():
    columns = {}
    rewards = multiple_choice_reward(
        ["<answer>b</answer>", "?", "A"], ["B", "B", "water"], log_extra=columns.__setitem__, prompts=[]
    )
    assert rewards == [1.0, 0.0, None]
    assert columns == {"extracted_answer": ["B", "", "A"], "solution": ["B", "B", "water"]}
