"""What is learned from the rewards, and how old what is learned from may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from asyncrl.algorithms.names import PREFERENCE_NAMES, PRESETS, REWARDED_BY_TOKEN
from asyncrl.config_algorithm import algorithm_problems
from asyncrl.sections.base import Section, refuse


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
        refuse(algorithm_problems(self))
        return self


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
