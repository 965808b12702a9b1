"""The commands: ``asyncrl train | check | bench | tune | simulate | report | export | doctor``.

Invariants:
- Importing this module, ``--help`` and a config error import nothing heavy.
- A UsageError ends a command with its message alone and exit code 2; a bug ends it with a traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.errors import AsyncRLError, UsageError
from asyncrl.stop_signals import Interrupted, StopSignals

app = typer.Typer(
    help="Asynchronous reinforcement learning of language models with a staleness bound that holds.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[Path, typer.Option("--config", help="The run, as a YAML file.", metavar="FILE")]
OptionalConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Check the machine for this run.", metavar="FILE")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Settings that replace those of the file, e.g. run.steps=20.", metavar="[KEY.SUB=VALUE]..."
    ),
]
WorkloadFile = Annotated[
    Path,
    typer.Option("--workload", help="What to simulate, as a YAML file.", metavar="FILE"),
]
Modes = Annotated[
    str, typer.Option(help="Modes to compare: sync, async, colocated; with commas.", metavar="NAMES")
]
WarmUp = Annotated[int, typer.Option(help="Steps at the start that are left out.", min=0)]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write all figures here; - for the screen.", metavar="FILE")
]


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    address: Annotated[
        str | None,
        typer.Option(help="Run it as a job of this Ray cluster, and follow its log.", metavar="ADDRESS"),
    ] = None,
    rollout_only: Annotated[
        bool, typer.Option("--rollout-only", help="Record batches of the start model, without a learner.")
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option(help="Train on what this run's folder recorded, without generators.", metavar="RUN"),
    ] = None,
) -> None:
    """Run the config. Exit code: 0 done, 1 failed, 2 wrong usage, 130 or 143 stopped by a signal."""
    settings = [*(overrides or ()), *(["run.rollout_only=true"] if rollout_only else [])]
    if replay is not None:
        settings.append(f"run.replay={dumps(str(replay))}")
    if address is not None:
        with _exit_codes():
            from asyncrl.submission import submit

            raise typer.Exit(submit(config, settings, address))
    with _exit_codes(), StopSignals() as signals:
        from asyncrl.config_load import load_config

        loaded = load_config(config, settings)
        from asyncrl.run import train as run

        raise typer.Exit(run(loaded, signals))


@app.command()
def check(config: ConfigFile, overrides: Overrides = None) -> None:
    """Validate the config, the data and the rewards, score one row, and print the plan."""
    with _exit_codes():
        from asyncrl.config_load import load_config

        loaded = load_config(config, overrides or ())
        logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
        from rich.console import Console

        from asyncrl.check import validate

        Console().print(validate(loaded).table())


@app.command()
def bench(
    config: ConfigFile,
    overrides: Overrides = None,
    modes: Modes = "sync,async",
    steps: Annotated[int, typer.Option(help="Steps of each run that count.", min=1)] = 30,
    repeats: Annotated[int, typer.Option(help="Runs of each mode, in turn.", min=1)] = 3,
    warm_up: WarmUp = 5,
    json: JsonFile = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a report of the first run of each mode here.", metavar="FILE")
    ] = None,
) -> None:
    """Run the config in each mode, in turn, and say what overlap bought and what limits it."""
    with _exit_codes():
        from asyncrl.bench.modes import parse_modes
        from asyncrl.config_load import load_config

        names = parse_modes(modes)
        loaded = load_config(config, overrides or ())
        from rich.console import Console

        from asyncrl.bench.command import run_bench
        from asyncrl.run import set_up_logging

        set_up_logging(Console(stderr=True))
        console = Console(stderr=str(json) == "-")
        raise typer.Exit(
            run_bench(
                loaded,
                names,
                steps=steps,
                repeats=repeats,
                warm_up=warm_up,
                json_file=json,
                console=console,
                html_file=html,
            )
        )


@app.command()
def tune(
    config: ConfigFile,
    overrides: Overrides = None,
    from_run: Annotated[
        Path | None,
        typer.Option(help="Take the costs from this run's folder; else a short run is made.", metavar="RUN"),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Run the best two for real.")] = False,
    steps: Annotated[int, typer.Option(help="Steps that count of each of these runs.", min=1)] = 20,
    repeats: Annotated[int, typer.Option(help="Runs of each of the two, in turn.", min=1)] = 2,
    json: JsonFile = None,
) -> None:
    """Search the schedule on the simulator, with the config's own costs: speed against lag."""
    with _exit_codes():
        from asyncrl.config_load import load_config

        loaded = load_config(config, overrides or ())
        from rich.console import Console

        from asyncrl.run import set_up_logging
        from asyncrl.tune.command import run_tune

        set_up_logging(Console(stderr=True))
        console = Console(stderr=str(json) == "-")
        code = run_tune(
            loaded,
            from_run=from_run,
            verify=verify,
            repeats=repeats,
            steps=steps,
            json_file=json,
            console=console,
        )
        raise typer.Exit(code)


