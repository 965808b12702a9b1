"""The running sequences of one engine, a row each: admitted, stepped by a token, collected.

Invariants:
- A row's position is that of the token fed next; keys and values exist for all before it, and the
  token sampled from it stands at position + 1, with its log-prob and the live version.
- A sequence leaves its row in the step that ends it.
- A context's (prompt and prefix) keys and values are shared only between rows prefilled under the live
  version.
- Relaxed: the rows in use are the first ones, attention runs over the longest of them.
  Fixed: every row runs in every step over ``max_sequence``, so a row's bits depend on it alone.
- Everything here belongs to one thread; the counters may be read from others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from asyncrl.errors import GeneratorError
from asyncrl.generators.draws import uniform_draws
from asyncrl.generators.prefill import FIXED_ROWS, plan_fixed, plan_relaxed
from asyncrl.generators.runner import ModelRunner
from asyncrl.generators.sampling import RowSampling, sample_tokens
from asyncrl.generators.stopping import StopStrings
from asyncrl.types import Completion, FinishReason, GenerationRequest, Int32Array

LENGTH_STEP = 16
"""Relaxed attention lengths are rounded up to a multiple of this."""
PREFILL_TOKENS = 8192
"""Most tokens, padding included, in one relaxed prefill: bounds its memory."""


def fixed_rows(slots: int) -> int:
    """Rows of a fixed batch: a multiple of 8, so that no kernel has a ragged tail to treat apart."""
    return -(-slots // 8) * 8


@dataclass(eq=False, slots=True)
class Admission:
    """A request on its way through the batch; the object itself is the sequence's identity."""

    request: GenerationRequest
    stop: StopStrings | None = None
    begun: float = 0.0
    """When it got its row, by the loop's clock."""


Ended = tuple[Admission, Completion]


@dataclass(eq=False, slots=True)
class _Row:
    admission: Admission
    request: GenerationRequest
    context: bytes
    """The ids of prompt and prefix as bytes: compares fast, and its hash is computed once."""
    born: int
    """Number of the step in which its position would have been 0."""
    prefilled_at: int | None
    """Version that computed the context's keys and values; None once they were recomputed."""


