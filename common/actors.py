"""Actors: threads that step host environments with a policy on a device, watched, and restarted where they fail.

    actors = [Actor(index, ...), ...]
    with Crew(actors, queues, schedule, limits, ...) as crew:
        collected = crew.take()

Independent of the algorithm: `act` decides what it does with the parameters, and what it notes of its actions.
"""

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import numpy as np

from common.errors import TrainingError
from common.host_envs import HostEnvs
from common.rollouts import POLL, Collected, Rollout, RolloutQueues
from common.slots import ParameterSlots, Slot
from common.watch import GRACE, THREAD, Limits, Stopped, Worker, describe


class ActorsFailed(TrainingError):
    """Actors can deliver no more. What the learner has learned so far is fine."""


class Schedule(NamedTuple):
    """With lockstep: which rollout is learned from when, and which parameters it is collected with."""

    num_actors: int
    rollouts_per_update: int
    publish_interval: int
    first: int  # updates done before

    def version(self, actor: int, index: int) -> int:
        """The version for an actor's rollout number `index`: the newest that exists while its update is prepared."""
        update = (index * self.num_actors + actor) // self.rollouts_per_update
        return self.first + max(update - 1, 0) // self.publish_interval * self.publish_interval


class Actor(Worker):
    """N environments, stepped one rollout at a time. Used by one thread."""

    def __init__(
        self,
        index: int,
        make_envs: Callable[[int], HostEnvs],
        act: Callable,
        device: jax.Device,
        slots: ParameterSlots,
        num_steps: int,
        seed: tuple[int, ...],
        memory: Any = (),
        gamma: float | None = None,
    ):
        """`make_envs` takes a seed. `act` takes parameters, memory, key data, a step's number and observations
        [N, ...], and returns actions [N, ...], a record of them and the new memory. With `gamma`, rollouts carry the
        running discounted return.
        """
        super().__init__(f"actor {index}", ("env_step", "act", "wait_params", "wait_put"))
        self.index, self.device = index, device
        self.rollouts = self.restarts = 0
        self.restarted = -np.inf  # when it did so for the last time
        self.envs: HostEnvs | None = None
        self._make_envs, self._act, self._slots = make_envs, act, slots
        self._num_steps, self._seed, self._first_memory, self._gamma = num_steps, seed, memory, gamma

    def start(self) -> None:
        """Make the environments, other ones after every restart, and begin their episodes."""
        seeds = np.random.SeedSequence([*self._seed, self.index, self.restarts]).generate_state(2) >> 1
        with self.doing("reset"):
            self.envs = self._make_envs(int(seeds[0]))
            obs = self.envs.reset()
        self._obs = self._checked(obs)
        self._key = np.asarray(jax.random.key_data(jax.random.key(int(seeds[1]))))
        self._steps = np.uint32(0)
        self._memory = self._first_memory
        self._return, self._discounted = np.zeros((2, self.envs.num_envs))
        self._length = np.zeros(self.envs.num_envs, int)

    def collect(self, choose: Callable[[Slot | None], Slot]) -> Collected:
        """Step `num_steps` times; `choose` gets the parameters in use and returns those for the next step."""
        memory = jax.tree.map(lambda x: np.asarray(x)[None], self._memory)
        steps, returns, lengths = [], [], []
        slot = None
        for _ in range(self._num_steps):
            with self.doing("wait for parameters", "wait_params"):
                slot = choose(slot)
            steps.append(self._step(slot, returns, lengths))
        # Fresh memory for every rollout: the transfer of the last one may still be going on.
        rollout = jax.tree.map(lambda *leaves: np.stack(leaves), *steps)
        obs = np.stack([*(step.obs for step in steps), self._obs])
        self.rollouts += 1
        return Collected(self.index, rollout._replace(obs=obs, memory=memory), returns, lengths)

    def _step(self, slot: Slot, returns: list[float], lengths: list[int]) -> Rollout:
        """One step, [N, ...]; the results of episodes that it ended go into the lists."""
        obs = self._obs
        with self.doing("act", "act"):
            action, record, self._memory = self._act(slot.params, self._memory, self._key, self._steps, obs)
            action, record = jax.device_get((action, record))
        self._steps += np.uint32(1)
        with self.doing("step", "env_step"):
            out = self.envs.step(action)
        self._obs = self._checked(out.obs)
        self._check_finite(out.reward, "reward")
        final_obs = self._checked(out.final_obs) if self.envs.resets_in_step else None
        over = out.terminated | out.truncated
        self._forget(over | ~out.valid)
        discounted = self._account(out.reward, over, out.valid, returns, lengths)
        version = np.full(len(obs), slot.version, np.int32)
        outcome = out.reward, out.terminated, out.truncated, out.valid
        return Rollout(obs, action, record, *outcome, version, final_obs, discounted, ())

    def close(self) -> None:
        """Close the environments; what they raise then does not matter any more."""
        envs, self.envs = self.envs, None
        if envs is not None:
            with suppress(Exception), self.doing("close"):
                envs.close()

    def _forget(self, begins: np.ndarray) -> None:
        """Start the memory of environments anew whose next step is the first of an episode."""
        if not begins.any():
            return

        def forget(memory, first):
            return np.where(begins.reshape(-1, *[1] * (np.ndim(memory) - 1)), first, memory)

        self._memory = jax.tree.map(forget, self._memory, self._first_memory)

    def _account(self, reward, done, valid, returns: list[float], lengths: list[int]) -> np.ndarray | None:
        """Add up episodes; returns the running discounted returns [N], if wanted."""
        self._return += reward
        self._length += valid
        if done.any():
            returns.extend(self._return[done].tolist())
            lengths.extend(self._length[done].tolist())
            self._return[done] = 0.0
            self._length[done] = 0
        if self._gamma is None:
            return None
        discounted = self._gamma * self._discounted + reward
        self._discounted = np.where(done, 0.0, discounted)
        return discounted.astype(np.float32)

    def _checked(self, obs: np.ndarray) -> np.ndarray:
        """Observations [N, ...] in the type that the networks expect. Raises ValueError where they cannot be used."""
        spec, wanted = self.envs.spec, (self.envs.num_envs, *self.envs.spec.observation_space.shape)
        if obs.shape != wanted:
            raise ValueError(f"the observations of {self.name} have shape {obs.shape} instead of {wanted}")
        obs = obs.astype(spec.obs_dtype, copy=False)
        self._check_finite(obs, "observation")
        return obs

    def _check_finite(self, values: np.ndarray, what: str) -> None:
        if values.dtype.kind != "f" or np.isfinite(values).all():
            return
        finite = np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        raise ValueError(f"the {what} of environment {np.flatnonzero(~finite)[0]} of {self.name} is not finite")