@app.command()
def simulate(
    workload: WorkloadFile,
    overrides: Overrides = None,
    modes: Modes = "sync,async",
    warm_up: WarmUp = 5,
    json: JsonFile = None,
    out: Annotated[
        Path | None, typer.Option(help="Write metrics, ledger and trace.json of each mode here.")
    ] = None,
) -> None:
    """Run a workload's costs through the real scheduler in virtual time: what overlap would buy."""
    with _exit_codes():
        from asyncrl.bench.modes import parse_modes
        from asyncrl.simulate.workload import load_simulation

        names = parse_modes(modes)
        load_simulation(workload, overrides or ())  # a mistake shows before anything heavy is imported
        from rich.console import Console

        from asyncrl.run import set_up_logging
        from asyncrl.simulate.command import run_simulation

        console = Console(stderr=str(json) == "-")
        set_up_logging(Console(stderr=True))
        run_simulation(
            workload,
            overrides or (),
            names,
            warm_up=warm_up,
            json_file=json,
            out=out,
            console=console,
        )


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs to compare.", metavar="RUN...")],
    html: Annotated[Path, typer.Option(help="The file to write.", metavar="FILE")] = Path("report.html"),
    open: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Compare runs on one HTML page: rewards, throughput, lag, who waited for whom, settings."""
    with _exit_codes():
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        from asyncrl.report.command import open_in_browser, write_report

        write_report(runs, html)
        if open:
            open_in_browser(html)


@app.command()
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint's folder, or a run's: then its best one.", metavar="FOLDER")
    ],
    to: Annotated[Path, typer.Option("--to", help="The folder to make.", metavar="FOLDER")],
    deepspeed_of: Annotated[
        str | None,
        typer.Option(help="FOLDER is a checkpoint that DeepSpeed wrote, of this model.", metavar="MODEL"),
    ] = None,
    allow_pickle: Annotated[
        bool, typer.Option(help="Run the code that DeepSpeed's files may hold: for those you trust.")
    ] = False,
) -> None:
    """Write the policy of a checkpoint as a folder that transformers and vLLM load."""
    with _exit_codes():
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        if deepspeed_of is not None:
            if not allow_pickle:
                raise UsageError(
                    f"{checkpoint}: DeepSpeed's checkpoints are pickles, which run the code that is in them: "
                    "give --allow-pickle if they are your own"
                )
            from asyncrl.learners.deepspeed_import import import_deepspeed

            import_deepspeed(checkpoint, to, deepspeed_of, trust_remote_code=False)
            return
        from rich.console import Console

        from asyncrl.export import config_of, find_checkpoint
        from asyncrl.export import export as write
        from asyncrl.run import resolve_model

        found = find_checkpoint(checkpoint)
        write(found, to, resolve_model(config_of(found), Console(stderr=True)))


@app.command()
def doctor(config: OptionalConfigFile = None, overrides: Overrides = None) -> None:
    """Look at this machine: versions, devices, limits, and whether process groups can be formed."""
    with _exit_codes():
        from asyncrl.config_load import load_config

        folder = load_config(config, overrides or ()).run.dir if config is not None else "runs"
        from rich.console import Console

        from asyncrl.doctor import examine, findings_table

        findings = examine(Path(folder))
        Console().print(findings_table(findings))
        raise typer.Exit(int(any(finding.status == "fail" for finding in findings)))


@contextmanager
def _exit_codes() -> Iterator[None]:
    try:
        yield
    except Interrupted as stop:
        typer.echo(f"{stop}: ended before training began", err=True)
        raise typer.Exit(stop.exit_code) from None
    except UsageError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except AsyncRLError as error:
        typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise typer.Exit(1) from None


def main() -> None:
    """The ``asyncrl`` command."""
    app()


if __name__ == "__main__":
    main()