class ContinuousBatch:
    """Sequences that run through ``runner`` together, on ``rows`` rows (those of its slots)."""

    def __init__(self, runner: ModelRunner, *, rows: int, fixed: bool, live_version: int = 0) -> None:
        if fixed and rows < FIXED_ROWS:
            raise ValueError(f"{rows} rows, but fixed shapes need at least {FIXED_ROWS}")
        self._runner = runner
        self._fixed = fixed
        self._rows: list[_Row | None] = [None] * rows
        self.live_version = live_version
        self.running = 0
        self.sampled = 0
        """Tokens sampled so far."""
        self.forfeited = 0
        """Tokens that ended sequences could still have sampled."""
        self.prefilled = 0
        """Tokens prefilled so far, shared ones once."""
        self._steps = 0

        length, device = runner.kv.max_sequence, runner.device
        # By row and position: prompt and answer, the draw for each token, and what sampling gave.
        self._tokens = torch.zeros((rows, length), dtype=torch.int64, device=device)
        self._uniforms = torch.zeros((rows, length), dtype=torch.float32, device=device)
        self._logprobs = torch.zeros((rows, length), dtype=torch.float32, device=device)
        self._versions = torch.zeros((rows, length), dtype=torch.int32, device=device)
        # By row. An idle row stands still at position 0 and never ends.
        self._position = torch.zeros((rows, 1), dtype=torch.int64, device=device)
        self._advance = torch.zeros((rows, 1), dtype=torch.int64, device=device)
        self._last = torch.full((rows, 1), length, dtype=torch.int64, device=device)
        self._heeds_eos = torch.zeros((rows, 1), dtype=torch.bool, device=device)
        self._is_eos = torch.zeros(runner.vocab_size, dtype=torch.bool, device=device)
        self._is_eos[[token for token in runner.eos if token < runner.vocab_size]] = True
        self._table = (
            self._tokens,
            self._uniforms,
            self._logprobs,
            self._versions,
            self._position,
            self._advance,
            self._last,
            self._heeds_eos,
        )
        self._changed = True
        """Whether rows came, went or moved since the values below were derived."""
        self._sampling = RowSampling.of([], device)
        self._stopping: list[int] = []
        self._eldest = 0

    @property
    def free(self) -> int:
        """Rows without a sequence."""
        return len(self._rows) - self.running

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Start sequences in free rows and prefill them; at most ``free`` of them."""
        now = time.monotonic()
        targets = [i for i, row in enumerate(self._rows) if row is None][: len(admissions)]
        if len(targets) < len(admissions):
            raise ValueError(f"{len(admissions)} sequences admitted to {len(targets)} free rows")
        length = self._tokens.shape[1]
        tokens = np.zeros((len(targets), length), dtype=np.int64)
        uniforms = np.zeros((len(targets), length), dtype=np.float32)
        logprobs = np.zeros((len(targets), length), dtype=np.float32)
        versions = np.zeros((len(targets), length), dtype=np.int32)
        scalars = np.zeros((4, len(targets), 1), dtype=np.int64)
        sources = {
            row.context: i
            for i, row in enumerate(self._rows)
            if row is not None and row.prefilled_at == self.live_version
        }
        leaders: list[int] = []
        copies: dict[int, list[int]] = {}
        for i, admission in enumerate(admissions):
            admission.begun = now
            request = admission.request
            ids = np.asarray(request.context_ids, dtype=np.int64)
            # The answer starts after the prompt, and the first token sampled here after the prefix.
            start, first = len(request.prompt_ids), len(ids)
            end = start + request.sampling.max_new_tokens
            tokens[i, :first] = ids
            uniforms[i, start:end] = uniform_draws(request.key, end - start)
            if request.prefix is not None:
                logprobs[i, start:first] = request.prefix.logprobs
                versions[i, start:first] = request.prefix.versions
            scalars[:, i, 0] = (first - 1, 1, end - 1, not request.sampling.ignore_eos)
            context = ids.tobytes()
            born = self._steps - (first - 1)
            self._rows[targets[i]] = _Row(admission, request, context, born, self.live_version)
            if context in sources:
                copies.setdefault(sources[context], []).append(targets[i])
            else:
                sources[context] = targets[i]
                leaders.append(targets[i])
        where = torch.tensor(targets, device=self._tokens.device)
        columns = (self._position, self._advance, self._last, self._heeds_eos)
        for column, values in zip(
            (self._tokens, self._uniforms, self._logprobs, self._versions, *columns),
            (tokens, uniforms, logprobs, versions, *scalars),
            strict=True,
        ):
            column[where] = torch.from_numpy(values).to(column.device, column.dtype)
        self.running += len(targets)
        self._changed = True
        self._prefill(leaders)
        for source, group in copies.items():
            row = self._rows[source]
            assert row is not None
            self._runner.kv.copy(source, group, len(row.request.prompt_ids) + row.request.given - 1)

    def _prefill(self, rows: Sequence[int]) -> None:
        """Compute keys and values before the position of each of ``rows``."""
        lengths = [self._position_of(row) for row in rows]
        longest = self._runner.kv.max_sequence
        plan = (
            plan_fixed(lengths, max_sequence=longest)
            if self._fixed
            else plan_relaxed(lengths, max_sequence=longest, max_tokens=PREFILL_TOKENS)
        )
        for batch in plan:
            members = [rows[i] for i in batch.members]
            filler = [members[0]] * (batch.rows - len(members))
            tokens = self._tokens[members + filler, : batch.length]
            self._runner.prefill(batch, members, tokens)
        self.prefilled += sum(lengths)

    def _position_of(self, index: int) -> int:
        row = self._rows[index]
        assert row is not None
        return self._steps - row.born

    def step(self) -> list[Ended]:
        """Sample one token in every running row; return the sequences that this ended."""
        if self._changed:
            self._derive()
        count = len(self._rows) if self._fixed else self.running
        position = self._position[:count]
        tokens, draws = self._tokens[:count], self._uniforms[:count]
        logits = self._runner.decode(tokens.gather(1, position), position, self._attention_length())
        position += self._advance[:count]
        chosen, logprobs = sample_tokens(logits, draws.gather(1, position)[:, 0], self._sampling)
        chosen = chosen[:, None]
        tokens.scatter_(1, position, chosen)
        self._logprobs[:count].scatter_(1, position, logprobs[:, None])
        self._versions[:count].scatter_(1, position, self.live_version)
        eos = self._is_eos[chosen] & self._heeds_eos[:count]
        ended = eos | (position >= self._last[:count])
        self._steps += 1
        self.sampled += self.running

        reasons: dict[int, FinishReason] = {}
        for index in ended[:, 0].nonzero()[:, 0].tolist():
            reasons[index] = "stop" if eos[index] else "length"
        for index in self._stopping:
            if self._hits_stop(index):
                reasons[index] = "stop"
        return [self._remove(index, reason) for index, reason in sorted(reasons.items())]

    def _derive(self) -> None:
        """Bring what depends on the set of rows up to date."""
        if not self._fixed:
            self._compact()
        count = len(self._rows) if self._fixed else self.running
        rows = self._rows[:count]
        self._sampling = RowSampling.of(
            [row.request.sampling if row else None for row in rows], self._tokens.device
        )
        self._stopping = [
            i for i, row in enumerate(rows) if row is not None and row.admission.stop is not None
        ]
        self._eldest = min((row.born for row in rows if row is not None), default=self._steps)
        self._changed = False

    def _compact(self) -> None:
        """Move the last rows into the holes before them."""
        holes = [i for i, row in enumerate(self._rows[: self.running]) if row is None]
        movers = [i for i in range(self.running, len(self._rows)) if self._rows[i] is not None]
        for hole, mover in zip(holes, movers, strict=True):
            self._runner.kv.copy(mover, [hole], self._position_of(mover))
            for column in self._table:
                column[hole] = column[mover]
            self._rows[hole], self._rows[mover] = self._rows[mover], None

    def _attention_length(self) -> int:
        longest = self._runner.kv.max_sequence
        if self._fixed:
            return longest
        reach = self._steps - self._eldest + 1
        return min(-(-reach // LENGTH_STEP) * LENGTH_STEP, longest)

    def _hits_stop(self, index: int) -> bool:
        row = self._rows[index]
        assert row is not None
        stop = row.admission.stop
        assert stop is not None
        end = self._position_of(index) + 1
        start = max(len(row.request.prompt_ids), end - stop.window)
        return stop.found_in(self._tokens[index, start:end].tolist())

    def partials(self) -> dict[str, Completion]:
        """What each running sequence has so far, by its request's uid; those without a new token left out."""
        return {
            row.request.uid: self._answer(index, "abort")
            for index, row in enumerate(self._rows)
            if row is not None and self._position_of(index) >= len(row.request.prompt_ids) + row.request.given
        }

    def abort(self, admission: Admission) -> Ended | None:
        """End a sequence now, with what it has; None where it does not run."""
        for index, row in enumerate(self._rows):
            if row is not None and row.admission is admission:
                return self._remove(index, "abort")
        return None

    def _answer(self, index: int, reason: FinishReason) -> Completion:
        row = self._rows[index]
        assert row is not None
        start, end = len(row.request.prompt_ids), self._position_of(index) + 1
        logprobs = self._logprobs[index, start:end].cpu().numpy().copy()
        if not np.isfinite(logprobs).all():
            raise GeneratorError(
                f"request {row.request.uid}: {np.sum(~np.isfinite(logprobs))} of {end - start} log-probs are "
                f"not finite at version {self.live_version}: the weights hold NaN or infinity"
            )
        return Completion(
            token_ids=_int32(self._tokens[index, start:end]),
            logprobs=logprobs,
            versions=_int32(self._versions[index, start:end]),
            finish_reason=reason,
        )

    def _remove(self, index: int, reason: FinishReason) -> Ended:
        row = self._rows[index]
        assert row is not None
        stay = (row.admission.begun, time.monotonic())
        completion = replace(self._answer(index, reason), stay=stay)
        self._rows[index] = None
        self._position[index] = 0
        self._advance[index] = 0
        self._last[index] = self._tokens.shape[1]
        self._heeds_eos[index] = False
        self.running -= 1
        self.forfeited += row.request.sampling.max_new_tokens - len(completion.token_ids)
        self._changed = True
        return row.admission, completion

    def recompute(self) -> None:
        """Compute the keys and values of all running rows anew, under the weights of now."""
        rows = [i for i, row in enumerate(self._rows) if row is not None]
        self._prefill(rows)
        for i in rows:
            row = self._rows[i]
            assert row is not None
            row.prefilled_at = None


def _int32(values: torch.Tensor) -> Int32Array:
    return values.to("cpu", torch.int32, copy=True).numpy()
