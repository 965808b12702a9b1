"""The typed config: every key, its unit, its bounds.

Invariants:
- Imports no torch, ray, vllm or deepspeed, so that ``--help`` and config errors are instant.
- A config object that exists has passed every bound and every cross-field check.
- Relative paths are meant from the folder that the command was started in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from asyncrl.algorithms.names import PREFERENCE_NAMES, PRESETS, REWARDED_BY_TOKEN
from asyncrl.config_checks import (
    algorithm_problems,
    contradictions,
    creation_problems,
    environment_problems,
    model_problems,
    source_problems,
)
from asyncrl.config_lora import lora_problems
from asyncrl.generators.vllm_options import worker_count
from asyncrl.learners.layout import Layout

REWARD_MODEL = "reward_model"
"""The reward model's name as a role, and as that of its score beside those of reward functions."""

Strategy = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]
ENVIRONMENT = "environment"
"""The name of an environment's own reward beside those of reward functions."""

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Dtype = Literal["float32", "bfloat16"]


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(_listed)]
"""At least one; a plain string is taken as a list of it."""


class Section(BaseModel):
    """A block of keys: unknown ones are refused, and values never change after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # so that run.name=2024 is a name
    )


def _refuse(problems: list[str]) -> None:
    """Raise what pydantic collects; one problem a line, which the rendering takes apart again."""
    if problems:
        raise ValueError("\n".join(problems))


def _from_path(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^\w[\w.+=-]*$")] = "run"
    """Name of the run, of letters, digits and ``_.+=-``; its folder is ``<dir>/<name>/``."""
    dir: str = "runs"
    """Folder that holds the runs."""
    seed: NonNegativeInt = 0
    """Seeds the data order and every random draw."""
    steps: PositiveInt = 100
    """Policy updates. The only setting for the length of a run."""
    deterministic: bool = False
    """Bit-for-bit reproducible at pipeline_depth 0 with the torch engine; slower."""
    stall_after_s: PositiveFloat = 120.0
    """Seconds without progress before a stall report is logged."""
    max_unusable_groups: PositiveInt = 128
    """Groups in a row that fail or are filtered before the run ends with an error."""

    @property
    def folder(self) -> Path:
        """Where everything that the run writes goes."""
        return Path(self.dir) / self.name


class WarmStartSection(Section):
    steps: NonNegativeInt = 400
    """Supervised updates on question and answer pairs of ``data.train``."""
    batch_size: PositiveInt = 64
    """Examples an update."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate (AdamW, linear decay)."""
    target: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Stop early once this share of held-back targets is expected to be right; null: never."""


class CreateSection(Section):
    """A small Llama with a character tokenizer, made on first use and kept beside the runs."""

    hidden_size: PositiveInt = 192
    """Width of the residual stream; a multiple of ``heads``, and even for each head."""
    intermediate_size: PositiveInt = 512
    """Width inside each MLP."""
    layers: PositiveInt = 6
    """Transformer blocks."""
    heads: PositiveInt = 4
    """Attention heads."""
    kv_heads: PositiveInt = 4
    """Key and value heads; ``heads`` is a multiple of them."""
    max_positions: PositiveInt = 256
    """Longest sequence in tokens."""
    seed: NonNegativeInt = 0
    """Seed of the initial weights and the warm start; apart from ``run.seed``."""
    warm_start: WarmStartSection = WarmStartSection()
    """The short supervised training that makes the model right sometimes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse(creation_problems(self))
        return self


