"""Signals that stop a run.

The first SIGINT, SIGTERM or SIGHUP asks the run to end. A second SIGINT ends the process.
"""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pmaprl.machine import multihost
from pmaprl.runs.console import Console

STOPPING = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
PROMISE = "interrupted: ending once everything is saved; interrupt again to exit at once"


class Interruption:
    """Watch for signals that stop a run.

    It notices them at once, even while the main thread waits for the device, when Python runs no
    handlers.
    """

    def __init__(self, console: Console):
        self.local_signal = 0  # number of the newest signal that this process has received
        self._of_all = 0  # number of a signal of any process, once all have asked
        self._console = console
        self._handlers: dict[int, Any] = {}  # the handlers of the program, to be restored
        # The text of a process that ends at once
        self.last_words: Callable[[], str] = str

    def __enter__(self) -> "Interruption":
        self.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def start(self) -> None:
        """Take over the signals, in the main thread; in others signals are the caller's business.

        A signal that `nohup` has the process ignore stays ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous = signal.set_wakeup_fd(self._write)
        threading.Thread(target=self._watch, daemon=True).start()
        for number in STOPPING:
            is_ignored = signal.getsignal(number) is signal.SIG_IGN
            if number == signal.SIGHUP and is_ignored:
                continue
            self._handlers[number] = signal.signal(number, lambda number, frame: None)

    def stop(self) -> None:
        """Restore the handlers of the program."""
        if not self._handlers:
            return
        # Handlers first, because a signal in between must not be lost
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous)
        self._handlers = {}
        os.close(self._write)  # ends the thread

    def signal_of_any_process(self) -> int:
        """Number of a signal that any process has received, or 0.

        All processes have to ask at once.
        """
        self._of_all = self._of_all or multihost.max_over_processes(self.local_signal)
        return self._of_all

    def raise_received(self) -> None:
        """Raise the KeyboardInterrupt or SystemExit of a signal that was received, if any."""
        number = self._of_all or self.local_signal
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if number:
            raise SystemExit(128 + number)

    def _end_at_once(self, number: int) -> None:
        self._console.show_cursor()
        # Neither an error nor a disk that hangs may keep the process
        speaker = threading.Thread(target=self._say_last_words, daemon=True)
        speaker.start()
        speaker.join(1.0)
        os._exit(128 + number)

    def _say_last_words(self) -> None:
        with suppress(Exception):
            self._console.say(self.last_words())

    def _watch(self) -> None:
        with suppress(OSError):
            while received := os.read(self._read, 1):
                number = received[0]
                if number not in STOPPING:
                    continue  # a signal that the program around the run handles
                before = self.local_signal
                self.local_signal = number
                if before == number == signal.SIGINT:
                    self._end_at_once(number)
                if not before:
                    self._console.say(PROMISE)
        os.close(self._read)
