"""gymnasium environments in processes of their own, which can be killed where one hangs.

Registers `pmaprl/PartialCartPole-v1` and `pmaprl/PartialPendulum-v1`. Processes import this too, so
it needs nothing that is slow.
"""

import multiprocessing.connection
import multiprocessing.util
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Space, Tuple
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.wrappers import TransformObservation

from pmaprl.cli.errors import FailedEnvError
from pmaprl.envs.suite_tools import reason
from pmaprl.suites.tools.checked import CheckedEnv, array_of, mask_of, outputs_of
from pmaprl.suites.tools.shared import PARTIAL, WITHOUT_VELOCITIES

CLOSING = 1.0  # seconds that processes get to end by themselves
_starting = threading.Lock()


class InItsProcess(Exception):
    """The traceback of an error in the process of an environment, as the cause of the same error
    here.
    """

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"


class Processes(AsyncVectorEnv):
    """gymnasium's vector environment with one process for each, where nothing is waited for without
    a limit.
    """

    def __init__(
        self,
        maker: Callable[[], Any],
        num_envs: int,
        reset_timeout: float | None,
        step_timeout: float | None,
    ):
        """Start `num_envs` processes that each call `maker`.

        They come from a server that knows nothing of this program: forks of it, with JAX's threads,
        could deadlock.
        """
        self._timeouts = {"reset": reset_timeout, "step": step_timeout}
        self.processes = []
        multiprocessing.get_context("forkserver").set_forkserver_preload(["gymnasium", "numpy"])
        makers = [partial(_make, maker, os.getpid(), _own_folder())] * num_envs
        try:
            with ExitStack() as self._hidden:
                self._hidden.enter_context(_hidden_main())
                super().__init__(
                    makers, context="forkserver", autoreset_mode=AutoresetMode.SAME_STEP
                )
        except BaseException:
            self.kill()
            self.closed = True
            raise

    def _check_spaces(self) -> None:
        """Wait until all environments are made, no longer than a reset may take: gymnasium's own
        waits without a limit.

        What processes need to begin is gone once the constructor, which ends with this, has
        returned.
        """
        self._hidden.close()  # all have started: others, in other threads, may start theirs
        with self._in_time("reset") as seconds:
            self.call_async("render_mode")
            self.call_wait(timeout=seconds)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        """As gymnasium's. Raises FailedEnvError where a process does not answer in time or has
        ended.
        """
        with self._in_time("reset") as seconds:
            self.reset_async(seed, options)
            return self.reset_wait(timeout=seconds)

    def step(self, actions: Any) -> tuple[Any, ...]:
        """As gymnasium's. Raises FailedEnvError where a process does not answer in time or has
        ended.
        """
        with self._in_time("step") as seconds:
            self.step_async(actions)
            return self.step_wait(timeout=seconds)

    def close_extras(self, **_: Any) -> None:
        """Ask all processes to end, and kill those that do not, with all that any of them has left
        behind.

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

    def kill(self) -> None:
        """End all processes at once, with those that they have started, such as simulators, from
        any thread.

        A thread that waits for them gets a FailedEnvError.
        """
        for process in self.processes:
            if process.pid:  # None where it could not be started
                process.kill()  # it may have no group of its own yet
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _raise_if_errors(self, successes: Any) -> None:
        """Raise what an environment raised, from the way to it in its process, which gymnasium's
        own prints at once.
        """
        if all(successes):
            return
        for _ in range(len(successes) - sum(successes)):
            index, kind, error, trace = self.error_queue.get()
            self.parent_pipes[index].close()
            self.parent_pipes[index] = None
        self._state = AsyncState.DEFAULT
        raise kind(error) from InItsProcess(trace)

    @contextmanager
    def _in_time(self, what: str):
        seconds = self._timeouts[what]
        try:
            yield seconds
        except multiprocessing.TimeoutError as error:
            raise FailedEnvError(
                f"an environment's {what} took over {seconds:g} s (--{what}-timeout)"
            ) from error
        except (EOFError, ConnectionError) as error:
            multiprocessing.connection.wait(
                [process.sentinel for process in self.processes], timeout=1.0
            )
            ended = [process for process in self.processes if process.exitcode is not None]
            codes = ", ".join(f"{process.exitcode}" for process in ended) or "unknown"
            raise FailedEnvError(
                f"a process of an environment ended by itself (exit code {codes})"
            ) from error


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


def _own_folder() -> str:
    """The temporary folder in which multiprocessing has the socket of its server; "" where another
    process made it.
    """
    folder = multiprocessing.util.get_temp_dir()
    with suppress(AttributeError, TypeError):  # nobody promises that these stay
        for finalizer in multiprocessing.util._finalizer_registry.values():
            if folder in (finalizer._args or ()) and finalizer._pid == os.getpid():
                return folder
    return ""


def _make(maker: Callable[[], Any], home: int, folder: str) -> Any:
    """What `maker` makes; in another process than `home`, in a group of that one's own, which
    Ctrl-C does not reach.

    The group ends with the program, even if that is killed and the environment listens to nobody: a
    process watches. That also deletes the temporary `folder`, which a program that is killed leaves
    behind.
    """
    if os.getpid() != home:  # gymnasium also calls this at home, to see what the environment is
        os.setpgid(0, 0)
        if os.fork() == 0:
            _end_with_the_program(folder)
    env = maker()
    env.reset = _plain_errors()(env.reset)
    env.step = _plain_errors()(env.step)
    return env


def _end_with_the_program(folder: str) -> NoReturn:
    """Kill the group of this process, and delete the `folder`, once the program has ended."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        program = multiprocessing.parent_process().sentinel
        os.closerange(0, program)  # pipes of the environment, of whose end others learn by them
        os.closerange(program + 1, os.sysconf("SC_OPEN_MAX"))
        multiprocessing.connection.wait([program])
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.killpg(0, signal.SIGKILL)


