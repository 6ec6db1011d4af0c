"""The signals that stop a run: the first SIGINT, SIGTERM or SIGHUP asks it to end, a second SIGINT ends the process."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from common.device import multihost
from common.runs.console import Console

STOPPING = signal.SIGINT, signal.SIGTERM, *filter(None, [getattr(signal, "SIGHUP", None)])  # not on Windows
PROMISE = "interrupted: ending once everything is saved; interrupt again to exit at once"


class Interruption:
    """Notices signals at once, even while the main thread waits for the device, where Python runs no handlers."""

    def __init__(self, console: Console):
        self.here = 0  # the number of the newest signal that this process has received
        self._of_all = 0  # likewise of any process, once all have asked
        self._console = console
        self._handlers = {}  # those before
        self._farewell: Callable[[], None] | None = None

    def start(self) -> None:
        """Take over the signals; does nothing outside the main thread, where signals are the caller's business.

        One that `nohup` has the process ignore stays ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous = signal.set_wakeup_fd(self._write)
        threading.Thread(target=self._watch, daemon=True).start()
        for number in STOPPING:
            if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, lambda number, frame: None)

    def stop(self) -> None:
        """Give the signals back."""
        if not self._handlers:
            return
        for number, handler in self._handlers.items():  # first: a signal in between must not be lost
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous)
        self._handlers = {}
        os.close(self._write)  # ends the thread

    def received(self) -> int:
        """The number of the signal, or 0. All processes have to ask at the same time."""
        self._of_all = self._of_all or multihost.max_over_processes(self.here)
        return self._of_all

    def go_on(self) -> None:
        """What the signal would have done, also one that has just come: raises KeyboardInterrupt, or SystemExit."""
        number = self._of_all or self.here
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number:
            raise SystemExit(128 + number)

    @contextmanager
    def ending_at_once(self, farewell: Callable[[], None]) -> Iterator[None]:
        """Inside, the first signal ends the process already, after `farewell` is called: nothing is lost but time.

        That is so in a command. A process that merely calls `train`, as a notebook's, has more to lose than the run,
        and of several processes all end together, at the next chunk.
        """
        if multihost.count() == 1 and self._handlers.get(signal.SIGINT) is signal.SIG_DFL:
            self._farewell = farewell
        try:
            if self.here and self._farewell:
                self._end(self.here)
            yield
        finally:
            self._farewell = None

    def _watch(self) -> None:
        with suppress(OSError):
            while received := os.read(self._read, 1):
                number = received[0]
                if number not in STOPPING:
                    continue  # a signal of the program around us
                is_first, is_second = not self.here, number == self.here == signal.SIGINT
                self.here = number
                if is_second:
                    self._farewell = None
                if is_second or self._farewell:
                    self._end(number)
                if is_first:
                    self._console.say(PROMISE)
        os.close(self._read)

    def _end(self, number: int) -> NoReturn:
        """End the process as one that a signal has ended."""
        try:
            if self._farewell:
                self._farewell()
        finally:
            self._console.abandon()
            os._exit(128 + number)
