"""The Hugging Face hub: whether it answers, asked once and quickly.

The hub's own libraries find out by retrying, for half a minute a file, with a warning each time.

Invariants:
- Nothing that would import those libraries is imported here.
- A hub that does not answer is switched off for this process and all that it starts, by the libraries' own
  ``HF_HUB_OFFLINE``: what is in the local cache still works, and the rest fails at once.
- Only a connection that fails counts. A refusal is an answer.
"""

from __future__ import annotations

import logging
import os
import ssl
import urllib.request
from pathlib import Path
from urllib.error import HTTPError, URLError

log = logging.getLogger(__name__)

_OFFLINE = "HF_HUB_OFFLINE"
_TRUE = ("1", "ON", "YES", "TRUE")


def endpoint() -> str:
    """Address of the hub, or of the mirror that ``HF_ENDPOINT`` names."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def hub_is_offline(timeout_s: float = 5.0) -> bool:
    """Whether only the local cache can be used: the user said so, or the hub does not answer now."""
    if os.environ.get(_OFFLINE, "").upper() in _TRUE:
        return True
    reason = _unreachable(endpoint(), timeout_s)
    if reason is None:
        return False
    log.warning("the hub at %s cannot be reached (%s): using its local cache alone", endpoint(), reason)
    os.environ[_OFFLINE] = "1"
    return True


def _unreachable(address: str, timeout_s: float) -> str | None:
    """Why ``address`` does not answer; None if it does. Goes through the system's proxy, if one is set."""
    try:
        request = urllib.request.Request(address, method="HEAD")
        with urllib.request.urlopen(request, timeout=timeout_s):
            return None
    except HTTPError:
        return None
    except URLError as error:
        # The libraries bring certificates of their own, so theirs may well be accepted.
        return None if isinstance(error.reason, ssl.SSLError) else str(error.reason)
    except OSError as error:
        return str(error)


def model_place(path: str) -> str:
    """A model's folder by its whole path, for actors have a working folder of their own; or its hub name."""
    return str(Path(path).resolve()) if Path(path).exists() else path
