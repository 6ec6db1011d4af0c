"""Signals that ask a run to stop. All its processes notice one at the same time, whichever of them has received it."""

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from common.cli.console import Console
from common.cli.signals import SignalWatch
from common.device import cluster

PROMISE = "interrupted: ending once everything is saved; interrupt again to exit at once"


class Interruption:
    """A SignalWatch of a run that may have several processes."""

    def __init__(self, console: Console):
        self._signals = SignalWatch(lambda: console.say(PROMISE), console.abandon)
        self._number = 0
        self.start, self.stop = self._signals.start, self._signals.stop

    @property
    def here(self) -> int:
        """The number of the signal that this process has received, or 0."""
        return self._signals.received or 0

    def received(self) -> int:
        """The number of the signal, or 0. All processes have to ask at the same time."""
        self._number = self._number or cluster.largest(self.here)
        return self._number

    def ending_at_once(self, farewell: Callable[..., None], *args: Any) -> AbstractContextManager:
        """As `SignalWatch.ending_at_once` for a single process; several end together, at the next chunk."""
        return nullcontext() if cluster.count() > 1 else self._signals.ending_at_once(partial(farewell, *args))

    def go_on(self) -> None:
        """What the signal would have done, also one that has just come: raises KeyboardInterrupt, or SystemExit."""
        number = self._number or self.here
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number:
            raise SystemExit(128 + number)
