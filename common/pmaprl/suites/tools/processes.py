"""gymnasium environments in processes of their own, which can be killed if one hangs.

Importing this registers `pmaprl/PartialCartPole-v1` and `pmaprl/PartialPendulum-v1`. Processes
import it too, so it needs nothing that is slow.
"""

import importlib
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
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Space, Tuple
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.wrappers import TransformObservation

from pmaprl.cli.errors import FailedEnvError
from pmaprl.envs.foreign_code import reason
from pmaprl.suites.tools.checked import CheckedEnv, array_of, mask_of, name_of, outputs_of
from pmaprl.suites.tools.observed import PARTIAL, WITHOUT_VELOCITIES

CLOSING = 1.0  # seconds that processes get to end by themselves
_starting = threading.Lock()


class InItsProcess(Exception):
    """Traceback of an error in the process of an environment, as the cause of the error here."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"


class Processes(AsyncVectorEnv):
    """gymnasium's vector environment with one process for each, and a limit on all waiting."""

    def __init__(
        self,
        maker: Callable[[], Any],
        num_envs: int,
        reset_timeout: float | None,
        step_timeout: float | None,
    ):
        """Start `num_envs` processes that each call `maker`.

        They come from a server that knows nothing of this program, because forks of a program with
        JAX's threads could deadlock.

        Args:
            maker: makes one environment.
            num_envs: number of environments.
            reset_timeout: seconds that a reset may take; None: any time.
            step_timeout: seconds that a step may take; None: any time.
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
        """Wait until all environments are made, but no longer than a reset may take.

        gymnasium's own method waits without a limit. The constructor ends with this call, after
        which the objects that starting processes need are gone.
        """
        self._hidden.close()  # all have started, so other threads may start theirs
        with self._in_time("reset") as seconds:
            self.call_async("render_mode")
            self.call_wait(timeout=seconds)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict | None = None
    ) -> tuple[Any, dict]:
        """Reset all environments, as gymnasium does.

        Raises:
            FailedEnvError: a process does not answer in time, or has ended.
        """
        with self._in_time("reset") as seconds:
            self.reset_async(seed, options)
            return self.reset_wait(timeout=seconds)

    def step(self, actions: Any) -> tuple[Any, ...]:
        """Step all environments, as gymnasium does.

        Raises:
            FailedEnvError: a process does not answer in time, or has ended.
        """
        with self._in_time("step") as seconds:
            self.step_async(actions)
            return self.step_wait(timeout=seconds)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Ask all processes to end, and kill those that do not, with the processes that they began.

        gymnasium's own method waits for one that hangs, and leaves the others behind if one has
        died. Its arguments do nothing here.
        """
        for pipe in filter(None, self.parent_pipes):  # None: the environment has raised an error
            with suppress(OSError):
                pipe.send(("close", None))
        deadline = time.monotonic() + CLOSING
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        self.kill()
        for process in self.processes:
            process.join()

    def kill(self) -> None:
        """End all processes at once, with those that they have started, such as simulators.

        Any thread may call it. A thread that waits for the processes gets a FailedEnvError.
        """
        for process in self.processes:
            if process.pid:  # None: it could not be started
                process.kill()  # it may have no group of its own yet
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _raise_if_errors(self, successes: Any) -> None:
        """Raise the error of an environment, with the traceback in its process as the cause.

        gymnasium's own method prints the traceback at once.
        """
        if all(successes):
            return
        failures = [self.error_queue.get() for _ in range(len(successes) - sum(successes))]
        for index, *_ in failures:
            self.parent_pipes[index].close()
            self.parent_pipes[index] = None
        self._state = AsyncState.DEFAULT
        _, kind, error, trace = failures[-1]
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
            sentinels = [process.sentinel for process in self.processes]
            multiprocessing.connection.wait(sentinels, timeout=1.0)
            codes = [process.exitcode for process in self.processes]
            ended = ", ".join(str(code) for code in codes if code is not None)
            raise FailedEnvError(
                f"a process of an environment ended by itself (exit code {ended or 'unknown'})"
            ) from error


@contextmanager
def _hidden_main():
    """Keep new processes from importing this program, and JAX with it."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def _own_folder() -> str:
    """Temporary folder of the socket of multiprocessing's server; "" if another process made it."""
    folder = multiprocessing.util.get_temp_dir()
    with suppress(AttributeError, TypeError):  # nobody promises that these stay
        # The stubs of Python leave private names out
        registry = multiprocessing.util._finalizer_registry  # pyright: ignore[reportAttributeAccessIssue]
        for finalizer in registry.values():
            if folder in (finalizer._args or ()) and finalizer._pid == os.getpid():
                return folder
    return ""


def _make(maker: Callable[[], Any], home: int, folder: str) -> Any:
    """Make an environment, in a group of processes of its own, which Ctrl-C does not reach.

    A process watches, and ends the group with the program, even if that is killed and the
    environment listens to nobody. It also deletes the temporary `folder`, which a killed program
    leaves behind.

    Args:
        maker: makes the environment.
        home: id of the program's process, in which gymnasium calls this too, to learn the spaces.
        folder: temporary folder to delete in the end, or "".
    """
    if os.getpid() != home:
        os.setpgid(0, 0)
        if os.fork() == 0:
            _end_with_the_program(folder)
        with _mujoco.silent():  # the program makes such an environment too, and says it
            env = maker()
    else:
        env = maker()
    env.reset = _plain_errors()(env.reset)
    env.step = _plain_errors()(env.step)
    return env


