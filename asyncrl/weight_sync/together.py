"""The phases of a push: several parts do something at once, or the push has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from asyncrl.errors import PushTimeoutError


async def together(timeout_s: float, doing: str, *calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """All calls at once, within ``weight_sync.timeout_s``; the first failure cancels the rest.

    Raises that failure, or PushTimeoutError.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.gather(*tasks)
    except TimeoutError:
        raise PushTimeoutError(f"{doing}: not done after weight_sync.timeout_s = {timeout_s:g} s") from None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
