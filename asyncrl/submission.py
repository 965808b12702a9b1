"""``asyncrl train --address``: the run as a job of a Ray cluster, and this terminal as a window on its log.

Invariants:
- What can be seen to be wrong from here is refused before anything is sent.
- Once the job is accepted the run is the cluster's: neither Ctrl-C, nor a closed terminal, nor a connection
  that is lost ends it. How to stop it and how to look at it again is said at the start and at each of these.
- Nothing that the run writes lies in the copy of the working folder, which ends with the job.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import typer

from asyncrl.config import Config
from asyncrl.config_load import load_config
from asyncrl.errors import ConfigError, PlacementError

log = logging.getLogger(__name__)

_ON_THE_CLUSTER = "placement.address=auto"
"""The controller joins the cluster that it runs on."""
_INSTALL = "pip install 'asyncrl[cluster]', which is ray[default],"


def submit(file: Path, overrides: Sequence[str], address: str) -> int:
    """Have the cluster at ``address`` run the config, and follow its log; the run's exit code.

    0 if the terminal lets go of the log before the end. Raises ConfigError and PlacementError for what the
    user can fix.
    """
    overrides = (*overrides, _ON_THE_CLUSTER)
    folder = Path.cwd()
    config = load_config(file, overrides)
    require_portable(config, file, folder)
    from rich.console import Console

    from asyncrl.run import set_up_logging

    set_up_logging(Console(stderr=True))
    client = connect(address)
    job = _submit(client, config, entrypoint(file, folder, overrides), folder)
    log.info("%s is job %s of the cluster at %s\n%s", config.run.name, job, address, ways(job, address))
    return follow(client, job, address)


def require_portable(config: Config, file: Path, folder: Path) -> None:
    """Raise ConfigError for what the cluster's processes would not find, or what would not stay."""
    if not file.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(
            f"--config: found {file}, outside of the working folder {folder}, which is what the cluster gets "
            "a copy of; expected a file inside: start the command in the folder that holds config and code"
        )
    if not Path(config.run.dir).is_absolute():
        raise ConfigError(
            f"run.dir: found {config.run.dir!r} with --address; expected an absolute path, on storage that "
            "all nodes share: the cluster runs in a copy of this folder, which is removed with the job"
        )


def entrypoint(file: Path, folder: Path, overrides: Sequence[str]) -> str:
    """The command that the job runs, in its copy of ``folder``."""
    relative = file.resolve().relative_to(folder.resolve())
    return shlex.join(["python", "-m", "asyncrl.cli", "train", "--config", str(relative), *overrides])


def connect(address: str) -> Any:
    """A client of the cluster's job server. Raises PlacementError where there is none, or none of use."""
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except ConnectionError as error:
        raise PlacementError(
            f"--address: found {address!r}, where no job server answers ({error}); expected the address of a "
            "running cluster, as 'ray start --head' prints it (http://HOST:8265 or HOST:6379). The server is "
            f"part of the dashboard: {_INSTALL} on the head node, before Ray is started there"
        ) from error
    except (RuntimeError, ValueError, AssertionError) as error:
        if "ray[default]" in str(error):
            raise PlacementError(f"--address needs Ray's job client: {_INSTALL} here") from error
        raise PlacementError(
            f"--address: found {address!r}, which cannot be used: {error}; {_INSTALL} on the head node has "
            "the job server that is needed there"
        ) from error


def follow(client: Any, job: str, address: str) -> int:
    """Show the job's log until it ends, or until Ctrl-C; the run's exit code, 0 after Ctrl-C."""
    shown: Future[None] = Future()

    def show() -> None:
        try:
            asyncio.run(_show(client, job))
        except BaseException as error:  # noqa: BLE001 raised below
            shown.set_exception(error)
        else:
            shown.set_result(None)

    # In a thread that nobody waits for: a busy cluster may take long to say goodbye.
    threading.Thread(target=show, name="log of the job", daemon=True).start()
    try:
        shown.result()
    except KeyboardInterrupt:
        log.warning("the run goes on without this terminal\n%s", ways(job, address))
        return 0
    except (RuntimeError, OSError) as error:
        log.error("the log is cut off (%s); the run does not depend on it\n%s", error, ways(job, address))
        return 1
    return exit_code(client.get_job_info(job), address)


def exit_code(details: Any, address: str) -> int:
    """That of the run, from what the job server says of its job."""
    if details.driver_exit_code is not None:
        return int(details.driver_exit_code)
    codes = {"SUCCEEDED": 0, "STOPPED": 143, "FAILED": 1}
    status = str(details.status)
    if status not in codes:
        log.error("the log ended, and the job goes on\n%s", ways(details.submission_id, address))
        return 1
    if codes[status]:
        log.error("the job is %s: %s", status, details.message)
    return codes[status]


def ways(job: str, address: str) -> str:
    """How to look at the job again, and how to stop it."""
    at = f"--address {shlex.quote(address)} {job}"
    return (
        f"  follow it again:               ray job logs --follow {at}\n"
        f"  stop it, after a checkpoint:   ray job stop {at}"
    )


def _submit(client: Any, config: Config, command: str, folder: Path) -> str:
    # What is written inside the folder while it is copied has no business in the copy.
    runs = Path(config.run.dir).resolve()
    inside = runs.is_relative_to(folder.resolve()) and runs != folder.resolve()
    runtime_env: dict[str, Any] = {
        "working_dir": str(folder),
        "excludes": [f"/{runs.relative_to(folder.resolve())}/"] if inside else [],
        # Ray kills what has not ended so many seconds after a stop; by default 3, too few for a checkpoint.
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_stop_s(config))},
    }
    try:
        return str(client.submit_job(entrypoint=command, runtime_env=runtime_env))
    except (RuntimeError, ValueError) as error:
        raise PlacementError(f"--address: the cluster did not take the job: {error}") from error


def _stop_s(config: Config) -> int:
    """Longest that a stop takes: the running update, the copy of the state, and the files."""
    return int(config.learner.step_timeout_s + 2 * config.checkpoint.timeout_s) + 60


async def _show(client: Any, job: str) -> None:
    async for text in client.tail_job_logs(job):
        typer.echo(text, nl=False)
