"""
A step of PODS against what it can cost at best, generation and rewards of n rollouts and an update of m, both as
GRPOTrainer does them.
"""

import time

import pytest
import torch
from stepping import MODELS, Arm, median_ratio, step_in_turn
from trl import GRPOConfig, GRPOTrainer

from trl_pods import PODSGRPOConfig, PODSGRPOTrainer
from trl_pods.selectors import max_variance


pytestmark = pytest.mark.benchmark

SIZES = [(32, 8), (64, 16)]


@pytest.fixture(autouse=True)
def one_core():
    # All is done by one thread, so the time of the processor is measured, which what else runs does not change.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class SelectsAfterwards(GRPOTrainer):
    """The same rule and update, on what TRL's method returns: all n rollouts have gone through the models then."""

    num_kept: int

    def _calculate_rewards(self, *args):
        self.rewards = super()._calculate_rewards(*args)
        return self.rewards

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        rewards = self.rewards.view(-1, self.num_generations)
        chosen = max_variance(rewards.double(), self.num_kept).sort(dim=1).values
        kept = (chosen + self.num_generations * torch.arange(len(chosen))[:, None]).flatten()
        output = {name: value[kept] if value.ndim else value for name, value in output.items()}
        of_kept = rewards.gather(1, chosen)
        output["advantages"] = ((of_kept - of_kept.mean(1, True)) / (of_kept.std(1, keepdim=True) + 1e-4)).flatten()
        output["num_items_in_batch"] = output["completion_mask"].sum()
        return output


def rewards_to_keep(step, n, m):
    """The rewards that the rule keeps of each prompt's, in float32 as TRL has them."""
    rewards = torch.tensor(step["rewards"]).view(-1, n)
    return sorted(rewards.gather(1, max_variance(rewards.double(), m)).flatten().tolist())


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize(("model", "tokens"), MODELS)
def test_a_step_against_the_least_it_can_cost(tmp_path, model, tokens, n, m, report):
    num_prompts, passes = (1, 5) if model.startswith("SmolLM2") else (2, 21)  # some minutes each

    def make(name, trainer_class, config_class, rows, accumulation=1, **settings):
        return Arm(
            trainer_class,
            config_class,
            model,
            tmp_path / name,
            tokens,
            num_prompts,
            time.process_time,
            use_cpu=True,
            per_device_train_batch_size=rows * num_prompts,
            gradient_accumulation_steps=accumulation,
            **settings,
        )

    class Afterwards(SelectsAfterwards):
        num_kept = m

    pods = {"num_rollouts": n, "num_generations": m}
    arms = {
        "pods": make("pods", PODSGRPOTrainer, PODSGRPOConfig, m, **pods),
        "grpo m": make("m", GRPOTrainer, GRPOConfig, m, num_generations=m),
        "grpo n": make("n", GRPOTrainer, GRPOConfig, m, accumulation=n // m, num_generations=n),
        "pods, beta": make("pods-beta", PODSGRPOTrainer, PODSGRPOConfig, m, **pods, beta=0.04),
        "afterwards, beta": make("after", Afterwards, GRPOConfig, n, num_generations=n, beta=0.04),
    }
    step_in_turn(arms, passes)

    rows = {name: {(s["generated"], s["trained"]) for s in arm.steps} for name, arm in arms.items()}
    n_rows, m_rows = n * num_prompts, m * num_prompts
    assert rows == {
        "pods": {(n_rows, m_rows)},
        "grpo m": {(m_rows, m_rows)},
        "grpo n": {(n_rows, n_rows)},
        "pods, beta": {(n_rows, m_rows)},
        "afterwards, beta": {(n_rows, m_rows)},
    }
    for name in ("pods", "pods, beta", "afterwards, beta"):
        for step in arms[name].steps:
            assert sorted(torch.tensor(step["kept_rewards"]).tolist()) == rewards_to_keep(step, n, m), name

    seconds = {name: [step["step"] for step in arm.steps] for name, arm in arms.items()}
    least = [
        of_n["rollouts"] + of_m["step"] - of_m["rollouts"]
        for of_n, of_m in zip(arms["grpo n"].steps, arms["grpo m"].steps, strict=True)
    ]
    size = f"{model}, n = {n}, m = {m}, one core"
    report(f"step, {size}", f"{median_ratio(seconds['pods'], least):.3f} times generate n + score n + update m")
    report("  of GRPOTrainer on all n", f"{median_ratio(seconds['grpo n'], seconds['pods']):.2f} times that of PODS")
    later = median_ratio(seconds["afterwards, beta"], seconds["pods, beta"])
    report("  of selecting after TRL's method, beta > 0", f"{later:.2f} times that of PODS")
