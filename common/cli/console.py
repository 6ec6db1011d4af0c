"""The terminal of a run: header, progress bar (or a line per interval) and warnings, and the signals that stop a run.

The first SIGINT, SIGTERM or SIGHUP asks the run to stop, a second SIGINT ends the process at once.
"""

import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

from common.cli.errors import printable

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


T = TypeVar("T")

SIGN_OF_LIFE = 30.0  # seconds after which a log says that something slow still goes on


class Console:
    """Prints a progress bar to a terminal, plain lines elsewhere, and nothing but warnings when quiet."""

    def __init__(self, quiet: bool, total_steps: int, brief: Callable[[Any], str] | None = None, speaks: bool = True):
        """`brief` puts the returns of several agents into a few words. One that does not speak is silent altogether."""
        from rich.console import Console as Rich

        self.quiet, self.total, self._brief = quiet or not speaks, total_steps, brief or brief_seeds
        self._speaks = speaks
        self._rich = Rich(highlight=False, soft_wrap=True)
        if self._rich.is_jupyter:  # there rich puts every line into a box of its own
            self._rich = Rich(highlight=False, soft_wrap=True, force_jupyter=False, force_terminal=False)
        self._errors = Rich(stderr=True, highlight=False, soft_wrap=True)
        self._bar = None
        self._task = None

    def say(self, text: str) -> None:
        if not self.quiet and text:
            with self._unread():
                self._rich.print(printable(text), markup=False)

    def warn(self, text: str) -> None:
        if not self._speaks:
            return
        # A live bar has to know of every line; else warnings go to stderr.
        target = self._bar.console if self._bar else self._errors
        with self._unread("stdout" if self._bar else "stderr"):
            target.print(printable(f"warning: {text}"), markup=False, style="yellow")

    @contextmanager
    def _unread(self, stream: str = "stdout") -> Iterator[None]:
        """Inside, a stream may prove to be broken: from then on the run goes on without it.

        The reader has gone, as in `| head` (rich makes that a SystemExit), or the terminal, or the disk is full.
        """
        try:
            yield
        except (OSError, SystemExit):
            self.quiet, self._bar = self.quiet or stream == "stdout", None
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115

    def start(self, steps: int) -> None:
        """Show the progress bar, where output is a terminal."""
        if self.quiet or not self._rich.is_terminal:
            return
        from rich import progress

        columns = [
            progress.TextColumn("{task.completed:,.0f} / {task.total:,.0f} steps"),
            progress.BarColumn(bar_width=None),
            progress.TextColumn("{task.fields[report]}"),
            progress.TextColumn("ETA"),
            progress.TimeRemainingColumn(compact=True),
        ]
        self._bar = progress.Progress(*columns, console=self._rich, refresh_per_second=5)
        self._task = self._bar.add_task("", total=self.total, completed=steps, report="")
        with self._unread():
            self._bar.start()

    def update(self, steps: int, row: dict[str, Any]) -> None:
        """Show one log interval, with the return of the episodes that ended in it."""
        if self.quiet:
            return
        counts = row["episode/count"]
        ended = round(sum(counts) if isinstance(counts, list) else counts)
        earned = f"return {self._brief(row['episode/return'])} " if ended else ""
        which, speed = f"{ended:,} episode{'s' * (ended > 1)} ended", f"{row['time/sps']:,.0f} steps/s"
        if self._bar:  # in two lines, which fit on 80 columns
            report = f"{earned}\n{which}, {speed}" if ended else f"no episode ended\n{speed}"
            with self._unread():
                self._bar.update(self._task, completed=min(steps, self.total), report=report)
            return
        which = f"({which})" if ended else "no episode ended"
        eta = max(self.total - steps, 0) / max(row["time/sps_wall"], 1e-9)
        self.say(f"step {steps:>11,} / {self.total:,}  {earned}{which}  {speed}  ETA {eta:.0f} s")

    def attempt(self, what: str, tell: Callable[..., T], *args: Any) -> T | None:
        """What `tell` returns at the end of a run, which that does not decide; None where it fails, with a warning."""
        try:
            return tell(*args)
        except Exception as error:
            self.warn(f"the run's {what} failed at the end: {type(error).__name__}: {error}")
            return None

    @contextmanager
    def task(self, words: str) -> Iterator[Callable[[int, int], None]]:
        """While something slow goes on: yields a function to call with how much is done, and of how much.

        A bar on a terminal, elsewhere a line, and one more every SIGN_OF_LIFE seconds.
        """
        if self.quiet or not self._rich.is_terminal:
            self.say(f"{words} ...")
            with _repeatedly(lambda seconds: self.say(f"{words} ... {seconds:.0f} s")):
                yield lambda done, total: None
            return
        from rich import progress

        columns = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TimeElapsedColumn()
        bar = progress.Progress(*columns, console=self._rich, transient=True)
        task = bar.add_task(words, total=None)
        with self._unread():
            bar.start()
        try:
            yield lambda done, total: bar.update(task, completed=done, total=total)
        finally:
            with self._unread():
                bar.stop()

    def abandon(self) -> None:
        """Give the terminal back its cursor, for a process that ends at once."""
        if not self.quiet:
            with self._unread():
                self._rich.show_cursor()

    def stop(self) -> None:
        if self._bar:
            with self._unread():
                self._bar.stop()
            self._bar = None


@contextmanager
def _repeatedly(function: Callable[[float], None]) -> Iterator[None]:
    """Inside, a thread calls the function every SIGN_OF_LIFE seconds, with how many have passed."""
    over, began = threading.Event(), time.monotonic()

    def call():
        while not over.wait(SIGN_OF_LIFE):
            function(time.monotonic() - began)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def brief_seeds(value: float | list[float | None] | None) -> str:
    """One number as it is, several as mean ± deviation over the seeds that have one."""
    numbers = [x for x in (value if isinstance(value, list) else [value]) if x is not None]
    if not numbers:
        return "-"
    spread = f" ± {statistics.pstdev(numbers):.1f} over {len(numbers)} seeds" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.1f}{spread}"
