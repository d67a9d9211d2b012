"""Completions with answers such as those of MATH."""

import random


def make_texts(seed, num_prompts=16, num_rollouts=64):
    """
    Completions, golds and whether each completion has the very answer of its gold.

    All texts are distinct, of the final answers of a prompt a third.
    """
    draw = random.Random(seed)
    completions, golds, is_gold = [], [], []
    for _ in range(num_prompts):
        gold = _answer(draw)
        answers = [gold, *(_answer(draw) for _ in range(num_rollouts // 3 - 1))]
        # Each answer once, the others as they come, the right one most often.
        answers += draw.choices(answers, [len(answers), *[1] * (len(answers) - 1)], k=num_rollouts - len(answers))
        for answer in answers:
            text = f"{_reasoning(draw)}The final answer is $\\boxed{{{answer}}}$."
            completions.append([{"role": "assistant", "content": text}])
            golds.append(f"${gold}$")
            is_gold.append(answer == gold)
    return completions, golds, is_gold


def _answer(draw):
    a, b, c = draw.randint(1, 99), draw.randint(2, 99), draw.randint(2, 30)
    return draw.choice(
        [
            *[str(a * c)] * 6,
            *[rf"\frac{{{a}}}{{{b}}}"] * 3,
            rf"{a}.{b}",
            rf"{a}\%",
            rf"{a}^\circ",
            rf"{c}\sqrt{{{b}}}",
            rf"\sqrt{{{a}}} + \sqrt{{{b}}}",
            rf"\frac{{{a}\pi}}{{{b}}}",
            rf"{a} + {b}i",
            rf"x^2 + {a}x - {b}",
            rf"y = {a}x + {b}",
            rf"\left({a}, {c}\right)",
            rf"[{-c}, {a}]",
            rf"(-\infty, {a}) \cup ({a + b}, \infty)",
            rf"{a}, {b}, {c}",
            rf"\begin{{pmatrix}} {a} \\ {b} \end{{pmatrix}}",
        ]
    )


def _reasoning(draw):
    words = ["we", "know", "that", "the", "sum", "of", "both", "sides", "is", "so", "let", "us", "expand", "this"]
    sentences = []
    for _ in range(12):
        sentence = " ".join(draw.choices(words, k=draw.randint(6, 14))).capitalize()
        a, b = draw.randint(1, 99), draw.randint(2, 9)
        sentences.append(sentence + draw.choice([". ", f" ${a}x + {b} = 0$. ", rf" \[ y = \frac{{{a}}}{{{b}}} \] "]))
    return "".join(sentences)
