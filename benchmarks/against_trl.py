"""TRL's GRPOTrainer against ``asyncrl train``: the same model, data, reward and settings on two CPU cores.

    python benchmarks/against_trl.py --trl-python VENV/bin/python     runs what is missing, then the report
    python benchmarks/against_trl.py --trl-venv VENV                  likewise, and makes TRL's environment
    python benchmarks/against_trl.py --report                         the report of what there is

Workloads, each with several seeds, the sides in turn (A B A B):

- ``even``: the quickstart's sums, whose answers are about equally long;
- ``long-tailed``: counting to n, n log-normal, answers of at most 200 tokens;
- ``smollm2``: SmolLM2-135M-Instruct (``make smollm2``) on sums and differences of one-digit numbers.

A run's config is asyncrl's, and TRL's settings are made out of it, prompts in their order, learning rate of
every update and reward function included. What is in the JSON file with the same settings is not run again:
what was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from against_trl_page import SIDES, Run, as_json, evaluated_versions, markdown, of_json

from asyncrl.bench.machine import describe_machine
from asyncrl.bench.runs import QUIET, Interrupted, read_lines, run_command, train_once
from asyncrl.config import Config
from asyncrl.config_load import load_config
from asyncrl.errors import BenchRunError, UsageError

ROOT = Path(__file__).parent.parent
TRL = "1.16.0"
CORES = tuple(sorted(os.sched_getaffinity(0)))[:2]
SEEDS = (0, 1, 2)
COMMON = (
    *QUIET,
    "eval.max_prompts=null",
    "algorithm.clip_dual=null",
    f"generators.cpu_cores=[{CORES[0]}]",
    f"learner.cpu_cores=[{CORES[-1]}]",
)
"""Settings of every run: no files, TRL's form of the loss, a core each."""
log = logging.getLogger("against_trl")


@dataclass(frozen=True)
class Workload:
    """What both sides do; ``settings`` stand over those of ``config``."""

    config: str
    steps: int
    evaluate_every: int
    micro_batch: int
    """TRL's samples in one forward pass; asyncrl's are set by tokens, in the config."""
    settings: tuple[str, ...] = ()


def smollm2_dtype() -> str:
    """bfloat16 where the processor multiplies it itself; others are several times slower at it."""
    flags = Path("/proc/cpuinfo").read_text()
    return "bfloat16" if "avx512_bf16" in flags or "amx_bf16" in flags else "float32"


WORKLOADS = {
    "even": Workload(
        "quickstart.yaml",
        steps=100,
        evaluate_every=25,
        micro_batch=128,
        # TRL too has all answers of a step under way at once.
        settings=("generators.slots=128", "learner.shared_prompts=true"),
    ),
    "long-tailed": Workload(
        "bench-cpu.yaml",
        steps=60,
        evaluate_every=20,
        micro_batch=128,
        settings=("data.eval.python=asyncrl.examples.counting:every", "data.eval.args.step=5"),
    ),
    "smollm2": Workload(
        "smollm2-arithmetic-torch.yaml",
        steps=25,
        evaluate_every=5,
        micro_batch=16,
        settings=(
            f"model.dtype={smollm2_dtype()}",
            "eval.samples=1",
            "eval.temperature=0",
            f"learner.cpu_cores=[{CORES[0]},{CORES[-1]}]",
        ),
    ),
}


def settings_of(workload: Workload, steps: int, seed: int) -> list[str]:
    """All overrides of a run of ``workload``, but for its folder."""
    own = [f"run.steps={steps}", f"run.seed={seed}", f"eval.every={workload.evaluate_every}"]
    return [*COMMON, *workload.settings, *own]


def planned(names: Sequence[str], seeds: Sequence[int], steps: int | None) -> Iterator[Run]:
    """The runs, without what they measure, in the order in which they are made."""
    for name in names:
        workload = WORKLOADS[name]
        for seed in seeds:
            settings = settings_of(workload, steps or workload.steps, seed)
            for side in SIDES:
                extra = [f"trl.micro_batch={workload.micro_batch}"] if side == "trl" else []
                yield Run(name, side, seed, workload.config, [*settings, *extra])


# ---------------------------------------------------------------- the sides


