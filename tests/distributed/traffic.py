"""
What a process receives from the others in a step, by formula. `python traffic.py` prints the table of the recipes.

The formulas are checked against two and four real processes in test_traffic.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """A step of `prompts` in all, n rollouts of each, m of them kept; tokens are means."""

    processes: int
    prompts: int
    n: int
    m: int
    completion_tokens: float
    prompt_tokens: float = 0
    reward_funcs: int = 1
    text_bytes: float = 4  # of a token
    id_bytes: float = 5  # of a token's number, pickled: 2 below 256, 3 below 65,536

    @property
    def rollouts(self) -> int:
        return self.prompts * self.n

    @property
    def kept(self) -> int:
        return self.prompts * self.m

    @property
    def others(self) -> float:
        """Share of all rows that lie on other processes."""
        return 1 - 1 / self.processes


# Of TRL


def lengths_and_rewards(load: Load) -> float:
    """Two lengths and an end of every rollout (8 + 8 + 1 bytes), and a float32 by reward function."""
    return (17 + 4 * load.reward_funcs) * load.rollouts * load.others


def texts_of_kept(load: Load) -> float:
    """Gathered for the completions table whether or not it is printed; a group's prompt is pickled once."""
    completions = load.kept * load.completion_tokens
    return (completions + load.prompts * load.prompt_tokens) * load.text_bytes * load.others


def from_vllm_server(load: Load) -> float:
    """All rollouts to all processes: the number of a token twice, its log-prob, and 11 bytes of lists around them."""
    return load.rollouts * load.completion_tokens * (2 * load.id_bytes + 9 + 5)


# Of PODS


def lengths(load: Load) -> float:
    return 16 * load.rollouts * load.others


def indices(load: Load) -> float:
    return 8 * load.kept


def row(load: Load) -> float:
    """A rollout that moves: numbers, log-probs and text of the completion; the prompt as numbers and twice as text."""
    completion = load.completion_tokens * (load.id_bytes + 9 + load.text_bytes)
    return completion + load.prompt_tokens * (load.id_bytes + 2 * load.text_bytes)


def moved_rows(load: Load, rows: float | None = None) -> float:
    """At most all rows that a process trains on; none if every process holds whole groups."""
    return row(load) * (load.kept / load.processes if rows is None else rows)


def texts_of_all(load: Load) -> float:
    """With `log_completions`: what `texts_of_kept` says, of every rollout."""
    completions = load.rollouts * load.completion_tokens
    return (completions + load.prompts * load.prompt_tokens) * load.text_bytes * load.others


COLUMNS = {
    "TRL: lengths and rewards": lengths_and_rewards,
    "TRL: texts of the kept": texts_of_kept,
    "PODS: lengths": lengths,
    "PODS: indices": indices,
    "PODS: moved rows, at most": moved_rows,
    "PODS: texts of all, with `log_completions`": texts_of_all,
    "TRL: all rollouts, from a vLLM server": from_vllm_server,
}


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def main() -> None:
    loads = [Load(p, p, n=64, m=16, completion_tokens=1000, prompt_tokens=200) for p in (8, 64, 512)]
    print("| received by a process in a step |", " | ".join(f"{load.processes} GPUs" for load in loads), "|")
    print("| --- |", " | ".join("---" for _ in loads), "|")
    for title, formula in COLUMNS.items():
        print(f"| {title} |", " | ".join(_size(formula(load)) for load in loads), "|")


if __name__ == "__main__":
    main()
