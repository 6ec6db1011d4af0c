"""gymnasium environments in processes of their own: what hangs there can be killed."""

import multiprocessing.connection
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any

CLOSING = 1.0  # seconds that processes get to end by themselves
_starting = threading.Lock()


class Processes:
    """One environment per process, with the interface of a gymnasium vector environment."""

    def __init__(
        self, maker: Callable[[], Any], num_envs: int, reset_timeout: float | None, step_timeout: float | None
    ):
        """Start `num_envs` processes that each call `maker`.

        They come from a server that knows nothing of this program: forks of it, with JAX's threads, could deadlock.
        """
        from gymnasium.vector import AsyncVectorEnv, AutoresetMode

        self._timeouts = {"reset": reset_timeout, "step": step_timeout}
        multiprocessing.get_context("forkserver").set_forkserver_preload(["gymnasium", "numpy"])
        makers, mode = [_Maker(maker)] * num_envs, AutoresetMode.SAME_STEP
        with _starting:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = types.ModuleType("__main__")  # else each process would import this one, and JAX
            try:
                self._envs = AsyncVectorEnv(makers, context="forkserver", autoreset_mode=mode)
            finally:
                sys.modules["__main__"] = main
        self.processes = self._envs.processes
        self.single_observation_space = self._envs.single_observation_space
        self.single_action_space = self._envs.single_action_space
        self.metadata = self._envs.metadata

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict]:
        """As gymnasium's. Raises TimeoutError where a process does not answer in time, RuntimeError where one died."""
        with self._in_time("reset") as seconds:
            self._envs.reset_async(seed=seed)
            return self._envs.reset_wait(timeout=seconds)

    def step(self, action: Any) -> tuple[Any, ...]:
        """As gymnasium's. Raises TimeoutError where a process does not answer in time, RuntimeError where one died."""
        with self._in_time("step") as seconds:
            self._envs.step_async(action)
            return self._envs.step_wait(timeout=seconds)

    def close(self) -> None:
        """Ask all processes to end, and kill those that do not.

        gymnasium's own `close` waits for one that hangs, and leaves the others behind where one has died.
        """
        for pipe in self._envs.parent_pipes:
            with suppress(OSError):
                pipe.send(("close", None))
        deadline = time.monotonic() + CLOSING
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.0))
            process.kill()
            process.join()
        self._envs.closed = True

    @contextmanager
    def _in_time(self, what: str):
        seconds = self._timeouts[what]
        try:
            yield seconds
        except multiprocessing.TimeoutError as error:
            raise TimeoutError(f"an environment's {what} took over {seconds:g} s (--{what}-timeout)") from error
        except (EOFError, ConnectionError) as error:
            multiprocessing.connection.wait([process.sentinel for process in self.processes], timeout=1.0)
            ended = [process for process in self.processes if process.exitcode is not None]
            codes = ", ".join(f"{process.exitcode}" for process in ended) or "unknown"
            raise RuntimeError(f"a process of an environment ended by itself (exit code {codes})") from error


class _Maker:
    """Calls `maker`, in a process of its own out of Ctrl-C's reach: the parent decides what ends."""

    def __init__(self, maker: Callable[[], Any]):
        self._maker = maker

    def __call__(self) -> Any:
        if multiprocessing.parent_process():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        return self._maker()