def _end_with_the_program(folder: str) -> None:
    """Kill the group of this process, and delete the `folder`, once the program has ended."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parent = multiprocessing.parent_process()
        assert parent is not None  # the server of multiprocessing has made this process
        program = parent.sentinel
        os.closerange(0, program)  # pipes, which tell others when the environment ends
        os.closerange(program + 1, os.sysconf("SC_OPEN_MAX"))
        multiprocessing.connection.wait([program])
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.killpg(0, signal.SIGKILL)


@contextmanager
def _plain_errors():
    """Raise a RuntimeError in place of errors that gymnasium cannot send to the program."""
    try:
        yield
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(type(error)(error)))  # as gymnasium sends it
        except Exception:
            raise RuntimeError(reason(error)) from error
        raise


class _Mujoco:
    """Warnings of MuJoCo, each of which is said once, not by every environment."""

    def __init__(self):
        self._said = set()
        self._is_silent = False

    def listen(self) -> None:
        """Let MuJoCo hand over its warnings in this process."""
        import mujoco

        # Its stubs leave this function out
        mujoco.set_mju_user_warning(self._warn)  # pyright: ignore[reportAttributeAccessIssue]

    @contextmanager
    def silent(self):
        """Say no warning inside, and none of these later."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def _warn(self, text: str) -> None:
        if not self._is_silent and text not in self._said:
            print(f"warning: MuJoCo: {text.strip()}", file=sys.stderr)
        self._said.add(text)


_mujoco = _Mujoco()


def make(mask: str, env_id: str, **arguments: Any) -> gymnasium.Env:
    """Make gymnasium's environment, checked; it observes the `mask` that its info may have."""
    if _is_of_mujoco(env_id):
        _mujoco.listen()
    return CheckedEnv(_with_mask(mask, gymnasium.make(env_id, **arguments)))


def _is_of_mujoco(env_id: str) -> bool:
    """True for an environment of MuJoCo, also for one that a module of the user registers."""
    module, _, name = env_id.rpartition(":")
    with suppress(ImportError):  # gymnasium says what is missing
        if module:
            importlib.import_module(module)
    registered = gymnasium.registry.get(name)
    return registered is not None and "mujoco" in str(registered.entry_point)


def _with_mask(mask: str, env: gymnasium.Env) -> gymnasium.Env:
    """Observe the mask that the info of an environment has, if it has one."""
    observations = env.observation_space
    is_observed = isinstance(observations, Dict) and mask in observations.spaces
    if is_observed or isinstance(env.action_space, Box):
        return env
    _, info = outputs_of(env, "reset", env.reset())  # nothing else tells
    legal = info.get(mask)
    return env if legal is None else MaskObserved(env, mask, legal)


class MaskObserved(gymnasium.Wrapper):
    """Environment that observes its mask of legal actions.

    The mask becomes a part of a dictionary. An observation that is none becomes its part `obs`.
    """

    def __init__(self, env: gymnasium.Env, mask: str, legal: Any):
        """Wrap an environment.

        Args:
            env: the environment.
            mask: name of the mask in infos.
            legal: a mask, from which the space is known: an array, or a tuple of arrays.
        """
        super().__init__(env)
        self._mask = mask
        self._space = _space_of(legal, mask)
        observations = env.observation_space
        self._has_parts = isinstance(observations, Dict)
        parts = observations.spaces if isinstance(observations, Dict) else {"obs": observations}
        self.observation_space = Dict({mask: self._space, **parts})

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]:
        obs, info = outputs_of(self.env, "reset", self.env.reset(seed=seed, options=options))
        return self._observed(obs, info, over=False), info

    def step(self, action: Any) -> tuple[Any, ...]:
        outputs = outputs_of(self.env, "step", self.env.step(action))
        obs, reward, terminated, truncated, info = outputs
        observed = self._observed(obs, info, over=terminated or truncated)
        return observed, reward, terminated, truncated, info

    def _observed(self, obs: Any, info: dict, over: bool) -> dict:
        legal = info.get(self._mask)
        if legal is None and not over:  # at the end nobody acts
            raise FailedEnvError(
                f"the info of {name_of(self.env)} has lost its {self._mask} after a step"
            )
        if legal is None:
            legal = _everything(self._space)
        else:
            legal = mask_of(legal, self._space, f"the {self._mask}")
        parts = obs if self._has_parts else {"obs": obs}
        return {self._mask: legal, **parts}


def _space_of(legal: Any, name: str) -> Space:
    """The space of a mask called `name`: an array, or a tuple of arrays."""
    if isinstance(legal, tuple):
        return Tuple([_space_of(part, name) for part in legal])
    shape = array_of(legal, f"the {name}").shape
    return Box(low=0, high=1, shape=shape, dtype=np.int8)


def _everything(space: Space) -> Any:
    """A mask with which all actions are legal."""
    if isinstance(space, Tuple):
        return tuple(map(_everything, space.spaces))
    return np.ones(space.shape or (), space.dtype)


def make_partial(whole: str, **arguments: Any) -> gymnasium.Env:
    """Make gymnasium's environment `whole` without velocities, and without a time limit.

    The registered time limit is applied to the result.
    """
    # Other names are refused here, because gymnasium would import a module that one may name
    indices = list(WITHOUT_VELOCITIES[whole])
    env = gymnasium.make(whole, max_episode_steps=-1, **arguments)
    space = env.observation_space
    assert isinstance(space, Box)  # of all WITHOUT_VELOCITIES
    partial_space = Box(space.low[indices], space.high[indices], dtype=space.low.dtype.type)
    return TransformObservation(env, lambda obs: obs[indices], partial_space)


for whole in WITHOUT_VELOCITIES:
    spec = gymnasium.spec(whole)
    gymnasium.register(
        f"pmaprl/{PARTIAL}{whole}",
        f"{__name__}:make_partial",
        kwargs={"whole": whole},
        max_episode_steps=spec.max_episode_steps,
        reward_threshold=spec.reward_threshold,
    )
