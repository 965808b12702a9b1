"""A cluster of three nodes on this machine: who lands where, what joins and leaves, and runs as jobs.

The tests share the cluster, in the order in which they stand here: each leaves it as the next one wants it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from asyncrl.config_load import parse_config, read_values
from asyncrl.errors import PlacementError
from asyncrl.inherited import set_inherited
from asyncrl.placement import close_session, open_session

from .deaths import wait_until
from .runs import REWARDS, TINY, Run, start

HAS_JOB_SERVER = find_spec("aiohttp_cors") is not None
NOTICED_WITHIN_S = 90.0
ENDLESS = ("run.steps=100000", "data.eval=null", "eval.every=0", "checkpoint.every=0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head and two more nodes, a CPU each."""
    set_inherited()
    # The entry point of a job is looked up on the path that the cluster was started with.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    head = {"num_cpus": 1, "include_dashboard": HAS_JOB_SERVER, "dashboard_port": 0}
    with socket.create_server(("127.0.0.1", 0)) as free:  # the usual one may be another session's
        head["dashboard_agent_listen_port"] = free.getsockname()[1]
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


def residents(node: Any, kind: str) -> list[psutil.Process]:
    """Actors of a kind on a node of the cluster: Ray names a process after its actor."""
    (raylet,) = node.all_processes["raylet"]
    found = psutil.Process(raylet.process.pid).children(recursive=True)
    return [process for process in found if f"::{kind}" in " ".join(process.cmdline())]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("placement.nodes=4",), r"placement\.nodes: found 4, the cluster has 3"),
        (("learner.device=cuda", "learner.ranks=2"), "need 2 GPUs, the cluster has 0"),
        (("placement.learner.nodes=[10.9.9.9]",), r"placement\.learner\.nodes: found 10\.9\.9\.9"),
        (
            ("placement.generators.strategy=STRICT_PACK", "generators.replicas=2"),
            r"STRICT_PACK for 2 generators, 2 CPUs on one node; the roomiest has room for 1",
        ),
        (("generators.replicas=3",), "need 4 CPUs, the cluster has 3"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused_before_any_actor_starts(
    cluster: Cluster, tmp_path: Path, overrides: tuple[str, ...], says: str
) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    config = parse_config(read_values(file), [f"placement.address={cluster.address}", *overrides])
    try:
        with pytest.raises(PlacementError, match=says):
            open_session(config)
        nodes = [cluster.head_node, *cluster.worker_nodes]
        assert not any(residents(node, "LearnerActor") + residents(node, "GeneratorActor") for node in nodes)
    finally:
        close_session()


def test_generators_come_and_go_with_their_nodes(cluster: Cluster, tmp_path: Path) -> None:
    head, (first, second) = cluster.head_node, cluster.worker_nodes
    run = start(
        tmp_path,
        *ENDLESS,
        "generators={replicas: 2, min: 2, max: 3, below_min_s: 1, slots: 8, health_timeout_s: 15}",
        f"placement={{address: '{cluster.address}', learner: {{nodes: ['{head.node_id}']}}, "
        "generators: {strategy: STRICT_SPREAD}}",
        name="nodes",
    )
    try:
        run.wait_for_steps(2)
        assert len(residents(head, "LearnerActor")) == 1
        assert not residents(head, "GeneratorActor")
        assert [len(residents(node, "GeneratorActor")) for node in (first, second)] == [1, 1]

        before = run.metrics[-1]["policy_version"]
        third = cluster.add_node(num_cpus=1)
        wait_until(run, "another generator", NOTICED_WITHIN_S, lambda: "generator 2 has joined" in run.text)
        (joined,) = re.findall(r"generator 2 has joined, at version (\d+)", run.text)
        assert int(joined) >= before
        assert len(residents(third, "GeneratorActor")) == 1
        wait_until(run, "three at work", 60, lambda: run.metrics[-1]["generator/replicas_live"] == 3)

        cluster.remove_node(second, allow_graceful=False)
        wait_until(run, "one left", NOTICED_WITHIN_S, lambda: run.metrics[-1]["generator/left"] == 1)
        lines = len(run.metrics)
        wait_until(run, "the run going on", 60, lambda: len(run.metrics) >= lines + 2)
        assert run.metrics[-1]["generator/replicas_live"] == 2

        # One is left then, of at least two.
        cluster.remove_node(first)
        assert run.wait(NOTICED_WITHIN_S) == 1, run.text
    finally:
        for process in run.processes():
            process.kill()
    (step,) = re.findall(r"stopped after step (\d+), with a checkpoint of it", run.text)
    assert (run.folder / "checkpoints" / f"step_{step}" / "manifest.json").exists()
    assert "1 generator is left, generators.min = 2" in run.text
    states = ("running", "ready", "training", "trained", "filtered", "dropped", "failed")
    for line in run.metrics:
        assert line.get("staleness/max", 0) <= 2
        assert line["ledger/submitted"] == sum(line[f"ledger/{state}"] for state in states)
    assert run.metrics[-1]["ledger/failed"] == 0, "a prompt was blamed for a node that went away"
    ordinals = [end["ordinal"] for end in run.ledger]
    assert len(ordinals) == len(set(ordinals))


@pytest.mark.skipif(
    not HAS_JOB_SERVER and os.environ.get("CI") != "true",
    reason="Ray's job server is not installed: pip install 'asyncrl[cluster]'",
)
def test_a_job_goes_on_without_its_terminal_and_stops_after_a_checkpoint(
    cluster: Cluster, tmp_path: Path
) -> None:
    from ray.job_submission import JobSubmissionClient

    # Nodes on one machine share a folder for copies of code, and remove it from under each other: one stays.
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node)
    work, log = tmp_path / "work", tmp_path / "terminal.log"
    work.mkdir()
    shutil.copy(REWARDS, work / "rewards.py")
    (work / "run.yaml").write_text(TINY.replace(str(REWARDS), "rewards.py"))
    address = f"http://{cluster.head_node.webui_url}"
    command = [sys.executable, "-m", "asyncrl.cli", "train", "--config", "run.yaml", "--address", address]
    command += [f"run.dir={tmp_path / 'runs'}", "run.name=job", *ENDLESS]
    command += ["placement.learner.cpus=0", "placement.generators.cpus=0"]
    with log.open("w") as out:
        terminal = subprocess.Popen(command, cwd=work, stdout=out, stderr=subprocess.STDOUT, text=True)
    job = Run(tmp_path / "runs" / "job", terminal, uuid.uuid4().hex, log)
    try:
        job.wait_for_steps(2)
        # It comes through the cluster's dashboard, some time after it was written.
        wait_until(job, "the controller's log in the terminal", 60, lambda: "learner has" in job.text)
        terminal.send_signal(signal.SIGINT)
        assert terminal.wait(30) == 0, job.text
        assert "the run goes on without this terminal" in job.text
        (name,) = set(re.findall(r"ray job stop --address \S+ (\S+)", job.text))
        lines = len(job.metrics)
        client = JobSubmissionClient(address)
        following = subprocess.Popen(
            ["ray", "job", "logs", "--follow", "--address", address, name], stdout=subprocess.DEVNULL
        )
        job.process = following  # what wait_until takes for the life of the run
        wait_until(job, "steps without a terminal", 60, lambda: len(job.metrics) >= lines + 2)
        client.stop_job(name)
        following.wait(120)
        assert str(client.get_job_status(name)) == "STOPPED"
        last = job.metrics[-1]["step"]
        assert (job.folder / "checkpoints" / f"step_{last}" / "manifest.json").exists()
    finally:
        terminal.kill()
