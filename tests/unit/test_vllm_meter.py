"""What vLLM's reports add up to, by a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace

from asyncrl.generators.vllm_meter import Meter


def report(meter: Meter, running: int, tokens: int = 0, computed: int = 0) -> None:
    meter.record(
        SimpleNamespace(num_running_reqs=running),
        SimpleNamespace(num_generation_tokens=tokens, prompt_token_stats=SimpleNamespace(computed=computed)),
    )


def test_busy_and_slot_seconds_leave_out_idle_and_paused_time() -> None:
    now = 0.0
    meter = Meter(8, lambda: now)
    now = 10.0  # idle
    meter.begin()
    now = 11.0  # one second of prefill, with one sequence
    report(meter, running=4, tokens=4, computed=30)
    now = 13.0
    report(meter, running=2, tokens=4)
    now = 14.0
    meter.stand_still()
    now = 20.0
    meter.go_on()
    now = 21.0
    report(meter, running=0, tokens=2)
    now = 50.0  # idle again
    meter.begin()
    now = 51.0
    report(meter, running=0, tokens=1, computed=5)
    assert (meter.tokens, meter.prefill_tokens) == (11, 35)
    assert meter.busy_s == 1 + 2 + 1 + 1 + 1
    assert meter.slot_s == 1 * 1 + 2 * 4 + 1 * 2 + 1 * 2 + 1 * 1


def test_time_and_tokens_with_all_slots_taken_are_counted_apart() -> None:
    now = 0.0
    meter = Meter(4, lambda: now)
    meter.begin()
    now = 1.0
    report(meter, running=4, tokens=1)
    now = 3.0
    report(meter, running=4, tokens=8)
    now = 4.0
    report(meter, running=2, tokens=4)
    now = 6.0
    report(meter, running=0, tokens=4)
    assert (meter.full_s, meter.full_tokens) == (3.0, 12)
    assert (meter.busy_s, meter.tokens) == (6.0, 17)
    meter.reset()
    assert (meter.full_s, meter.full_tokens) == (0.0, 0)


def test_begin_changes_nothing_while_sequences_run() -> None:
    now = 0.0
    meter = Meter(8, lambda: now)
    meter.begin()
    now = 1.0
    report(meter, running=3)
    meter.begin()
    now = 2.0
    report(meter, running=0)
    assert (meter.busy_s, meter.slot_s) == (2.0, 4.0)
    meter.reset()
    assert (meter.busy_s, meter.running, meter.tokens) == (0.0, 0, 0)