def job_of(config: Config, model: Path, micro_batch: int) -> dict[str, Any]:
    """The run of ``config`` in the words of ``trl_side``: every prompt of it, in the order of the stream."""
    from transformers import AutoTokenizer

    from asyncrl.data.prompts import load_prompts
    from asyncrl.learners.schedule import learning_rate

    prompts = load_prompts(config, AutoTokenizer.from_pretrained(model))
    learner, rollout, steps = config.learner, config.rollout, config.run.steps
    reward = config.reward.functions[0].path

    def row(task: Any) -> dict[str, Any]:
        return {"prompt": task.prompt, "prompt_ids": list(task.prompt_ids), "answer": task.row["answer"]}

    return {
        "model": str(model),
        "dtype": config.model.dtype,
        "prompts": [row(prompts.train.task(i)) for i in range(steps * rollout.groups_per_step)],
        "held_out": [row(task) for task in prompts.eval],
        "evaluated": evaluated_versions(steps, config.eval.every),
        "reward": reward if ":" in reward else f"asyncrl.rewards.builtin:{reward}",
        "groups_per_step": rollout.groups_per_step,
        "group_size": rollout.group_size,
        "max_new_tokens": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "rates": [
            learning_rate(
                update,
                peak=learner.lr,
                schedule=learner.lr_schedule,
                warmup_steps=learner.warmup_steps,
                total_steps=steps,
            )
            for update in range(steps)
        ],
        "betas": list(learner.betas),
        "eps": learner.eps,
        "weight_decay": learner.weight_decay,
        "max_grad_norm": learner.max_grad_norm,
        "clip_low": config.algorithm.clip_low,
        "clip_high": config.algorithm.clip_high,
        "micro_batch": micro_batch,
        "threads": len(CORES),
        "seed": config.run.seed,
    }


def policy_of(config: Config) -> Path:
    """The folder of the model that both sides start from, made on first use."""
    from asyncrl.models.create import ensure_model

    if config.model.path is None:
        return ensure_model(config)
    if not (path := Path(config.model.path)).is_dir():
        raise SystemExit(f"found no folder {path}; expected a model there: run make smollm2")
    return path


def measure_trl(run: Run, folder: Path, python: Path) -> Run:
    """A run of TRL, in a process of its own."""
    workload = WORKLOADS[run.workload]
    overrides = [s for s in run.settings if not s.startswith("trl.")]
    config = load_config(ROOT / "configs" / run.config, [*overrides, f"run.dir={folder}"])
    job, result = folder / f"{run.name}.job.json", folder / f"{run.name}.result.json"
    job.write_text(json.dumps(job_of(config, policy_of(config).resolve(), workload.micro_batch)))
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(len(CORES)),
        "HF_HUB_OFFLINE": "1",
    }
    command = [str(python), str(ROOT / "benchmarks" / "trl_side.py"), str(job), str(result)]
    run_command(command, folder / f"{run.name}.log", run.name, environment)
    found = json.loads(result.read_text())
    samples = config.rollout.groups_per_step * config.rollout.group_size
    return run.with_figures(samples_a_step=samples, **found)


def measure_asyncrl(run: Run, folder: Path) -> Run:
    """A run of asyncrl, as a user would start it."""
    file = ROOT / "configs" / run.config
    shutil.rmtree(folder / run.name, ignore_errors=True)  # of one that was stopped
    config = load_config(file, [*run.settings, f"run.dir={folder}"])
    policy_of(config)
    train_once(file, folder, run.name, run.settings)
    lines = read_lines(folder / run.name)
    steps = [line for line in lines if line["step"] > 0]
    samples = config.rollout.groups_per_step * config.rollout.group_size
    for line in steps:
        trained = line["perf/samples_per_s"] * line["timing_s/step"]
        if line["policy_version"] != line["step"] or round(trained) != samples:
            raise BenchRunError(
                f"{run.name}, step {line['step']}: found {trained:g} samples trained; expected {samples}"
            )
    return run.with_figures(
        samples_a_step=samples,
        step_s=[line["timing_s/step"] - line["timing_s/eval"] for line in steps],
        rewards=[line["reward/mean"] for line in steps],
        lengths=[line["response_length/mean"] for line in steps],
        evals=[(line["step"], line["eval/reward_mean"]) for line in lines if "eval/reward_mean" in line],
        packages={name: version(name) for name in ("torch", "transformers", "ray", "deepspeed")},
        lag_max=max(line["staleness/max"] for line in steps),
    )