class Crew:
    """All actors: each in a thread of its own, or with `serial` all in the caller's, one rollout at a time."""

    def __init__(
        self,
        actors: list[Actor],
        slots: ParameterSlots,
        queues: RolloutQueues,
        limits: Limits,
        warn: Callable[[str], None],
        schedule: Schedule | None = None,
        serial: bool = False,
        restarts: int = 0,
    ):
        """With a `schedule` (lockstep) everything happens in its fixed order, else as soon as it can.

        `restarts` is where their count begins; the limit is for those to come.
        """
        self.actors, self.queues, self.limits = actors, queues, limits
        self.restarts = self._restarts_before = restarts
        self._slots, self._warn, self._schedule, self._serial = slots, warn, schedule, serial
        self._taken = 0
        self._stop = threading.Event()
        self._failure: ActorsFailed | None = None
        self._lock = threading.Lock()
        threads = (threading.Thread(target=self._run, args=(actor,), name=THREAD, daemon=True) for actor in actors)
        self._threads = [] if serial else list(threads)

    def __enter__(self) -> "Crew":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the threads and close all environments, within `GRACE` seconds where they answer."""
        self._stop.set()
        deadline = time.monotonic() + GRACE
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if self._serial:
            for actor in self.actors:
                actor.close()
        self.queues.discard()
        stuck = [actor for actor, thread in zip(self.actors, self._threads, strict=False) if thread.is_alive()]
        if stuck:
            self._warn(f"actors that do not answer were left behind: {describe(stuck)}")

    def take(self, stopped: Callable[[], bool]) -> Collected | None:
        """The next rollout to learn from; None once `stopped`.

        Raises ActorsFailed where the actors have given up, are stuck, or deliver nothing for too long.
        """
        wanted = self._taken % len(self.actors) if self._schedule else None
        if self._serial:
            self._collect_now(self.actors[wanted], stopped)
        began = time.monotonic()
        while not stopped():
            self._raise_failures(time.monotonic() - began)
            collected = self.queues.take(wanted, POLL)
            if collected is not None:
                self._taken += 1
                return collected
        return None

    def _raise_failures(self, waited: float) -> None:
        if self._failure:
            raise self._failure
        for actor in self.actors:
            flag = actor.stuck(self.limits)
            if flag:
                raise ActorsFailed(f"{actor.name} is stuck ({flag}); {describe(self.actors)}")
        if waited > self.limits.learner:
            flag = f"--learner-timeout {self.limits.learner:g}"
            raise ActorsFailed(f"the learner got no rollout for {waited:.0f} s ({flag}); {describe(self.actors)}")

    def _run(self, actor: Actor) -> None:
        """The thread of one actor."""
        try:
            while self._attempt(actor, lambda: self._deliver_for_ever(actor), self._stop.is_set):
                pass
            actor.close()
        except BaseException as error:  # a thread that ends without a word would leave the run waiting
            self._failure = ActorsFailed(f"the thread of {actor.name} ended: {type(error).__name__}: {error}")
        actor.phase = "ended"

    def _collect_now(self, actor: Actor, stopped: Callable[[], bool]) -> None:
        def once():
            if actor.envs is None:
                actor.start()
            self.queues.put(actor.collect(self._chooser(actor, stopped)), stopped)

        while self._attempt(actor, once, stopped) and not self.queues.counts["waiting"]:
            pass

    def _deliver_for_ever(self, actor: Actor) -> None:
        actor.start()
        while not self._stop.is_set():
            collected = actor.collect(self._chooser(actor, self._stop.is_set))
            with actor.doing("put", "wait_put"):
                self.queues.put(collected, self._stop.is_set)

    def _chooser(self, actor: Actor, stopped: Callable[[], bool]) -> Callable[[Slot | None], Slot]:
        """Where the actor's next rollout gets its parameters from; raises Stopped once it is time."""
        version = self._schedule and self._schedule.version(actor.index, actor.rollouts)

        def newest(_: Slot | None) -> Slot:
            if stopped():
                raise Stopped
            return self._slots.latest(actor.device)

        def scheduled(slot: Slot | None) -> Slot:
            while not stopped():
                slot = slot or self._slots.wait_for(version, actor.device, POLL)
                if slot:
                    return slot
            raise Stopped

        return newest if self._schedule is None else scheduled

    def _attempt(self, actor: Actor, work: Callable[[], None], stopped: Callable[[], bool]) -> bool:
        """Do `work`; where it raises, make the actor ready to begin anew. Returns whether to go on."""
        try:
            work()
        except Stopped:
            return False
        except Exception as error:
            if stopped():
                return False
            actor.close()
            return self._may_restart(actor, error, stopped)
        return not stopped()

    def _may_restart(self, actor: Actor, error: Exception, stopped: Callable[[], bool]) -> bool:
        trace = "".join(traceback.format_exception(error)).rstrip()
        last = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        with self._lock:
            allowed = self.restarts - self._restarts_before < self.limits.max_restarts
            self.restarts += allowed
            number = self.restarts - self._restarts_before
        if not allowed:
            self._warn(f"{actor.name} failed:\n{trace}")
            self._failure = ActorsFailed(
                f"{actor.name} failed, after {self.limits.max_restarts} restarts (--max-restarts): {last}"
            )
            return False
        now = time.monotonic()
        until = max(actor.restarted + self.limits.restart_interval, now)
        when = f"in {until - now:.0f} s" if until > now else "now"
        self._warn(f"{actor.name} failed and restarts {when} ({number} of {self.limits.max_restarts}):\n{trace}")
        with actor.doing("wait to restart"):
            while time.monotonic() < until and not stopped():
                time.sleep(POLL)
        actor.restarts, actor.restarted = actor.restarts + 1, time.monotonic()
        return not stopped()
