"""docs/published.md: the figures of benchmarks/published.py, and what they rest on.

Invariant: no predicted time is written here; all come from the report.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]
AIM = 15
"""Per cent."""

HEAD = """\
# Published step times, predicted

How far can `asyncrl simulate` (docs/bench.md) be believed about machines that you do not have? verl
publishes the seconds a step of one task, and of its phases, on 32, 64 and 128 H20: colocated and
synchronous, and asynchronous with half of the devices on each side
([Fully Async Policy Trainer](https://verl.readthedocs.io/en/latest/advance/fully_async.html)). The task is
Qwen2.5-Math-7B with DAPO, 512 prompts of 16 answers a step, up to 28K tokens each. The simulator is
calibrated on the three colocated rows, and predicts the asynchronous ones: no parameter has seen those.

`python benchmarks/published.py` makes this page and docs/published.json.

The aim is an error of at most {aim} %. Of {count} predictions, two of them for one row, {first_half} meet it
for the first 200 steps, and {whole} for the whole runs. What misses it, and why, is at the end.

## The first 200 steps

The published tables hold the hours after 100, 200, 300 and 400 steps too. The colocated run on 32 H20 took
499 s a step until step 200 and 1,105 s after it, that on 128 took 323 and 412 s, and that on 64 the same
throughout: answers grew in one run, and not in another. Until step 200 no colocated run had changed much, so
there runs can be compared. Phases are published as means of whole runs: those of the first 200 steps are
taken in proportion to the step, in colocated and asynchronous rows alike.

Pairs are predicted / published seconds a step.
"""
WHOLE = """\
## The whole runs

The same, calibrated on the means of all 400 steps as they are published.
"""
CALIBRATION = """\
## The calibration

Each phase of the colocated rows has two unknowns, fitted to three rows by least squares of the relative
error: what it takes on any number of devices, and what more for the tokens that each device has.

- First 200 steps: {half}.
- Whole runs: {whole}.

What the simulator makes of the colocated runs with these costs, first 200 steps and whole runs:
"""
ASSUMPTIONS = """\
## What is assumed

| what | value | where it is from |
| --- | --- | --- |
| prompts, answers of each, longest answer | 512, 16, {longest:,} tokens | published |
| batches of a step | 4 of 128 prompts: `require_batches` 4 times `ppo_mini_batch_size` 32, \
`trigger_parameter_sync_step` 4 | published |
| devices of an engine | 4 (tensor parallel), in both modes | verl's scripts of these runs |
| answers that an engine works at | colocated all; asynchronous {running}, those of 16 prompts | verl's code |
| lengths | log-normal, mean {mean:,.0f} before the cut, sigma {sigma:g}, half of the variance the prompt's \
| an assumption |
| costs on half the devices | as calibrated: one part stays, one doubles | an assumption |
| old log-probs | none when asynchronous | published |
| push | {push_s:.2f} s, both sides at a stand: 15.2 GB at 8.25 GB/s | the rate that verl gives for 30B |
| begun answers after a push | are read anew: {recompute:.0f} s for a full engine, each token at its share \
of a decoding step | the first is verl's code, the second an assumption |
| scoring, evaluation | no time when asynchronous | an assumption |
| steps simulated | 4, after 2 that do not count | other windows moved a prediction by up to 3 % |

The knobs:

| verl | here |
| --- | --- |
| a step is 4 updates, with weights sent after the last | `groups_per_step` B 128, `publish_every` 4 |
| `staleness_threshold` s: at most (1 + s) * 512 prompts are out after a push, and until the next none takes \
the place of one that was trained | `pipeline_depth` D: (D + 1) * B is the mean of that, rounded, and every \
place is taken again at once |
| no bound on the age of one answer | `max_staleness` 100, which is never reached |
| `partial_rollout`: a push breaks answers off, and they go on after it | `in_flight_updates`, \
`kv_after_swap: recompute`, `weight_sync.overlap` |
| staleness 0: no prompt is out when weights are sent, but the learner starts on the first 128 that are \
there | none is the same, so two rows stand for it: D 0 with B 512 has the same staleness, and waits for all \
512; D 1 with whole answers starts early, and is not synchronous |

## How the lengths move it

Nothing published says how long the answers were. Each line is calibrated anew, and predicts the first 200
steps; columns are H20s at a staleness:
"""
MISFITS = """\
## What does not fit

- **Updates are predicted too slow, and the learner's wait too short**, and one error hides a part of the
  other. Predicted updates take {update_low:.2f} to {update_high:.2f} times as long as those
  published (first 200 steps). With a staleness above 0 the predicted learner waits {wait_low:.0f} to
  {wait_high:.0f} s a step, the published one {published_low:.0f} to {published_high:.0f} s.
  By verl's scripts the colocated runs move parameters and optimizer between host and device, and the
  asynchronous ones do not: some of the {fixed:.0f} s that an update takes on any number of devices is that,
  and no colocated row says how much. verl's wait includes putting the batch together, which is not modelled.
- **The push** is in the predicted step, and by verl's code not in the published one.
- **Staleness 0.** A learner that starts on the first quarter of what was begun after a push, with nothing
  begun until the next, would be D 3 and S 3 with `publish_every` 4; but S has to be at least
  D + `publish_every` - 1. Starting early hides at most three of four updates: D 0 less those is
  {streamed:.0f} s, {streamed_error:+.0f} %.
- **Staleness 0.3 and 0.5** come to the same D, and so to the same prediction.
- **The whole runs.** Three rows whose answers differ in length do not lie on one line: the row on 32 H20
  makes every token dear, and the asynchronous runs had no such answers.
- **One run a row**, published without a spread.
"""


def error(found: float, published: float) -> float:
    """Per cent; positive where the prediction is too slow."""
    return 100 * (found / published - 1)


def errors(part: Figures) -> list[float]:
    return [error(row["predicted"]["step"], row["published"]["step"]) for row in part["asynchronous"]]


def speedups(part: Figures, row: Figures) -> tuple[float, float]:
    """Predicted and published, over the colocated row of as many devices."""
    devices = row["published"]["devices"]
    base = next(c for c in part["colocated"] if c["published"]["devices"] == devices)
    predicted, published = (base[of]["step"] / row[of]["step"] for of in ("predicted", "published"))
    return predicted, published


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for cells in (names, ["---:"] * len(names), *rows):
        yield f"| {' | '.join(cells)} |"
    yield ""


def asynchronous(part: Figures) -> Iterator[str]:
    rows = []
    for row in part["asynchronous"]:
        published, schedule = row["published"], row["schedule"]
        half = published["devices"] // 2
        predicted, claimed = speedups(part, row)
        rows.append(
            [
                f"{half} + {half}",
                f"{published['staleness']:g}",
                f"{schedule['groups']}, {schedule['depth']}",
                f"{row['predicted']['step']:.0f}",
                f"{published['step']:.0f}",
                f"{error(row['predicted']['step'], published['step']):+.0f} %",
                *(f"{row['predicted'][name]:.0f} / {published[name]:.0f}" for name in ("generate", "update")),
                f"{predicted:.2f}",
                f"{claimed:.2f}",
            ]
        )
    names = ["H20s", "staleness", "B, D", "predicted s/step", "published", "error"]
    names += ["learner waits", "update", "predicted speed-up", "published"]
    yield from table(names, rows)


def colocated(part: Figures) -> Iterator[str]:
    rows = []
    for row in part["colocated"]:
        published = row["published"]
        phases = [published[name] for name in ("step", "generate", "old_logprobs", "update")]
        cells = [f"{seconds:.0f}" for seconds in (*phases, row["predicted"]["step"])]
        off = error(row["predicted"]["step"], phases[0])
        rows.append([str(published["devices"]), *cells, f"{off:+.0f} %"])
    names = ["H20s", "published s/step", "generate", "old log-probs", "update", "simulated s/step", "error"]
    yield from table(names, rows)


def costs(part: Figures) -> str:
    c = part["costs"]
    decoding = f"{1e3 * c['token_s']:.1f} ms, and {1e3 * c['sequence_s']:.3f} ms for each answer"
    update = f"{c['update_s']:.0f} s, and {1e6 * c['update_token_s']:.0f} us a token on 4 devices"
    old = f"{c['old_s']:.0f} s, and {1e6 * c['old_token_s']:.0f} us"
    return (
        f"a decoding step of an engine {decoding};\n  an update {update}; old log-probs {old};\n"
        f"  the rest of a colocated step {c['turn_s']:.0f} s"
    )


def sensitivity(half: Figures, others: Sequence[Figures]) -> Iterator[str]:
    rows = []
    asked = [row["published"] for row in others[0]["asynchronous"]]
    same = [row for row in half["asynchronous"] if row["published"] in asked]
    parts = [{**half, "asynchronous": same}, *others]
    for part in parts:
        lengths = part["lengths"]
        seconds = [f"{row['predicted']['step']:.0f}" for row in part["asynchronous"]]
        size = statistics.fmean(map(abs, errors(part)))
        rows.append([f"{lengths['mean']:.0f}", f"{lengths['sigma']:g}", *seconds, f"{size:.0f} %"])
    published = [f"{row['published']['step']:.0f}" for row in parts[0]["asynchronous"]]
    rows.append(["published", "", *published, ""])
    names = [f"{row['devices']} at {row['staleness']:g}" for row in asked]
    yield from table(["mean", "sigma", *names, "mean error"], rows)


def misfits(part: Figures) -> dict[str, float]:
    rows = part["asynchronous"]
    updates = [row["predicted"]["update"] / row["published"]["update"] for row in rows]
    stale = [row for row in rows if row["published"]["staleness"] > 0]
    waits = [row["predicted"]["generate"] for row in stale]
    published = [row["published"]["generate"] for row in stale]
    whole = next(row for row in rows if row["schedule"]["depth"] == 0)
    streamed = whole["predicted"]["step"] - 0.75 * whole["predicted"]["update"]
    return {
        "update_low": min(updates),
        "update_high": max(updates),
        "wait_low": min(waits),
        "wait_high": max(waits),
        "published_low": min(published),
        "published_high": max(published),
        "fixed": part["costs"]["update_s"],
        "streamed": streamed,
        "streamed_error": error(streamed, whole["published"]["step"]),
    }


def page(report: Figures) -> str:
    """Markdown."""
    half, whole, assumed = report["first_half"], report["whole"], report["assumed"]
    met = {part: sum(abs(e) <= AIM for e in errors(report[part])) for part in ("first_half", "whole")}
    lengths, recompute = half["lengths"], half["costs"]["recompute_s"]
    lines = [
        HEAD.format(aim=AIM, count=len(half["asynchronous"]), **met),
        *asynchronous(half),
        WHOLE,
        *asynchronous(whole),
        CALIBRATION.format(half=costs(half), whole=costs(whole)),
        *colocated(half),
        *colocated(whole),
        ASSUMPTIONS.format(**assumed, mean=lengths["mean"], sigma=lengths["sigma"], recompute=recompute),
        *sensitivity(half, report["sensitivity"]),
        MISFITS.format(**misfits(half)).rstrip("\n"),
    ]
    return "\n".join(lines) + "\n"