@contextmanager
def _plain_errors():
    """Raise a RuntimeError in place of errors that gymnasium cannot send to the process that waits
    for the step.
    """
    try:
        yield
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(type(error)(error)))  # which is what gymnasium does
        except Exception:
            raise RuntimeError(reason(error)) from error
        raise


def make(mask: str, env_id: str, **arguments: Any) -> gymnasium.Env:
    """gymnasium's environment, checked; where its info has a `mask` of legal actions, it observes
    that too.
    """
    return CheckedEnv(_with_mask(mask, gymnasium.make(env_id, **arguments)))


def _with_mask(mask: str, env: gymnasium.Env) -> gymnasium.Env:
    """The environment, which observes the mask that its info has, if any."""
    parts = env.observation_space.spaces if isinstance(env.observation_space, Dict) else {}
    if mask in parts or isinstance(env.action_space, Box):
        return env
    legal = outputs_of(env, "reset", env.reset())[1].get(mask)  # nothing else tells
    return env if legal is None else MaskObserved(env, mask, legal)


class MaskObserved(gymnasium.Wrapper):
    """Observes the mask beside the parts of a dictionary, or beside the whole observation, which is
    then called obs.
    """

    def __init__(self, env: gymnasium.Env, mask: str, legal: Any):
        """`legal` is a mask: an array, or a tuple of such."""
        super().__init__(env)
        self._mask = mask
        self._space = _space_of(legal, mask)
        self._has_parts = isinstance(env.observation_space, Dict)
        parts = env.observation_space.spaces if self._has_parts else {"obs": env.observation_space}
        self.observation_space = Dict({mask: self._space, **parts})

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        obs, info = outputs_of(self.env, "reset", self.env.reset(seed=seed, options=options))
        return self._observed(obs, info, over=False), info

    def step(self, action: Any) -> tuple[Any, ...]:
        obs, reward, terminated, truncated, info = outputs_of(
            self.env, "step", self.env.step(action)
        )
        return (
            self._observed(obs, info, terminated or truncated),
            reward,
            terminated,
            truncated,
            info,
        )

    def _observed(self, obs: Any, info: dict, over: bool) -> dict:
        legal = info.get(self._mask)
        if legal is None and not over:  # at the end nobody acts
            raise FailedEnvError(
                f"the info of {self.env.spec.id} has lost its {self._mask} after a step"
            )
        legal = (
            _everything(self._space)
            if legal is None
            else mask_of(legal, self._space, f"the {self._mask}")
        )
        return {self._mask: legal, **(obs if self._has_parts else {"obs": obs})}


def _space_of(legal: Any, name: str) -> Space:
    """The space of a mask called `name`: of an array, or of a tuple of such."""
    if isinstance(legal, tuple):
        return Tuple([_space_of(part, name) for part in legal])
    return Box(low=0, high=1, shape=array_of(legal, f"the {name}").shape, dtype=np.int8)


def _everything(space: Space) -> Any:
    """A mask for which all actions are legal."""
    return tuple(map(_everything, space.spaces)) if isinstance(space, Tuple) else space.high


def make_partial(whole: str, **arguments: Any) -> gymnasium.Env:
    """gymnasium's environment `whole`, of these arguments, without what is not seen, and without a
    time limit.
    """
    # No other name, by which gymnasium would import a module
    seen = list(WITHOUT_VELOCITIES[whole])
    env = gymnasium.make(whole, max_episode_steps=-1, **arguments)
    low = env.observation_space.low[seen]
    high = env.observation_space.high[seen]
    return TransformObservation(
        env, lambda obs: obs[seen], Box(low, high, dtype=env.observation_space.dtype)
    )


for whole in WITHOUT_VELOCITIES:
    gymnasium.register(
        f"pmaprl/{PARTIAL}{whole}",
        f"{__name__}:make_partial",
        kwargs={"whole": whole},
        max_episode_steps=gymnasium.spec(whole).max_episode_steps,
        reward_threshold=gymnasium.spec(whole).reward_threshold,
    )
