"""Whole runs on the files that users of other projects have: data and reward of each, as they are."""

from __future__ import annotations

import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from .runs import TINY, assert_sound, finish

VERL_ROWS = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{i}+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i, "split": "train"},
    }
    for i in range(12)
]
VERL_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info["split"] == "train"
    return {"score": float(len(solution_str) % 2), "right": solution_str.strip() == ground_truth}
"""
TRL_ROWS = [{"prompt": [{"role": "user", "content": f"{i}+2="}], "solution": str(i + 2)} for i in range(12)]
TRL_REWARD = """
def length_reward(prompts, completions, completion_ids, solution, log_metric, **kwargs):
    assert all(p == prompts[0] for p in prompts) and len(set(solution)) == 1
    log_metric("shortest", min(map(len, completion_ids)))
    return [float(len(c[0]["content"]) % 2) for c in completions]

async def sometimes(completions, **kwargs):
    return [None if len(c[0]["content"]) % 3 else 0.5 for c in completions]
"""
OPENRLHF_ROWS = [{"input": f"{i}+3=", "label": str(i + 3), "datasource": "sums"} for i in range(12)]
OPENRLHF_REWARD = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    assert all(q.startswith(p) for q, p in zip(queries, prompts))
    rewards = torch.tensor([float(len(q) % 2) for q in queries])
    lengths = torch.tensor([len(q) for q in queries])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"length": lengths}}
"""
SKYRL_ROWS = [
    {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"{i}+4="}],
        "env_class": "sums",
        "reward_spec": {"method": "rule", "ground_truth": str(i + 4)},
        "extra_info": {"index": i},
    }
    for i in range(12)
]
RUBRIC = """
class Rubric:
    def __init__(self, funcs, weights):
        self.funcs, self.weights = funcs, weights

def correct(completion, answer):
    return float(completion[-1]["content"] == answer)

async def parity(completion, state):
    return float(len(completion[-1]["content"]) % 2)

rubric = Rubric([correct, parity], [1.0, 0.5])
"""
GYM_ROWS = [
    {"question": f"{i} + 5 =", "answer": str(i + 5), "metadata": {"source_dataset": "chain_sum"}}
    for i in range(12)
]


def write(folder: Path, rows: list[dict[str, Any]], name: str) -> Path:
    file = folder / name
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all, so that they share the small model."""
    return tmp_path_factory.mktemp("forms")


@pytest.mark.parametrize(
    ("name", "rows", "suffix", "code", "functions", "metrics"),
    [
        (
            "verl",
            VERL_ROWS,
            "parquet",
            VERL_REWARD,
            ["compute_score"],
            {"compute_score", "compute_score/right"},
        ),
        (
            "trl",
            TRL_ROWS,
            "jsonl",
            TRL_REWARD,
            ["length_reward", "sometimes"],
            {"length_reward", "length_reward/shortest", "sometimes"},
        ),
        (
            "openrlhf",
            OPENRLHF_ROWS,
            "jsonl",
            OPENRLHF_REWARD,
            ["reward_func"],
            {"reward_func", "reward_func/length"},
        ),
        ("skyrl", SKYRL_ROWS, "parquet", RUBRIC, ["rubric"], {"rubric", "rubric/correct", "rubric/parity"}),
    ],
)
def test_data_and_reward_of_each_project_train_as_they_are(
    folder: Path,
    name: str,
    rows: list[dict[str, Any]],
    suffix: str,
    code: str,
    functions: list[str],
    metrics: set[str],
) -> None:
    (folder / f"{name}_reward.py").write_text(code)
    listed = ", ".join(f'"{folder / name}_reward.py:{function}"' for function in functions)
    run = finish(
        folder,
        "run.steps=3",
        f"data.train={write(folder, rows, f'{name}.{suffix}')}",
        "data.eval=null",
        "model.create.seed=1",
        f"reward.functions=[{listed}]",
        "reward.timeout_s=60",
        config=TINY,
        name=name,
    )
    assert_sound(run, max_staleness=2, capacity=4)
    assert f"data.train: 12 {name} rows" in run.text
    last = run.metrics[-1]
    assert (last["policy_version"], last["ledger/failed"]) == (3, 0)
    found = {key for line in run.metrics for key in line}
    assert {f"reward/{metric}_mean" for metric in metrics} <= found


class Handler(http.server.BaseHTTPRequestHandler):
    """A user's reward server."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        payload = json.dumps({"rewards": [float(len(query) % 2) for query in body["query"]]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None: ...


def test_a_mixture_is_trained_by_a_server_and_measured_on_sets_with_names(folder: Path) -> None:
    train = [
        {"path": str(write(folder, OPENRLHF_ROWS, "mixed.jsonl")), "weight": 1},
        {"path": str(write(folder, GYM_ROWS, "gym.parquet")), "weight": 2},
    ]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        run = finish(
            folder,
            "run.steps=3",
            f"data.train={json.dumps(train)}",
            "data.eval=null",
            f"data.eval_sets={{sums: {write(folder, VERL_ROWS, 'eval.jsonl')}}}",
            f'reward.functions=["http://127.0.0.1:{server.server_port}/get_reward"]',
            "reward.timeout_s=60",
            config=TINY,
            name="mixture",
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert_sound(run, max_staleness=2, capacity=4)
    assert "data.train.mixture[1]: 12 reasoning_gym rows" in run.text
    evaluated = [line for line in run.metrics if "eval/reward_mean" in line]
    assert [line["eval/sums/reward_mean"] for line in evaluated] == [
        line["eval/reward_mean"] for line in evaluated
    ]
    assert run.metrics[-1]["ledger/failed"] == 0
