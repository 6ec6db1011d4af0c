"""SIGINT, SIGTERM and SIGHUP: the first asks the run to stop, a second SIGINT ends the process at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

STOPPING = signal.SIGINT, signal.SIGTERM, *filter(None, [getattr(signal, "SIGHUP", None)])  # not on Windows


def end_at_once(number: int) -> NoReturn:
    """End the process as one that a signal has ended."""
    os._exit(128 + number)


class SignalWatch:
    """Notices signals at once, even while the main thread waits for the device, where Python runs no handlers."""

    def __init__(self, announce: Callable[[], None], abandon: Callable[[], None]):
        """From a thread, `announce` is called when the first signal arrives, `abandon` before the process ends."""
        self.received: int | None = None
        self._announce, self._abandon = announce, abandon
        self._handlers = {}
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

    @contextmanager
    def ending_at_once(self, farewell: Callable[[], None]) -> Iterator[None]:
        """Inside, the first signal ends the process already, after `farewell` is called: nothing is lost but time.

        That is so in a command. A process that merely calls `train`, as a notebook's, has more to lose than the run.
        """
        if self._handlers.get(signal.SIGINT) is signal.SIG_DFL:
            self._farewell = farewell
        try:
            if self.received:
                self._leave(self.received)
            yield
        finally:
            self._farewell = None

    def _leave(self, number: int) -> None:
        """End the process, if a signal does so now."""
        if self._farewell:
            try:
                self._farewell()
            finally:
                self._abandon()
                end_at_once(number)

    def _watch(self) -> None:
        with suppress(OSError):
            while received := os.read(self._read, 1):
                if received[0] not in STOPPING:
                    continue  # a signal of the program around us
                if received[0] == self.received == signal.SIGINT:
                    self._abandon()
                    end_at_once(signal.SIGINT)
                first, self.received = self.received is None, received[0]
                self._leave(received[0])
                if first:
                    self._announce()
        os.close(self._read)
