"""The calculator's game (``calculator.py``) as an agent that knows nothing of asyncrl but an address.

All that it uses of the policy is OpenAI's client, ``pip install openai``: it would play as well with any
other endpoint that speaks the same protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai import OpenAI

from asyncrl.examples.calculator import calculate

_CLIENT = OpenAI(api_key="none", base_url="http://127.0.0.1")
"""Connections are pooled over all trajectories; each has an address of its own."""


def play(task: Mapping[str, Any], base_url: str, turns: int = 2) -> float:
    """Ask the policy, calculate for it where it asks back. Reward 1.0 for the row's answer."""
    policy = _CLIENT.with_options(base_url=base_url)
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(turns):
        answer = policy.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        result = calculate(said)
        if result is None:
            return float(said == task["answer"])
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"={result}#"}]
    return 0.0
