"""Lines that came after a checkpoint move aside, each once, and a torn last line is mended."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.checkpoint.rollback import roll_back, roll_back_rollouts


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


@given(steps=st.lists(st.integers(0, 9), max_size=12), last=st.integers(0, 9), cut=st.integers(0, 40))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_byte_is_lost_and_no_line_is_in_both_files(
    tmp_path: Path, steps: list[int], last: int, cut: int
) -> None:
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.rolled_back.jsonl"
    aside.unlink(missing_ok=True)
    written = b"".join(json.dumps({"step": s, "at": i}).encode() + b"\n" for i, s in enumerate(steps))
    path.write_bytes(written[: len(written) - min(cut, len(written))])
    before = lines_of(path)
    kept = roll_back(path, lambda line: line["step"] <= last)
    assert all(line["step"] <= last for line in kept)
    assert [json.loads(line) for line in lines_of(path)] == kept
    assert sorted(lines_of(path) + lines_of(aside)) == sorted(before)
    again = roll_back(path, lambda line: line["step"] <= last)
    assert again == kept
    assert sorted(lines_of(path) + lines_of(aside)) == sorted(before)


def test_what_a_disk_made_of_a_line_moves_aside_and_later_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"ordinal": 0}\n\0\0\0\0\n[1]\n{"ordinal": 1}\n{"ordinal": 2')
    kept = roll_back(path, lambda line: True)
    assert kept == [{"ordinal": 0}, {"ordinal": 1}]
    assert path.read_bytes() == b'{"ordinal": 0}\n{"ordinal": 1}\n'
    aside = tmp_path / "ledger.rolled_back.jsonl"
    assert aside.read_bytes() == b'\0\0\0\0\n[1]\n{"ordinal": 2\n'


def test_without_a_file_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert roll_back(tmp_path / "metrics.jsonl", lambda line: True) == []
    assert list(tmp_path.iterdir()) == []


def test_batches_of_later_steps_move_aside(tmp_path: Path) -> None:
    names = [f"step_{step:06d}.msgpack" for step in (10, 20, 30)] + ["step_000030.msgpack.part", "notes"]
    for name in names:
        (tmp_path / name).write_text(name)
    for _ in range(2):
        roll_back_rollouts(tmp_path, after=10)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [names[0], *(f"{name}.rolled_back" for name in names[1:3]), *names[3:]]
        )
    (tmp_path / names[1]).write_text("again")
    roll_back_rollouts(tmp_path, after=19)
    assert (tmp_path / f"{names[1]}.rolled_back").read_text() == "again"
    roll_back_rollouts(tmp_path / "none", after=0)
