import copy
import math
import pickle
import signal
from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from .selectors import resolve_selector, selector_name
from .training_clock import check_minutes


@dataclass
class PODSGRPOConfig(GRPOConfig):
    r"""
    Configuration of [`PODSGRPOTrainer`]: that of [`~trl.GRPOTrainer`] and the few settings of PODS.

    `num_generations` (m in the paper) stays what it is in GRPO, the completions per prompt that are trained on, and
    `per_device_train_batch_size` counts these. So the batch size, the number of steps, the learning rate and the
    memory of the update of a GRPO recipe keep their meaning, and PODS is one added line: `num_rollouts=64`.

    Args:
        num_rollouts (`int`, *optional*):
            Completions to generate and score per prompt in training (n in the paper), of which `num_generations` are
            kept and trained on. At least `num_generations`. `None`, or a value equal to `num_generations`, is plain
            GRPO. Evaluation is never down-sampled: it generates `num_generations_eval` (default: `num_generations`)
            completions per prompt.
        selector (`str` or `Callable`, *optional*, defaults to `"max_variance"`):
            The down-sampling rule: `"max_variance"`, `"max_reward"`, `"random"`, `"percentile"`, `"shortest"`,
            `"token_efficiency"`, the dotted import path of a function, or (in Python) a callable. See
            [`trl_pods.selectors`] for the signature.
        selector_kwargs (`dict[str, Any]` or `str`, *optional*):
            Further keywords for the rule. On the command line a JSON string.
        selection_reward_funcs (`list[str]`, *optional*):
            Names of the reward functions whose weighted sum the rule looks at, as they stand in the logs under
            `rewards/`. `None` is all. Training goes on with all of them, but a group in which those named are all
            equal has no signal: its advantages are 0. So shaping rewards cannot decide alone. A function whose weight
            is 0 is logged, but the rule does not look at it; one of those named must have another weight.
        min_reward_std (`float`, *optional*, defaults to `0.0`):
            A group has no signal, and its advantages are 0, if the standard deviation (with n - 1) of what the rule
            looks at is not above this, over its eligible rollouts. Without it a spread of 0.01 that comes of shaping
            gives an update of full size, since advantages are divided by it. 0 leaves every group as it is.
        rollout_chunk_size (`int`, *optional*):
            Rows of a process that transformers generates for, and that a reward model scores, in one call. `None` is
            all rows of a round, n / m times as many as in GRPO, for which memory may not suffice where it does for m.
            Rewards, and completions without sampling, are the same in chunks; with sampling the completions are other
            draws from the same policy. vLLM and continuous batching schedule their requests themselves.
        reward_timeout (`float`, *optional*):
            Seconds that all reward functions of a round, or of a step of evaluation, may take together on a process.
            After that they are interrupted and every process ends with an error; a process that cannot be interrupted
            is killed 10 seconds later. Threads that they leave behind get as long once more when the process exits.
            `None` is no limit.
        advantage_statistics (`str`, *optional*, defaults to `"kept"`):
            Rollouts over which the mean and the standard deviation of the rewards are taken when advantages are
            normalised: `"kept"`, the `num_generations` trained on (section A.3 of the paper), or `"all"`, the
            `num_rollouts` generated (its ablation).
        max_train_minutes (`float`, *optional*):
            Minutes of training after which it stops, with the end of a step; evaluation and saving are not counted,
            and a resumed run goes on counting. The steps of the learning-rate schedule stay those of `max_steps` or
            `num_train_epochs`, whichever ends first ends the training. `None` is no limit.
        eval_minutes (`float`, *optional*):
            Evaluate after the first step past each multiple of so many minutes of training, and at the end if
            `max_train_minutes` ends it, besides what `eval_strategy` asks for. `None` leaves it to that.

    Raises:
        ValueError: If a setting is wrong; the message names the setting, its value and one that works.
        NotImplementedError: If `advantage_statistics="all"` meets `multi_objective_aggregation="normalize_then_sum"`,
            or `reward_timeout` a system without POSIX signals.

    Example:

    ```python
    >>> config = PODSGRPOConfig(num_generations=8, num_rollouts=32, use_cpu=True, bf16=False)
    >>> config.num_rollouts, config.selector, config.per_device_train_batch_size
    (32, 'max_variance', 8)

    ```
    """

    _VALID_DICT_FIELDS = GRPOConfig._VALID_DICT_FIELDS + ["selector_kwargs"]

    num_rollouts: int | None = field(
        default=None,
        metadata={
            "help": "Completions to generate and score per prompt in training (n), of which `num_generations` (m) are "
            "kept and trained on. `None` or a value equal to `num_generations` is plain GRPO."
        },
    )
    # A callable is accepted too; the annotation is what the command line can give.
    selector: str = field(
        default="max_variance",
        metadata={
            "help": "Down-sampling rule: `max_variance`, `max_reward`, `random`, `percentile`, `shortest`, "
            "`token_efficiency`, or the dotted import path of a function."
        },
    )
    selector_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further keywords for the rule, as JSON."}
    )
    selection_reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Names of the reward functions whose weighted sum the rule looks at. `None` is all. A group in "
            "which that sum is the same for all rollouts has no signal: its advantages are 0."
        },
    )
    min_reward_std: float = field(
        default=0.0,
        metadata={
            "help": "A group has no signal, and its advantages are 0, if the standard deviation of what the rule "
            "looks at is not above this. 0 leaves every group as it is."
        },
    )
    rollout_chunk_size: int | None = field(
        default=None,
        metadata={
            "help": "Rows of a process that transformers generates for, and that a reward model scores, in one call. "
            "`None` is all rows of a round."
        },
    )
    reward_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds that all reward functions of a round may take together on a process before every process "
            "ends with an error. `None` is no limit."
        },
    )
    advantage_statistics: str = field(
        default="kept",
        metadata={
            "help": "Rollouts over which rewards are normalised: `kept` (the `num_generations` trained on) or `all` "
            "(the `num_rollouts` generated)."
        },
    )
    max_train_minutes: float | None = field(
        default=None,
        metadata={
            "help": "Minutes of training after which it stops; evaluation and saving are not counted, and a resumed "
            "run goes on counting. `None` is no limit."
        },
    )
    eval_minutes: float | None = field(
        default=None,
        metadata={
            "help": "Evaluate after the first step past each multiple of so many minutes of training, besides what "
            "`eval_strategy` asks for."
        },
    )

    def __post_init__(self) -> None:
        self._check_group_sizes()
        sets_round_size = self.generation_batch_size is not None  # TRL fills it in
        try:
            super().__post_init__()
        except ValueError as error:
            self._explain_partial_groups(error, sets_round_size)
            raise
        self._check_even_shares(sets_round_size)
        self._check_selector()
        self._check_signal()
        self._check_chunk_size()
        self._check_reward_timeout()
        self._check_advantage_statistics()
        check_minutes(self.max_train_minutes, self.eval_minutes)
        self._check_evaluation_batch()

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, as in [`~transformers.TrainingArguments`]; a callable rule by its name."""
        return {**super().to_dict(), "selector": selector_name(self.selector)}

    def __getstate__(self) -> dict[str, Any]:
        # The trainer pickles its arguments beside every checkpoint; a lambda must not make saving fail hours later.
        state = self.__dict__.copy()
        try:
            pickle.dumps(self.selector)
        except (pickle.PicklingError, AttributeError, TypeError):
            state["selector"] = selector_name(self.selector)
        return state

    def __copy__(self) -> "PODSGRPOConfig":
        return self._duplicate(self.__dict__.copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> "PODSGRPOConfig":
        return self._duplicate(copy.deepcopy(self.__dict__, memo))

    def _duplicate(self, state: dict[str, Any]) -> "PODSGRPOConfig":
        # By default a copy is made from what is pickled, and a lambda would be lost.
        duplicate = object.__new__(type(self))
        duplicate.__dict__.update(state)
        return duplicate

    def _check_group_sizes(self) -> None:
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations={self.num_generations} is too few: an advantage compares at least 2 kept rollouts "
                "of a prompt. Use num_generations=2 or more."
            )
        if self.num_rollouts is not None and self.num_rollouts < self.num_generations:
            raise ValueError(
                f"num_rollouts={self.num_rollouts} is less than num_generations={self.num_generations}, the rollouts "
                f"kept of them. Use num_rollouts={self.num_generations} (plain GRPO) or more, for instance "
                f"{4 * self.num_generations}, or a smaller num_generations."
            )

    def _explain_partial_groups(self, error: ValueError, sets_round_size: bool) -> None:
        """Replace TRL's message for a round that holds no whole number of groups by one that says what works."""
        kept_rows = self.generation_batch_size
        if not kept_rows or self.steps_per_generation is None or kept_rows % self.num_generations == 0:
            return
        raise ValueError(
            f"The {kept_rows} rollouts kept in a round (per_device_train_batch_size={self.per_device_train_batch_size}"
            f" x {self.world_size} processes x steps_per_generation={self.steps_per_generation}) are not a multiple "
            f"of num_generations={self.num_generations}. Use {self._fitting_size(sets_round_size)}, or a "
            f"num_generations that divides {kept_rows}."
        ) from error

    def _check_even_shares(self, sets_round_size: bool) -> None:
        """Every process must generate equally many rollouts, also where a group spans several processes."""
        if self.num_rollouts is None:
            return
        kept_rows = self.per_device_train_batch_size * self.steps_per_generation
        if kept_rows * self.num_rollouts % self.num_generations == 0:
            return
        unit = self.num_generations // math.gcd(self.num_generations, kept_rows)
        raise ValueError(
            f"num_rollouts={self.num_rollouts} cannot be shared evenly by {self.world_size} processes that each train "
            f"on {kept_rows} rollouts a round (per_device_train_batch_size={self.per_device_train_batch_size} x "
            f"steps_per_generation={self.steps_per_generation}) with num_generations={self.num_generations}. Use "
            f"num_rollouts={_next_multiple(self.num_rollouts, unit)}, or {self._fitting_size(sets_round_size)}."
        )

    def _fitting_size(self, sets_round_size: bool) -> str:
        """The next size with which a round holds whole groups and every process an equal share of their rollouts."""
        m, num_rollouts = self.num_generations, self.num_rollouts or self.num_generations
        # Kept rows of a process come in multiples of the first, those of all processes of the second.
        of_process = m // math.gcd(m, num_rollouts)
        of_all = math.lcm(m, of_process * self.world_size)
        per_micro_step = self.per_device_train_batch_size * self.world_size
        if sets_round_size:
            size = _next_multiple(self.generation_batch_size, math.lcm(of_all, per_micro_step))
            return f"generation_batch_size={size}"
        factor = self.world_size * self.steps_per_generation
        batch_size = _next_multiple(self.per_device_train_batch_size, of_all // math.gcd(of_all, factor))
        return f"per_device_train_batch_size={batch_size}"

    def _check_selector(self) -> None:
        if self.selector_kwargs is not None and not isinstance(self.selector_kwargs, dict):
            raise ValueError(
                f"selector_kwargs={self.selector_kwargs!r} is not a mapping. Use keywords and values, for instance "
                '{"my_keyword": 1}.'
            )
        resolve_selector(self.selector, self.selector_kwargs)

    def _check_signal(self) -> None:
        if isinstance(self.selection_reward_funcs, str):  # `selection_reward_funcs: name` in YAML
            self.selection_reward_funcs = [self.selection_reward_funcs]
        if self.selection_reward_funcs is not None and not self.selection_reward_funcs:
            raise ValueError(
                "selection_reward_funcs=[] leaves the rule nothing to look at. Name reward functions, or use None for "
                "all of them."
            )
        if not 0 <= self.min_reward_std < math.inf:
            raise ValueError(
                f"min_reward_std={self.min_reward_std} is not a spread of rewards. Use 0 for none, or for instance "
                "0.05."
            )

    def _check_chunk_size(self) -> None:
        if self.rollout_chunk_size is not None and self.rollout_chunk_size < 1:
            raise ValueError(
                f"rollout_chunk_size={self.rollout_chunk_size} is no number of rows. Use None for all of a round, or "
                f"for instance {self.per_device_train_batch_size}."
            )

    def _check_reward_timeout(self) -> None:
        if self.reward_timeout is None:
            return
        if not 0 < self.reward_timeout < math.inf:
            raise ValueError(
                f"reward_timeout={self.reward_timeout} is no time that reward functions may take. Use None for no "
                "limit, or seconds, for instance 600."
            )
        if not hasattr(signal, "SIGVTALRM"):
            raise NotImplementedError("reward_timeout needs the signals of POSIX. Use reward_timeout=None.")

    def _check_advantage_statistics(self) -> None:
        if self.advantage_statistics not in ("kept", "all"):
            raise ValueError(
                f"advantage_statistics={self.advantage_statistics!r} is unknown. Use 'kept' (the rollouts trained on) "
                "or 'all' (the rollouts generated)."
            )
        if self.advantage_statistics == "all" and self.multi_objective_aggregation == "normalize_then_sum":
            raise NotImplementedError(
                "advantage_statistics='all' is defined for the summed reward alone, not for "
                "multi_objective_aggregation='normalize_then_sum', which normalises every reward function by itself. "
                "Use 'sum_then_normalize', or advantage_statistics='kept'."
            )

    def _check_evaluation_batch(self) -> None:
        """TRL does so where an `eval_strategy` asks for evaluation."""
        if self.eval_minutes is None and not self.eval_on_start:
            return
        rows = self.per_device_eval_batch_size * self.world_size
        num_generations = self.num_generations_eval or self.num_generations
        if rows % num_generations:
            batch_size = f"per_device_eval_batch_size={self.per_device_eval_batch_size}"
            raise ValueError(
                f"The {rows} rows of a step of evaluation ({batch_size} x {self.world_size} processes) are not a "
                f"multiple of the {num_generations} completions of a prompt (num_generations_eval, by default "
                "num_generations). Use per_device_eval_batch_size="
                f"{_next_multiple(self.per_device_eval_batch_size, num_generations)} or num_generations_eval=1."
            )


def _next_multiple(value: int, unit: int) -> int:
    return -(-value // unit) * unit
