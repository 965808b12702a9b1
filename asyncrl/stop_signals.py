"""SIGINT and SIGTERM, from the first moment of a command to its last.

Invariants:
- The first signal asks for a good end. Whoever listens is told; where nobody does, it ends what is under way
  as Ctrl-C would, with ``Interrupted``, so that everything is put away on the way out.
- The second signal ends the process now, and every process below it.
- An ``Interrupted`` that got lost (one raised in a finalizer does) is raised again by ``check``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

log = logging.getLogger(__name__)

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal that nobody listened to. A KeyboardInterrupt, since event loops let those alone through."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.exit_code = 128 + number


class StopSignals:
    """Inside ``with StopSignals() as signals:``, the two signals mean what this module says.

    In the main thread alone.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first one that came."""
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.getsignal(number) for number in _NUMBERS}
        self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.received is not None:
            raise Interrupted(self.received)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around what replaces handlers, as ``ray.init`` does: its own for SIGTERM exits with that number."""
        try:
            yield
        except SystemExit as exit_:
            if exit_.code != signal.SIGTERM:
                raise
            self.received = signal.SIGTERM
            raise Interrupted(signal.SIGTERM) from None
        finally:
            self._install()

    @contextmanager
    def listened_to(self, stop: Callable[[str], None]) -> Iterator[None]:
        """Inside the block, ``stop`` is called in the running event loop, with the first signal's name.

        At once for one that came before.
        """
        import asyncio  # which --help can do without

        loop = asyncio.get_running_loop()

        def arrived(number: signal.Signals) -> None:
            self._note(number)
            stop(number.name)

        for number in _NUMBERS:
            loop.add_signal_handler(number, arrived, number)
        try:
            if self.received is not None:
                stop(self.received.name)
            yield
        finally:
            for number in _NUMBERS:
                loop.remove_signal_handler(number)
            self._install()

    def _install(self) -> None:
        for number in _NUMBERS:
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        self._note(received)
        raise Interrupted(received)

    def _note(self, number: signal.Signals) -> None:
        """Remember the first; end the process at the second."""
        if self.received is not None:
            log.warning("%s again: ending now", number.name)
            _kill_children()
            os._exit(128 + number)
        self.received = number


def _kill_children() -> None:
    """SIGKILL every process below this one."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
