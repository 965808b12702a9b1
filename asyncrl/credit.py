"""From the rewards of a step's groups to one advantage a sample.

In this order: shaping of each reward (clip, penalties for length), the penalty for the KL where it comes off
whole answers, normalisation over the samples of the step or of the run, the group's baseline. Rewards in logs
and ledgers stay as they were scored.

Invariants:
- Plain scalars, no tensors and no users' code: this runs in the controller.
- The advantages of a step depend on its groups in their order, and with ``running`` normalisation on the
  steps before it, in ``state``; on nothing else.
- A greedy answer that serves as baseline is shaped and normalised as the samples are, and counts in no
  mean or deviation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import fsum

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.names import NEEDING_GREEDY
from asyncrl.algorithms.normalisation import EPSILON, Moments
from asyncrl.algorithms.pairs import pair_signs
from asyncrl.algorithms.shaping import RewardShaping
from asyncrl.config import ENVIRONMENT, REWARD_MODEL, Config
from asyncrl.types import GroupMeta, TrajectoryMeta

_LENGTH = ""
"""Name of the objective that the penalties for length are: no reward has it."""


class CreditAssignment:
    """What the config says of rewards and advantages, and the moments of the rewards so far."""

    def __init__(self, config: Config) -> None:
        algorithm = config.algorithm
        self._advantage = algorithm.advantage
        self._in_pairs = algorithm.learns_from_pairs
        self._normalisation = algorithm.reward_normalisation
        self._by_function = algorithm.objectives == "normalised"
        self._weights = {f.label: f.weight for f in config.reward.functions} | {_LENGTH: 1.0}
        if config.environment is not None:
            self._weights[ENVIRONMENT] = config.environment.reward_weight
        if config.reward_model is not None:
            self._weights[REWARD_MODEL] = config.reward_model.weight
        self._shaping = RewardShaping(
            max_tokens=config.rollout.max_new_tokens,
            clip=algorithm.reward_clip,
            length_penalty=algorithm.length_penalty,
            overlong_buffer=config.overlong_buffer,
            overlong_penalty=algorithm.overlong_penalty,
        )
        self._moments = Moments()

    @property
    def needs_greedy(self) -> bool:
        """Whether each group needs a greedy answer beside its samples."""
        return self._advantage in NEEDING_GREEDY and not self._in_pairs

    def rewards(self, meta: GroupMeta) -> tuple[float, ...]:
        """The shaped rewards of a group, one a sample."""
        return self._shaping.shaped(meta.rewards, [t.sampled_tokens for t in meta.samples])

    def without_signal(self, meta: GroupMeta) -> bool:
        """Whether a group has the same reward everywhere, its baseline's included, as advantages see it.

        But for a penalty for the KL, which differs even where the task tells no answer from another.
        """
        answers = meta.samples if meta.baseline is None else (*meta.samples, meta.baseline)
        if self._by_function:
            # Two functions may cancel in the sum, and each still has something to say.
            return len({tuple(sorted(self._objectives(t).items())) for t in answers}) == 1
        return len({self._shaped(t) for t in answers}) == 1

    def advantages(
        self, metas: Sequence[GroupMeta], penalties: Sequence[Sequence[float]] = ()
    ) -> list[tuple[float, ...]]:
        """Of all groups of a step, one a trajectory: its sample's advantage, or part in the group's pair.

        ``penalties``, where there are any, come off the samples' rewards: in the shape of what is returned.
        Rewards count in the run's moments from here on.
        """
        off = [_of_samples(*of_one) for of_one in zip(metas, penalties, strict=True)] if penalties else []
        by_sample = self._by_sample(metas, off)
        return [_of_rows(meta, of_group) for meta, of_group in zip(metas, by_sample, strict=True)]

    def _by_sample(
        self, metas: Sequence[GroupMeta], penalties: Sequence[Sequence[float]]
    ) -> list[tuple[float, ...]]:
        if self._in_pairs:
            return [pair_signs(self.rewards(meta), _lengths(meta)) for meta in metas]
        if self._by_function:
            return self._decoupled(metas)
        rewards = [self.rewards(meta) for meta in metas]
        if penalties:
            rewards = [
                tuple(r - penalty for r, penalty in zip(of_group, off, strict=True))
                for of_group, off in zip(rewards, penalties, strict=True)
            ]
        moments = self._observe([r for of_group in rewards for r in of_group])

        def scaled(rewards: Sequence[float]) -> tuple[float, ...]:
            return tuple(rewards) if moments is None else moments.normalised(rewards)

        return [
            group_advantages(
                self._advantage,
                scaled(of_group),
                _lengths(meta),
                None if meta.baseline is None else scaled([self._shaped(meta.baseline)])[0],
            )
            for meta, of_group in zip(metas, rewards, strict=True)
        ]

    def state(self) -> Mapping[str, float]:
        """Plain numbers that a checkpoint holds."""
        return self._moments.state()

    def restore(self, state: Mapping[str, float]) -> None:
        self._moments = Moments.restored(state)

    def _observe(self, rewards: Sequence[float]) -> Moments | None:
        """What to normalise a step with these rewards by; None for not at all."""
        if self._normalisation == "none":
            return None
        if self._normalisation == "batch":
            return Moments.of(rewards)
        self._moments.add(rewards)
        return self._moments

    def _shaped(self, answer: TrajectoryMeta) -> float:
        return self._shaping.reward(answer.reward, answer.sampled_tokens)

    def _objectives(self, answer: TrajectoryMeta) -> dict[str, float]:
        """Each reward function's own clipped value by name, and the penalties for length."""
        # What functions say beside their rewards stands there too, and is no objective.
        own = {name: value for name, value in answer.rewards.items() if name in self._weights}
        values = {name: self._shaping.clipped(value) for name, value in own.items()}
        return values | {_LENGTH: self._shaping.penalised(0.0, answer.sampled_tokens)}

    def _decoupled(self, metas: Sequence[GroupMeta]) -> list[tuple[float, ...]]:
        """Each function normalised within its group, then summed by weight; all of deviation 1.

        So a function whose values hardly differ weighs as much as one with large ones (GDPO, 2601.05242). A
        sample that a function returned None for is left out of that function's group.
        """
        sums = []
        for meta in metas:
            objectives = [self._objectives(t) for t in meta.samples]
            total = [0.0] * len(objectives)
            for name in dict.fromkeys(name for values in objectives for name in values):
                having = [i for i, values in enumerate(objectives) if name in values]
                found = group_advantages(self._advantage, [objectives[i][name] for i in having])
                for i, advantage in zip(having, found, strict=True):
                    total[i] += self._weights[name] * advantage
            sums.append(total)
        # Their mean is 0, group by group; subtracting its rounding would give a group without signal some.
        scale = Moments(sum(map(len, sums)), squares=fsum(a * a for total in sums for a in total)).std
        return [tuple(a / (scale + EPSILON) for a in total) for total in sums]


def _lengths(meta: GroupMeta) -> list[int]:
    return [t.loss_tokens for t in meta.samples]


def _of_samples(meta: GroupMeta, of_rows: Sequence[float]) -> list[float]:
    """One sum a sample, of what there is of each of its rows."""
    if not meta.has_rows:
        return list(of_rows)
    sums: dict[int, float] = {}
    for row, value in zip(meta.trajectories, of_rows, strict=True):
        sums[row.sample] = sums.get(row.sample, 0.0) + value
    return list(sums.values())


def _of_rows(meta: GroupMeta, of_samples: Sequence[float]) -> tuple[float, ...]:
    """One a trajectory: what its sample has."""
    if not meta.has_rows:
        return tuple(of_samples)
    samples = dict.fromkeys(row.sample for row in meta.trajectories)
    by_sample = dict(zip(samples, of_samples, strict=True))
    return tuple(by_sample[row.sample] for row in meta.trajectories)
