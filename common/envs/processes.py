"""gymnasium environments in processes of their own: what hangs there can be killed, and ends with this program."""

import fcntl
import functools
import math
import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from common.cli.errors import FailedEnvError
from common.envs.suite_tools import reason

CLOSING = 1.0  # seconds that processes get to end by themselves
_starting = threading.Lock()


class Processes(AsyncVectorEnv):
    """gymnasium's vector environment with one process for each, where nothing is waited for without a limit."""

    def __init__(
        self, maker: Callable[[], Any], num_envs: int, reset_timeout: float | None, step_timeout: float | None
    ):
        """Start `num_envs` processes that each call `maker`.

        They come from a server that knows nothing of this program: forks of it, with JAX's threads, could deadlock.
        """
        self._timeouts = {"reset": reset_timeout, "step": step_timeout}
        self.processes = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["gymnasium", "numpy"])
        self._begun = context.Semaphore(0)
        makers = [_Maker(maker, self._begun)] * num_envs
        if multiprocessing.parent_process() is None:  # else the folder is that of the parent, which removes it
            _remove_at_end(multiprocessing.util.get_temp_dir())
        try:
            with _hidden_main():
                super().__init__(makers, context="forkserver", autoreset_mode=AutoresetMode.SAME_STEP)
        except BaseException:
            self.kill()
            self.closed = True
            raise
        self._at_exit = weakref.finalize(self, _kill, self.processes)  # Python's own end would spare what they started

    def _check_spaces(self) -> None:
        """Wait until all processes have begun, no longer than a reset may take.

        gymnasium's constructor ends with this. Its own waits for the environments to be made, without a limit.
        """
        with self._in_time("reset") as seconds:
            deadline = math.inf if seconds is None else time.monotonic() + seconds
            for _ in self.processes:
                self._await_one(deadline)

    def _await_one(self, deadline: float) -> None:
        """Wait until one more process has begun."""
        while not self._begun.acquire(timeout=0.1):
            if not all(process.is_alive() for process in self.processes):
                raise EOFError
            if time.monotonic() > deadline:
                raise multiprocessing.TimeoutError

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """As gymnasium's. Raises FailedEnvError where a process does not answer in time or has ended."""
        with self._in_time("reset") as seconds:
            self.reset_async(seed, options)
            return self.reset_wait(timeout=seconds)

    def step(self, actions: Any) -> tuple[Any, ...]:
        """As gymnasium's. Raises FailedEnvError where a process does not answer in time or has ended."""
        with self._in_time("step") as seconds:
            self.step_async(actions)
            return self.step_wait(timeout=seconds)

    def close_extras(self, **_: Any) -> None:
        """Ask all processes to end, and kill those that do not, with all that any of them has left behind.

        gymnasium's own waits for one that hangs, and leaves the others behind where one has died.
        """
        for pipe in filter(None, self.parent_pipes):  # None where the environment raised
            with suppress(OSError):
                pipe.send(("close", None))
        deadline = time.monotonic() + CLOSING
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        self.kill()
        for process in self.processes:
            process.join()
        self._at_exit.detach()  # their numbers may be those of other processes by then

    def kill(self) -> None:
        """End all processes at once, from any thread: one that waits for them gets a FailedEnvError."""
        _kill(self.processes)

    @contextmanager
    def _in_time(self, what: str):
        seconds = self._timeouts[what]
        try:
            yield seconds
        except multiprocessing.TimeoutError as error:
            raise FailedEnvError(f"an environment's {what} took over {seconds:g} s (--{what}-timeout)") from error
        except (EOFError, ConnectionError) as error:
            multiprocessing.connection.wait([process.sentinel for process in self.processes], timeout=1.0)
            ended = [process for process in self.processes if process.exitcode is not None]
            codes = ", ".join(f"{process.exitcode}" for process in ended) or "unknown"
            raise FailedEnvError(f"a process of an environment ended by itself (exit code {codes})") from error


@functools.cache
def _remove_at_end(folder: str) -> subprocess.Popen:
    """A process that deletes a folder once this program has ended, also by kill -9: multiprocessing would leave it."""
    shell = ["sh", "-c", 'read -r nothing; rm -rf "$1"', "sh", folder]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(shell, **streams, start_new_session=True)  # nobody writes: reading ends with this program


@contextmanager
def _hidden_main():
    """Keep processes that start from importing this program, and JAX with it."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class _Maker:
    """Calls `maker`; in another process, in a group of that one's own, which its parent ends and Ctrl-C does not."""

    def __init__(self, maker: Callable[[], Any], begun: Any):
        """`begun` is a semaphore for all processes that have come so far."""
        self._maker, self._begun, self._home = maker, begun, os.getpid()

    def __call__(self) -> Any:
        if os.getpid() != self._home:  # gymnasium also calls this at home, to see what the environment is
            os.setpgid(0, 0)
            _end_with(multiprocessing.parent_process().sentinel)
            self._begun.release()
        return _PlainErrors(self._maker())


class _PlainErrors(gymnasium.Wrapper):
    """Raises a RuntimeError in place of errors that gymnasium cannot send to the process that waits for the step."""

    def reset(self, **options: Any) -> tuple[Any, dict]:
        with _plain_errors():
            return self.env.reset(**options)

    def step(self, action: Any) -> tuple[Any, ...]:
        with _plain_errors():
            return self.env.step(action)


@contextmanager
def _plain_errors():
    try:
        yield
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(type(error)(error)))  # which is what gymnasium does
        except Exception:
            raise RuntimeError(reason(error)) from error
        raise


def _kill(processes: list[Any]) -> None:
    """End processes and those that they have started, such as simulators, at once."""
    for process in processes:
        if process.pid:  # None where it could not be started
            process.kill()  # it may have no group of its own yet
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)


def _end_with(sentinel: int) -> None:
    """End this group once the process behind `sentinel` has ended, however that happened and whatever goes on here."""
    if hasattr(fcntl, "F_SETSIG"):  # the kernel does it, also where an environment keeps the interpreter to itself
        fcntl.fcntl(sentinel, fcntl.F_SETOWN, -os.getpgid(0))
        fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(sentinel, fcntl.F_SETFL, os.O_ASYNC)
        if multiprocessing.connection.wait([sentinel], timeout=0):
            os.killpg(0, signal.SIGKILL)
    else:
        threading.Thread(target=_end_after, args=(sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.killpg(0, signal.SIGKILL)
