"""A reward server of the user's own, asked over HTTP in OpenRLHF's form.

The request is ``{"query": [...], "prompts": [...], "labels": [...]}``, the answer ``{"rewards": [...]}``,
with ``scores`` and ``extra_logs`` if it likes.

Invariants:
- A connection that fails and a status of 5xx are tried again, ``retries`` times; whatever else the server
  says is its answer, and no failure is ever a reward.
- The request runs in a thread of the worker, so that many are under way at the same time.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

from asyncrl.rewards.binder import Logged, Sample, group_values
from asyncrl.rewards.results import Value, of_group

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_FIRST_PAUSE_S = 0.1
_LARGEST_ANSWER = 64 << 20


def is_url(path: str) -> bool:
    return path.startswith(("http://", "https://"))


class RemoteReward:
    """The server at ``url``. ``retries``: further tries; ``timeout_s``: seconds that each may take."""

    def __init__(self, url: str, *, retries: int = 3, timeout_s: float = 10.0) -> None:
        self._url = url
        self._retries = retries
        self._timeout_s = timeout_s
        # A proxy is for the way out: a server on this machine is asked directly.
        local = urllib.parse.urlsplit(url).hostname in _LOOPBACK
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))

    async def run_async(self, samples: Sequence[Sample]) -> list[Value]:
        """The value of each sample.

        Raises ConnectionError when every try has failed, and ValueError for an answer that is none.
        """
        values = group_values(samples, "openrlhf", Logged())
        body = {"query": values["queries"], "prompts": values["prompts"], "labels": values["labels"]}
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        for attempt in range(self._retries + 1):
            try:
                answer = await asyncio.to_thread(self._ask, request)
                break
            except (OSError, TimeoutError) as error:  # URLError is an OSError, and so is HTTPError
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    raise ValueError(f"{self._url}: found status {error.code}; expected 200") from error
                if attempt == self._retries:
                    raise ConnectionError(
                        f"{self._url}: no answer in {attempt + 1} tries, the last: {error}"
                    ) from error
                await asyncio.sleep(_FIRST_PAUSE_S * 2**attempt)
        try:
            found: Any = json.loads(answer)
        except ValueError as error:
            raise ValueError(f"{self._url}: found an answer that is not JSON: {error}") from error
        return of_group(found, len(samples), Logged())

    def _ask(self, request: urllib.request.Request) -> bytes:
        with self._opener.open(request, timeout=self._timeout_s) as response:
            answer: bytes = response.read(_LARGEST_ANSWER + 1)
        if len(answer) > _LARGEST_ANSWER:
            raise ValueError(f"{self._url}: found an answer of more than {_LARGEST_ANSWER} bytes")
        return answer