# ---------------------------------------------------------------- the measurement


def perform(
    runs: Sequence[Run],
    there: Sequence[Run],
    measure: Callable[[Run], Run],
    keep: Callable[[list[Run]], None],
) -> list[Run]:
    """Make those of ``runs`` that are not ``there`` yet; ``keep`` gets all that there are after each."""
    found = list(there)
    left = [run for run in runs if not any(run.is_same_as(other) for other in found)]
    log.info("%d of %d runs are there already", len(runs) - len(left), len(runs))
    for number, run in enumerate(left, 1):
        log.info("run %d of %d: %s", number, len(left), run.name)
        done = measure(run)
        found.append(done)
        keep(found)
        # Null for a run too short to have steps that count.
        log.info("%s: %s s a step, held-out reward %s", run.name, done.step_mean_s, done.evals)
    return found


def make_environment(folder: Path) -> Path:
    """TRL's Python in ``folder``, with this environment's torch and transformers; made on first use."""
    python = folder / "bin" / "python"
    if (folder / "made").exists():
        return python
    log.info("installing TRL %s into %s", TRL, folder)
    venv.create(folder, clear=True, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    # torch first and alone: an index that offers a CPU build is then taken at its word.
    torch = f"torch=={version('torch').partition('+')[0]}"
    subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, torch, f"trl=={TRL}", f"transformers=={version('transformers')}"], check=True)
    (folder / "made").touch()
    return python


def require_versions(python: Path) -> None:
    """SystemExit unless ``python`` has the TRL that is measured, and this environment's torch."""
    asked = {"trl": TRL, "torch": version("torch").partition("+")[0]}
    script = f"from importlib.metadata import version; print(*map(version, {list(asked)}))"
    said = subprocess.run([str(python), "-c", script], check=True, capture_output=True, text=True).stdout
    for name, found in zip(asked, said.split(), strict=True):
        if found.partition("+")[0] != asked[name]:
            raise SystemExit(f"{python}: found {name} {found}; expected {asked[name]}")


def write(path: Path, text: str) -> None:
    """All or nothing: a measurement may be stopped at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--trl-python", type=Path, help=f"a Python that has TRL {TRL}")
    where.add_argument("--trl-venv", type=Path, help="a folder to make one in")
    where.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=tuple(WORKLOADS),
        default=tuple(WORKLOADS),
        help="workloads to run (default: all); the report is of all",
    )
    parser.add_argument("--steps", type=int, help="updates of each run (default: by workload)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--folder", type=Path, default=Path("runs/against-trl"), help="where the runs are")
    parser.add_argument("--json", type=Path, default=ROOT / "docs" / "against-trl.json")
    parser.add_argument("--markdown", type=Path, default=ROOT / "docs" / "against-trl.md")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    machine, found = of_json(given.json.read_text()) if given.json.exists() else (None, [])
    if not given.report:
        # Both sides have these cores and no others, whatever the machine has.
        os.sched_setaffinity(0, CORES)
        machine = describe_machine()
        python = given.trl_python or make_environment(given.trl_venv.resolve())
        require_versions(python)
        given.folder.mkdir(parents=True, exist_ok=True)

        def measure(run: Run) -> Run:
            if run.side == "trl":
                return measure_trl(run, given.folder, python)
            return measure_asyncrl(run, given.folder)

        def keep(runs: list[Run]) -> None:
            write(given.json, as_json(machine, runs))

        try:
            found = perform(list(planned(given.only, given.seeds, given.steps)), found, measure, keep)
        except (UsageError, BenchRunError) as error:
            raise SystemExit(str(error)) from error
        except Interrupted as interrupted:
            sys.exit(interrupted.exit_code)
    plans = list(planned(tuple(WORKLOADS), given.seeds, given.steps))
    chosen = [run for run in found if any(run.is_same_as(plan) for plan in plans)]
    if not chosen:
        raise SystemExit(f"none of {len(plans)} runs is in {given.json}: run without --report first")
    page = markdown(chosen, machine)
    write(given.markdown, page)
    sys.stdout.write(page)


if __name__ == "__main__":
    main()