class ModelSection(Section):
    path: str | None = None
    """Hugging Face folder or hub name. Null with ``create``."""
    create: CreateSection | None = None
    """Make a small model instead of loading one."""
    dtype: Dtype = "float32"
    """Compute dtype of learner and generators; the learner's optimizer keeps float32 masters."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse(model_problems(self))
        return self


class SourceSection(Section):
    """Where rows come from: exactly one of ``path``, ``hub``, ``reasoning_gym``, ``python``, ``mixture``,
    ``holdout``."""

    path: str | None = None
    """A .jsonl or .parquet file."""
    hub: str | None = None
    """A Hugging Face data set, by name."""
    hub_config: str | None = None
    """The data set's configuration name."""
    split: str = "train"
    """The hub data set's split."""
    reasoning_gym: str | None = None
    """A reasoning-gym family, e.g. ``chain_sum``."""
    python: str | None = None
    """``package.module:function`` or ``file.py:function`` that returns an iterable of dicts."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the family or the function."""
    size: PositiveInt | None = None
    """Rows to draw from a reasoning-gym family (default 1000), or at most to read from others."""
    seed: NonNegativeInt = 0
    """Seed of a reasoning-gym family, and of which prompts ``holdout`` takes; apart from ``run.seed``."""
    holdout: PositiveInt | None = None
    """For ``data.eval`` alone: hold out this many distinct prompts of ``data.train``, by text."""
    mixture: tuple[SourceSection, ...] = ()
    """Several sources as one. Without weights every row of all of them comes once an epoch."""
    weight: PositiveFloat | None = None
    """In a mixture: share of this source in what is trained on, beside the other weights. Each source then
    goes through its rows at its own pace."""

    @model_validator(mode="before")
    @classmethod
    def _from_short(cls, value: Any) -> Any:
        return {"mixture": value} if isinstance(value, (list, tuple)) else _from_path(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse(source_problems(self))
        return self


class DataSection(Section):
    train: SourceSection
    """Rows to train on. A plain string is taken as a path, a list as a mixture."""
    eval: SourceSection | None = None
    """Held-out rows. Prompts that occur here, by text, are removed from training."""
    eval_sets: dict[Annotated[str, Field(pattern=r"^[A-Za-z][\w.-]*$")], SourceSection] = Field(
        default_factory=dict
    )
    """More held-out rows, by name: each is measured by itself, as ``eval/<name>/reward_mean``."""
    format: Literal["auto", "verl", "trl", "openrlhf", "skyrl", "reasoning_gym", "plain"] = "auto"
    """Which project's columns the rows have; auto: told by the columns, and said at the start."""
    prompt_key: str | None = None
    """Column of the prompt; null: that of the form, or the first of prompt, question, input, problem."""
    label_key: str | None = None
    """Column of what a right answer is, passed to rewards as ``ground_truth``; null: that of the form."""
    template: Literal["auto", "chat", "plain"] = "auto"
    """``chat`` applies the tokenizer's chat template, ``plain`` the text; auto: chat if there is one."""
    prompt_format: str = "{prompt}"
    """Python format of a plain or user text, with the row's columns by name."""
    system: str | None = None
    """System message in front of a chat."""
    shuffle: bool = True
    """Another order each epoch, from ``run.seed``."""
    max_prompt_tokens: PositiveInt = 256
    """Longest prompt in tokens."""
    over_long: Literal["drop", "truncate_left", "error"] = "drop"
    """What to do with a prompt over ``max_prompt_tokens``; the count is reported at the start."""


class RolloutSection(Section):
    group_size: PositiveInt = 8
    """Trajectories a task."""
    groups_per_step: PositiveInt = 8
    """B: groups an update."""
    max_new_tokens: PositiveInt = 64
    """Longest answer in tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the learner's log-probs use the same."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Probability mass to sample from; 1.0 is off, and all that training takes."""
    top_k: NonNegativeInt = 0
    """Likeliest tokens to sample from; 0 is off, and all that training takes."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end an answer; they are part of it."""
    deadline_s: PositiveFloat = 300.0
    """Seconds that one group may take, from its request to the last reward of a function."""
    min_group: PositiveInt = 2
    """Fewest surviving samples that a group may train with when ``reward.on_error`` is drop."""
    max_attempts: PositiveInt = 3
    """Tries of one group when the replica that it is on dies or hangs; the last with no other beside
    it, so that a prompt that kills replicas is told from those that were only there."""


class RewardFunctionSection(Section):
    path: str
    """``package.module:function``, ``file.py:function`` (a rubric object too), the http address of a reward
    server, or the name of a built-in reward. What it is called with, its parameters say (docs/rewards.md)."""
    weight: float = 1.0
    """Factor in the sum."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed on each call."""
    name: str | None = None
    """Name in the metrics; null: the function's."""

    @property
    def label(self) -> str:
        """Name in the metrics, and in the rewards of a trajectory."""
        return self.name or ("remote" if "://" in self.path else self.path.rpartition(":")[2])

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return _from_path(value)


class RewardSection(Section):
    functions: tuple[RewardFunctionSection, ...] = ()
    """Reward functions; their weighted sum is the reward, with that of a ``reward_model``. A plain string is
    taken as a path. At least one, unless there is a ``reward_model``."""
    timeout_s: PositiveFloat = 10.0
    """Seconds that scoring one answer, or one group by functions of groups, may take (each async function:
    that it may take) before the process that does it is killed and replaced."""
    on_error: Literal["fail", "drop"] = "fail"
    """Of a reward that cannot be had. ``fail``: the whole group fails, counted. ``drop``: that sample alone.
    Never 0.0."""
    workers: PositiveInt = 1
    """Worker processes beside each generator."""


class EnvironmentSection(Section):
    """What the model acts in, over several turns; docs/environments.md says what it is."""

    path: str
    """``package.module:Class`` or ``file.py:Class``, or a function that makes one; ``tools`` for the built-in
    environment over ``tools``."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments that each environment is made with."""
    tools: tuple[str, ...] = ()
    """Typed functions that the model may call, ``package.module:function`` or ``file.py:function``."""
    max_turns: PositiveInt = 8
    """The model's messages in one trajectory."""
    max_turn_tokens: PositiveInt | None = None
    """Tokens of one of them. Null: what is left of ``rollout.max_new_tokens``, which all turns share with
    what the environment says."""
    max_time_s: PositiveFloat | None = None
    """Seconds after which no further turn begins; null: ``rollout.deadline_s`` alone."""
    max_observation_chars: PositiveInt = 100_000
    """Longest answer of the environment, in characters; a longer one fails its trajectory."""
    timeout_s: PositiveFloat = 30.0
    """Seconds that ``reset`` or one ``step`` may take before its trajectory fails."""
    reward_weight: float = 1.0
    """Factor of the environment's own reward, where it gives one, in the sum that is the reward."""
    workers: PositiveInt = 1
    """Worker processes beside each generator; each runs many environments."""

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return _from_path(value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse(environment_problems(self))
        return self


class AlgorithmSection(Section):
    """What is learned from the rewards. The defaults are those of ``preset: grpo``."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "ppo", "rloo", "reinforce_plus_plus"] = "grpo"
    """Named set of defaults for this section; what is set beside it wins."""
    advantage: str = "grpo"
    """grpo, dr_grpo, rloo, opo, grpo_passk, reinforce_plus_plus, reinforce_plus_plus_baseline, remax (one
    more answer a prompt, sampled greedily), gae (with a ``critic``), or a function of your own:
    ``package.module:function`` or ``file.py:function``."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount a token of the reward at the answer's end, under reinforce_plus_plus and gae."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """gae: how far an advantage looks beyond the critic's next value. 1: to the answer's end, so that the
    critic is a baseline and no more; smaller: less variance, and the critic's bias."""
    loss: str = "ppo_clip"
    """ppo_clip, gspo, cispo, gmpo, sapo, aipo, topr, dppo, m2po, or a function of your own; or dpo, ipo,
    which learn from the best and the worst answer of each group and need no advantage."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """The ratio is clipped below at 1 - clip_low (gmpo: its logarithm at -clip_low)."""
    clip_high: PositiveFloat = 0.2
    """The ratio is clipped above at 1 + clip_high (gmpo: its logarithm at clip_high)."""
    clip_dual: Annotated[float, Field(gt=1.0)] | None = 3.0
    """ppo_clip: bound on the loss of a negative advantage; null: off."""
    sapo_tau_positive: PositiveFloat = 1.0
    """sapo: steepness of the gate where the advantage is positive."""
    sapo_tau_negative: PositiveFloat = 1.05
    """sapo: steepness of the gate where the advantage is negative."""
    aipo_cap: PositiveFloat = 5.0
    """aipo: largest weight pi/b of a token."""
    dppo_threshold: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """dppo: how far a token's probability may move in the direction of its advantage."""
    dppo_penalty: NonNegativeFloat = 1e-3
    """dppo: factor of (log pi/b)^2."""
    m2po_tau: PositiveFloat = 0.04
    """m2po: bound on the mean of (log pi/b)^2 over the step."""
    preference_beta: PositiveFloat = 0.1
    """dpo, ipo: how much a preference weighs against keeping to the reference; larger keeps closer."""
    kl: Literal["none", "loss", "reward"] = "none"
    """Where the KL to the reference policy goes: into the loss, or off the rewards. ``none`` and a loss
    other than dpo and ipo: no reference is started."""
    kl_estimator: Literal["k1", "abs", "k2", "k3", "k1+", "k3+"] | None = None
    """How it is estimated, token by token: k1, abs, k2 or k3; ``+``: with the gradient of k2. Null: k3 in
    the loss, k1 in the reward."""
    kl_coef: NonNegativeFloat = 1e-3
    """Its factor; with ``kl_target``, that of the first step."""
    kl_target: PositiveFloat | None = None
    """KL a token that the factor is adapted to hold; null: the factor stays as it is."""
    kl_horizon: PositiveFloat = 10_000.0
    """Samples over which a KL that is off by a fifth or more changes the factor by a fifth."""
    epochs: PositiveInt = 1
    """Times that a step goes through its groups. The policy version still moves once a step, and p stays
    the policy of the step's start."""
    mini_batches: PositiveInt = 1
    """Optimizer updates in each of them, every one of an equal part of the groups."""
    entropy_coef: NonNegativeFloat = 0.0
    """Factor of the policy's mean entropy, which is taken off the loss."""
    old_logprobs: Literal["recompute", "behaviour", "log_linear"] = "recompute"
    """What the ratio is taken to. ``recompute``: p, the learner's own at the step's start.
    ``behaviour``: b, the policy that sampled. ``log_linear``: between b and pi, one version behind pi."""
    correction: Literal[
        "none", "tis", "tis_sequence", "icepop", "token_mask", "seq_mask", "decoupled_ppo"
    ] = "tis"
    """How p/b is corrected for. tis, tis_sequence: truncated importance sampling by token or by answer;
    icepop, decoupled_ppo: p/b, 0 outside the bounds; token_mask, seq_mask: 1, 0 outside the bounds."""
    tis_cap: PositiveFloat = 2.0
    """Largest weight p/b under ``tis`` and ``tis_sequence``."""
    icepop_low: PositiveFloat = 0.5
    """Smallest p/b of a token that icepop trains."""
    icepop_high: PositiveFloat = 5.0
    """Largest p/b of a token that icepop trains."""
    mask_low: PositiveFloat = 0.5
    """Smallest p/b of a token (token_mask), or geometric mean of an answer's (seq_mask), that is trained;
    0.999 is usual for seq_mask where only the engine's mismatch is to pass."""
    mask_high: PositiveFloat = 2.0
    """Largest; 1.001 goes with 0.999."""
    decoupled_cap: PositiveFloat = 5.0
    """Largest p/b of a token that decoupled_ppo trains."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean"
    ] = "token-mean"
    """Always normalised over the whole step. ``seq-mean`` is for gmpo."""
    length_norm: PositiveFloat | None = None
    """seq-mean-token-sum-norm: what sums over tokens are divided by; null: rollout.max_new_tokens."""
    filter_zero_variance: Literal["none", "drop", "refill"] = "none"
    """Groups of equal rewards. ``refill``: filtered as they land, and others take their place (at most
    ``run.max_unusable_groups`` in a row). ``drop``: the step does without them."""
    reward_clip: tuple[float, float] | None = None
    """Lower and upper bound of a reward, before penalties for length; null: none. Advantages alone see
    it, as they do the penalties below: logs and ledger keep rewards as they were scored."""
    reward_normalisation: Literal["none", "batch", "running"] = "none"
    """Shaped rewards less their mean and over their deviation, before the group's baseline: those of the
    step's samples, or of all samples that were trained on so far."""
    objectives: Literal["sum", "normalised"] = "sum"
    """Several rewards: their weighted sum is the reward, or grpo's advantage is taken of each by
    itself and these are summed by weight (GDPO). Penalties for length are one more, of weight 1."""
    length_penalty: NonNegativeFloat = 0.0
    """Taken off the reward of an answer of rollout.max_new_tokens; off a shorter one in proportion."""
    overlong_buffer: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of rollout.max_new_tokens, at its end, over which the penalty for overlong answers rises."""
    overlong_penalty: NonNegativeFloat = 1.0
    """Taken off the reward of an answer that used up that buffer."""
    mask_truncated: bool = False
    """Train nothing of an answer that was cut off; its reward still counts in its group."""
    allow_uncorrected: bool = False
    """Permit an uncorrected loss with max_staleness >= 2."""

    @property
    def kl_form(self) -> str:
        """The estimator of the KL: the one that was asked for, or what is usual for its place."""
        return self.kl_estimator or ("k1" if self.kl == "reward" else "k3")

    @property
    def learns_from_pairs(self) -> bool:
        return self.loss in PREFERENCE_NAMES

    @property
    def penalises_tokens(self) -> bool:
        """Whether the KL comes off the reward of each token, in the learner, and not off the answer's."""
        return self.kl == "reward" and self.advantage in REWARDED_BY_TOKEN

    @property
    def needs_reference(self) -> bool:
        return self.kl != "none" or self.learns_from_pairs

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, value: Any) -> Any:
        if not isinstance(value, dict) or not isinstance(value.get("preset"), str):
            return value
        return {**PRESETS.get(value["preset"], {}), **value}

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse(algorithm_problems(self))
        return self


class EvalSection(Section):
    every: NonNegativeInt = 10
    """Steps between evaluations; 0: only before and after."""
    samples: PositiveInt = 1
    """Answers a prompt."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Probability mass to sample from; 1.0: off."""
    top_k: NonNegativeInt = 0
    """Likeliest tokens to sample from; 0: off."""
    max_new_tokens: PositiveInt | None = None
    """Null: as ``rollout.max_new_tokens``."""
    max_prompts: PositiveInt | None = None
    """Use only the first so many held-out prompts."""
    timeout_s: PositiveFloat = 1800.0
    """Seconds that one evaluation may take."""


class ScheduleSection(Section):
    pipeline_depth: NonNegativeInt = 1
    """D: at most (D+1) * groups_per_step groups are outstanding. 0 is synchronous."""
    max_staleness: NonNegativeInt = 2
    """S: no token with a larger lag, in policy versions, ever reaches the loss."""
    at_bound: Literal["wait", "drop", "mask"] = "wait"
    """When a group must be trained now and is not ready: wait for it, cancel and replace it, or train it
    later without the tokens that are too old by then."""
    publish_every: PositiveInt = 1
    """k: push each k-th version."""
    in_flight_updates: bool = True
    """Swap weights between two tokens; false: a generator finishes what it has first."""
    kv_after_swap: Literal["keep", "recompute"] = "keep"
    """Whether running sequences keep the keys and values of the old weights."""


class GeneratorsSection(Section):
    backend: Literal["torch", "vllm"] = "torch"
    """The engine; ``torch`` is the embedded one."""
    replicas: PositiveInt = 1
    """Engines, each with the whole model; with ``max``, those that a run starts with."""
    min: PositiveInt | None = None
    """Fewest that a run goes on with; with fewer it stops after a checkpoint. Null: 1."""
    max: PositiveInt | None = None
    """Most: in a cluster, more join while the run goes on as soon as there is room for them. Null: as many as
    ``replicas``, which take the place of those whose node went away."""
    below_min_s: PositiveFloat = 300.0
    """Seconds that a run bears fewer than ``min``, where others may still join."""
    slots: PositiveInt = 64
    """Sequences that one engine samples at the same time."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto: cuda, then mps, then cpu."""
    threads: PositiveInt = 1
    """Threads of one engine on CPU (vllm: of each of its workers, unless they are pinned to cores)."""
    cpu_cores: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    """Cores to pin the engines to, dealt out in turn; null: unpinned."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """More arguments of vLLM, by its own names, e.g. ``tensor_parallel_size``."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds that an engine may take to load the model and warm up."""
    health_every_s: PositiveFloat = 1.0
    """Seconds between two pings of a replica."""
    health_timeout_s: PositiveFloat = 3.5
    """Seconds that a replica has to answer a ping before it is taken for dead."""
    max_restarts: NonNegativeInt = 3
    """Restarts of one replica in a row, no group completed in between, before it is left dead."""
    logprob_diff_alarm: PositiveFloat | None = None
    """Warn when the mean difference between the engine's and the learner's log-probs of the same tokens
    is above this; null: 0.01 in float32, 0.1 in bfloat16."""

    @property
    def fewest(self) -> int:
        """Replicas that a run does not go on without."""
        return self.min or 1

    @property
    def most(self) -> int:
        """Replicas that a run may have at a time."""
        return self.max or self.replicas

    @property
    def workers(self) -> int:
        """Processes that share one replica's model: each is a rank of the push group."""
        return worker_count(self.vllm) if self.backend == "vllm" else 1


class LoraSection(Section):
    """Low-rank adapters, which are trained in place of the weights. Generators get the two merged."""

    rank: PositiveInt = 16
    """r: inner width of an adapter's two matrices."""
    alpha: PositiveFloat = 32.0
    """An adapter adds alpha / rank times its product to the weight."""
    dropout: float = 0.0
    """Only 0: log-probs have to be a function of weights and tokens."""
    target_modules: Names = ("all-linear",)
    """Last names of the layers that get one, e.g. [q_proj, v_proj]. ``all-linear``: every linear layer but
    the output embedding."""
    seed: NonNegativeInt = 0
    """Seed of the adapters' initial values, with which they add nothing; apart from ``run.seed``."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse(lora_problems(self))
        return self


class EngineSection(Section):
    """Ranks that train a model: what policy and critic have alike."""

    backend: Literal["deepspeed", "fsdp2"] = "deepspeed"
    """The library that shares a model out among the ranks and steps it: DeepSpeed, or torch's own FSDP2, with
    ZeRO 2 or 3 and without LoRA."""
    ranks: PositiveInt = 1
    """Processes, a device each."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 2
    """What the ranks share out: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too. With fsdp2
    all of it at 2 and at 3, but at 2 parameters are whole from a forward to the end of its backward pass.
    Where parameters are shared out, all ranks of a critic value each group together."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda, then cpu."""
    threads: PositiveInt = 1
    """Torch threads of one rank on CPU."""
    cpu_cores: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    """Cores to pin the ranks to, dealt out in turn; null: unpinned."""
    micro_batch_tokens: PositiveInt = 4096
    """Tokens in one forward pass, padding included."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate of AdamW."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments."""
    eps: PositiveFloat = 1e-8
    """Added to the root of AdamW's second moment."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this L2 norm."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: slower, less memory."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds that the ranks may take to load the model and find each other."""
    step_timeout_s: PositiveFloat = 1800.0
    """Seconds that one update may take."""

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of every parameter, or all of them."""
        return self.zero_stage == 3 or self.backend == "fsdp2"


class LearnerSection(EngineSection):
    packing: bool = False
    """Several answers in a row without padding, each attending to itself alone. Checked at the start: models
    whose layers carry a state from token to token, or do not look at positions, cannot."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """The learner's implementation; auto: the model's own choice. With ``packing`` and flash_attention_2 (a
    GPU, bfloat16, and the package flash-attn) a micro-batch is a single row."""
    lora: LoraSection | None = None
    """Train low-rank adapters, the weights frozen; null: train the weights. Needs ``asyncrl[lora]``."""
    sequence_parallel: PositiveInt = 1
    """Ranks that share each sequence, a part of its tokens each (Ulysses): for sequences whose activations
    one device cannot hold. Divides ``ranks`` and the model's heads."""
    tensor_parallel: PositiveInt = 1
    """Ranks that share each layer, a part of its heads and columns each (AutoTP): for layers that one device
    cannot hold. Divides ``ranks`` and the model's heads."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stay, or fall to 0 at ``run.steps``."""
    warmup_steps: NonNegativeInt = 0
    """Updates over which the learning rate rises linearly from lr / warmup_steps."""
    max_bad_steps: NonNegativeInt = 3
    """Non-finite updates in a row that are skipped before the run stops."""

    @property
    def shared(self) -> int:
        """Ranks that train the same samples, a part of the work each."""
        return self.sequence_parallel * self.tensor_parallel

    @property
    def replicas(self) -> int:
        """Groups of ranks that train samples of their own."""
        return self.ranks // self.shared

    @property
    def layout(self) -> Layout:
        """How a micro-batch is laid out."""
        if not self.packing:
            return "padded"
        return "one_row" if self.attention == "flash_attention_2" else "packed"


class RoleSection(Section):
    """The actors of a role beside generators and learner."""

    replicas: PositiveInt = 1
    """Actors, each with the whole model; every group goes to one of them as it lands."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda, then cpu."""
    threads: PositiveInt = 1
    """Torch threads of one actor on CPU."""
    cpu_cores: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    """Cores to pin the actors to, dealt out in turn; null: unpinned."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds that an actor may take to load its model."""
    timeout_s: PositiveFloat = 300.0
    """Seconds that one call may take, of one group or of several that were waiting, before the actor is taken
    for dead and replaced."""

    @property
    def actors(self) -> tuple[str, int]:
        """The key that says how many actors there are, and the number."""
        return "replicas", self.replicas


class ReferenceSection(RoleSection):
    path: str | None = None
    """Hugging Face folder or hub name, with the policy's tokenizer. Null: the model that training starts
    from."""
    dtype: Dtype | None = None
    """Compute dtype. Null: ``model.dtype``."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens in one forward pass, padding included. Null: ``learner.micro_batch_tokens``."""
    refresh_every: NonNegativeInt = 0
    """Policy versions after which the reference follows the policy, a multiple of ``schedule.publish_every``;
    0: it stays what it is."""
    ema: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Share of the old reference that stays at each refresh, as an average in float32; null: none of it."""
    place: Literal["actors", "learner", "lora_base"] = "actors"
    """actors: in actors of its own, which score groups as they land. The others start none, and the learner
    scores each step's groups first, one forward pass of its time: learner keeps the start model in host
    memory and exchanges it for the policy meanwhile; lora_base, with ``learner.lora``, has no second copy of
    the weights and switches its adapters off."""


class RewardModelSection(RoleSection):
    """A sequence classifier that scores answers, beside ``reward.functions`` or in place of them."""

    path: str
    """Hugging Face folder or hub name of an ``AutoModelForSequenceClassification`` with one label."""
    weight: float = 1.0
    """Factor of its score in the sum that is the reward."""
    template: Literal["auto", "chat", "none"] = "auto"
    """``chat``: the prompt's messages and the answer, by its own tokenizer's chat template. ``none``: the
    policy's prompt and the answer, one after the other: the very tokens where both have one vocabulary, else
    as text that its own tokenizer reads. auto: chat if its tokenizer has a chat template."""
    dtype: Dtype | None = None
    """Compute dtype. Null: ``model.dtype``."""
    micro_batch_tokens: PositiveInt | None = None
    """Tokens in one forward pass, padding included, and of the groups in one call. Null:
    ``learner.micro_batch_tokens``."""
    max_tokens: PositiveInt | None = None
    """Longest input in tokens: a longer one loses its beginning, and is counted. Null: all that the model
    takes."""


class CriticSection(EngineSection):
    """The value model of ``advantage: gae``, on an engine and in processes of its own."""

    path: str | None = None
    """Hugging Face folder or hub name whose transformer it starts from; null: the policy's start model."""
    warmup_steps: NonNegativeInt = 0
    """Steps at the start of a run that train the critic alone. They count as steps of the run and as policy
    versions, though the policy keeps its weights."""
    value_clip: PositiveFloat = 0.2
    """A value's loss ignores moves beyond this from the value that the token was given as it landed."""
    step_timeout_s: PositiveFloat = 1800.0
    """Seconds that the values of one group may take, with an update that it has to wait for; an update of
    its own ends with that of the policy, in ``learner.step_timeout_s``."""

    @property
    def actors(self) -> tuple[str, int]:
        """The key that says how many actors there are, and the number."""
        return "ranks", self.ranks


class WeightSyncSection(Section):
    backend: Literal["auto", "nccl", "gloo", "ipc", "shm"] = "auto"
    """auto: nccl between GPUs, gloo otherwise. Colocated with vLLM: ipc on GPUs, shm on CPUs, which hand
    weights over in memory that a learner rank and the generator beside it both have open."""
    bucket_mb: PositiveFloat = 256.0
    """Megabytes (2**20 bytes) that travel in one broadcast."""
    timeout_s: PositiveFloat = 300.0
    """Seconds that one push may take before its group is rebuilt without the silent receiver."""
    overlap: bool = False
    """Copy the weights out at the step's boundary and train on while the copy is sent."""
    adapter_only: bool = False
    """With ``learner.lora`` and the torch engine: send the adapters alone. Generators keep a copy of the
    start model and merge them themselves, while they generate."""
    canary_every: NonNegativeInt = 10
    """Pushes from one canary to the next: fixed tokens whose log-probs on every generator have to be the
    learner's. The first push is always checked, and every restarted generator. With ``overlap`` the
    learner stands still for its half. Colocated, where it costs next to nothing, each version is checked.
    0: none at all."""
    canary_tolerance: PositiveFloat | None = None
    """Largest mean difference of the canary's log-probs, beyond which the run ends. Null: 0.01 in float32,
    0.2 in bfloat16."""

    @property
    def bucket_bytes(self) -> int:
        """Bytes that travel in one broadcast."""
        return int(self.bucket_mb * 2**20)


class SidePlacementSection(Section):
    """Where in a cluster one side goes."""

    strategy: Strategy = "PACK"
    """Over as few nodes as possible (PACK), on one (STRICT_PACK), evenly over all (SPREAD), or each on one of
    its own (STRICT_SPREAD)."""
    nodes: Names | None = None
    """Nodes that it may be on, by address, host name or id; null: any."""
    cpus: NonNegativeFloat | None = None
    """CPUs that are set aside for each of its actors. Null: its ``threads`` on CPU, none beside a GPU.
    0: none, so that actors share cores."""


class PlacementSection(Section):
    mode: Literal["split", "colocated"] = "split"
    """split: generators and learner on devices of their own. colocated: a generator and a learner rank on one
    device, in turns. With the torch engine they are one process with the same parameters, and no weights are
    sent (ZeRO 0 to 2); with vLLM two processes, of which one has the device's memory at a time."""
    address: str | None = None
    """Ray cluster to join; null: start one on this machine."""
    nodes: PositiveInt | None = None
    """Nodes of the cluster that the run is for: with fewer it does not start, of more it takes so many. Null:
    whatever there is."""
    learner: SidePlacementSection = SidePlacementSection()
    """Where the learner's ranks go, and those of a critic."""
    generators: SidePlacementSection = SidePlacementSection()
    """Where the generators go. Each is on one node, with all its workers."""


class CheckpointSection(Section):
    every: NonNegativeInt = 50
    """Steps between checkpoints; 0: none between the first step and the last."""
    at_end: bool = True
    """Take one after the last step, and when a signal ends the run."""
    keep_last: PositiveInt = 2
    """How many of the newest are kept."""
    keep_best: bool = True
    """Keep the weights of the version with the best ``eval/reward_mean``: every version that is evaluated
    leaves its weights, without the optimizer's state, until its evaluation is known."""
    hf: Literal["never", "last", "every"] = "last"
    """Which of them hold the policy as a Hugging Face folder too. Training stands still while one is
    written, so that by default it is the one that a run ends with."""
    resume: Annotated[str, Field(min_length=1)] = "auto"
    """auto: go on from the newest whole checkpoint in the run's folder, if there is one; never: refuse a
    folder that was used; a path, ``.../checkpoints/step_<N>``: go on from that one, of whichever run."""
    timeout_s: PositiveFloat = 1800.0
    """Seconds that copying the state may take, and then writing it."""


class LogSection(Section):
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Where metrics go beside ``metrics.jsonl``. wandb needs ``asyncrl[wandb]``; with ``WANDB_MODE=offline``
    in the environment it keeps them on this machine."""
    rollouts_every: NonNegativeInt = 10
    """Steps between samples of trajectories in ``rollouts/``; 0: never."""
    trace_mb: NonNegativeInt = 256
    """Megabytes (2**20 bytes) that ``trace.json``, the run's timeline, may get; 0: none is written."""
    display: Literal["auto", "rich", "lines", "none"] = "auto"
    """auto: a live display on a terminal, lines elsewhere."""


class Config(Section):
    """A whole run."""

    run: RunSection = RunSection()
    """The run itself: its name, place, length and seed."""
    model: ModelSection
    """The policy that training starts from."""
    data: DataSection
    """Prompts, and how they are written."""
    rollout: RolloutSection = RolloutSection()
    """Sampling for training."""
    reward: RewardSection = RewardSection()
    """What a good answer is."""
    environment: EnvironmentSection | None = None
    """What the model acts in; null: it answers the prompt, once."""
    reward_model: RewardModelSection | None = None
    """A model that says so too, in actors of its own; null: none."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """Advantage, loss, and the correction for stale data."""
    eval: EvalSection = EvalSection()
    """Measurements on held-out prompts."""
    schedule: ScheduleSection = ScheduleSection()
    """How far rollouts and updates overlap, and how old data may be."""
    generators: GeneratorsSection = GeneratorsSection()
    """The engines that sample."""
    learner: LearnerSection = LearnerSection()
    """The ranks that update."""
    reference: ReferenceSection = ReferenceSection()
    """The reference policy, where ``algorithm`` needs one, in actors of its own or in the learner."""
    critic: CriticSection = CriticSection()
    """The value model, where ``algorithm`` needs one: trained, in actors of its own."""
    weight_sync: WeightSyncSection = WeightSyncSection()
    """How weights travel from the learner to the generators."""
    placement: PlacementSection = PlacementSection()
    """What runs where."""
    checkpoint: CheckpointSection = CheckpointSection()
    """What is kept to go on from after an interruption."""
    log: LogSection = LogSection()
    """What is written and shown."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _refuse(contradictions(self))
        return self

    @property
    def has_critic(self) -> bool:
        """Whether the run has a critic."""
        return self.algorithm.advantage == "gae" and not self.algorithm.learns_from_pairs

    @property
    def roles(self) -> dict[str, RoleSection | CriticSection]:
        """The roles in actors of their own that this run has, by name."""
        roles: dict[str, RoleSection | CriticSection] = {}
        if self.algorithm.needs_reference and self.reference.place == "actors":
            roles["reference"] = self.reference
        if self.has_critic:
            roles["critic"] = self.critic
        if self.reward_model is not None:
            roles[REWARD_MODEL] = self.reward_model
        return roles

    @property
    def max_sequence_tokens(self) -> int:
        """Longest training sequence, prompt and answer, in tokens."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def length_norm(self) -> float:
        """What ``seq-mean-token-sum-norm`` divides by, in tokens."""
        return self.algorithm.length_norm or float(self.rollout.max_new_tokens)

    @property
    def overlong_buffer(self) -> int:
        """Length of the buffer of ``algorithm.overlong_buffer``, in tokens; 0: none."""
        share = self.algorithm.overlong_buffer
        return max(round(share * self.rollout.max_new_tokens), 1) if share else 0

    @property
    def max_eval_tokens(self) -> int:
        """Longest sequence of an evaluation, in tokens."""
        return self.data.max_prompt_tokens + (self.eval.max_new_tokens or self.rollout.max_new_tokens)
