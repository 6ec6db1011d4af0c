"""Workers that failed begin anew, with new environments, as often and as soon as they may."""

import threading
import time
import traceback
from collections.abc import Callable

from common.actors.watching import LOOK_INTERVAL, Limits, Worker
from common.cli.errors import FailedEnvError, UnusableEnvError
from common.envs.usage import reason


class Restarts:
    """The restarts of several workers, counted together. Safe for any number of threads."""

    def __init__(self, limits: Limits, warn: Callable[[str], None], before: int = 0):
        """Counting goes on from `before`; the limit is for those to come."""
        self.count, self._before = before, before
        self._limits, self._warn = limits, warn
        self._lock = threading.Lock()

    def wait(self, worker: Worker, error: BaseException, stopped: Callable[[], bool]) -> bool:
        """Say that `worker` failed and wait until it may begin anew: at once, but not soon after its last restart.

        Returns False where it may not any more, where it would not help, or once `stopped`.
        """
        if isinstance(error, UnusableEnvError):
            return False
        why = _described(error)
        number = self._next()
        if not number:
            self._warn(f"{worker.name} failed: {why}")
            return False
        now = time.monotonic()
        until = max(worker.restarted + self._limits.restart_interval, now)
        when = f"in {until - now:.0f} s" if until > now else "now"
        self._warn(f"{worker.name} failed and restarts {when} ({number} of {self._limits.max_restarts}): {why}")
        with worker.doing("wait to restart"):
            while time.monotonic() < until and not stopped():
                time.sleep(LOOK_INTERVAL)
        worker.restarts, worker.restarted = worker.restarts + 1, time.monotonic()
        return not stopped()

    def given_up(self, error: BaseException) -> str:
        """What to say of a worker that does not begin anew any more."""
        if isinstance(error, UnusableEnvError):
            return f"failed: {error}"
        return f"failed, after {self.count - self._before} restarts (--max-restarts): {reason(error)}"

    def _next(self) -> int:
        """The number of one more restart, or 0 where there may be none."""
        with self._lock:
            if self.count - self._before >= self._limits.max_restarts:
                return 0
            self.count += 1
            return self.count - self._before


def _described(error: BaseException) -> str:
    """What happened; where that was in somebody's code, with the way to it."""
    known = isinstance(error, FailedEnvError)
    return str(error) if known else "\n" + "".join(traceback.format_exception(error)).rstrip()
