"""The drivers of algorithms that learn from rollouts of actors, which step environments on the
host.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pmaprl.actors.threads import HostRollout
from pmaprl.cli.errors import UsageError
from pmaprl.device.agents import PolicyInput, acting_part, with_acting_part, with_memory
from pmaprl.device.drivers import random_actions, replay_learner
from pmaprl.device.interface import (
    Actors,
    OffPolicy,
    OnPolicy,
    Rollout,
    RunState,
    Transition,
    UpdateContext,
)
from pmaprl.device.optim import apply_schedules, global_norm, hparams_of
from pmaprl.device.replay import Replay, example_transition, new_replay
from pmaprl.device.rollout import (
    OTHER_STREAM,
    action_noise,
    ids_in_process,
    ids_over_processes,
    minibatch_indices,
)
from pmaprl.device.sharding import AXIS, TrainState
from pmaprl.device.statistics import MetricSums, mean_metrics_over_devices
from pmaprl.envs.host import begins
from pmaprl.envs.masks import to_env
from pmaprl.envs.ranges import range_metrics
from pmaprl.envs.spaces import EnvSpec, batch_shape


class HostDriver(NamedTuple):
    """An algorithm's run beside actors, as functions of one agent."""

    begin: Callable  # keys of the learner and of everything random -> learner, RunState
    update: Callable  # TrainState, HostRollouts -> TrainState, what to publish, Tally
    publish: Callable  # learner, RunState -> what an actor needs to act
    # Published, memory, key data, step's number, Seen [N, ...] -> actions, extras, memory
    act_on_host: Callable
    memory: Callable  # number of environments N -> memory of `act_on_host` at first
    actors: Callable = tuple  # -> the `actors` of a TrainState at first: () without a replay buffer
    snapshot_metrics: Callable = (
        lambda state: {}
    )  # TrainState -> metrics of how things stand after an update

    def init(self, seed: jax.Array) -> TrainState:
        """The state of a run with this `seed` []."""
        learner, run = self.begin(*jax.random.split(jax.random.key(seed)))
        return TrainState(learner, self.actors(), run)


def host_driver(algorithm: OnPolicy | OffPolicy, args: Any, env: EnvSpec) -> HostDriver:
    """The driver for the kind of `algorithm`."""
    return (off_policy if isinstance(algorithm, OffPolicy) else on_policy)(algorithm, args, env)


def on_policy(algorithm: OnPolicy, args: Any, env: EnvSpec) -> HostDriver:
    """Updates that learn from some rollouts of actors, each once."""
    if algorithm.wants_reward:
        raise UsageError(
            "--obs-prev-action-reward needs an environment on the devices: actors do not "
            "show rewards"
        )
    recurrent = with_memory(algorithm)

    def begin(params_key: jax.Array, key: jax.Array) -> tuple[Any, RunState]:
        return algorithm.init(params_key, hparams_of(args)), RunState(key, jnp.int32(0), {})

    def update(
        state: TrainState, rollouts: tuple[HostRollout, ...]
    ) -> tuple[TrainState, Any, MetricSums]:
        learner = state.learner
        run = state.run
        # [T, N of all, ...]
        rollout = as_rollout(jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *rollouts))
        hparams, scheduled = apply_schedules(args, run, learner)
        key = jax.random.fold_in(run.key, run.updates)
        minibatches = partial(minibatches_of, key, rollout.reward.shape[1], len(rollouts))
        context = UpdateContext(
            hparams=hparams,
            updates=run.updates,
            key=jax.random.fold_in(key, OTHER_STREAM),
            minibatches=minibatches,
        )
        learner, metrics = algorithm.update(learner, rollout, context)
        metrics = mean_metrics_over_devices(metrics) | range_metrics(
            env.observation_space, AXIS, rollout.obs
        )
        run = run.replace(updates=run.updates + 1)
        metrics |= scheduled | {"params/norm": global_norm(learner.params)}
        return TrainState(learner, (), run), publish(learner, run), MetricSums.of(metrics)

    def minibatches_of(
        key: jax.Array, num_envs: int, num_rollouts: int, epochs: int, num_minibatches: int
    ):
        """Which of this device's samples go into each minibatch, [E, M, B].

        Every minibatch has equal parts of all rollouts, the same samples on any number of devices.
        """
        local = num_envs // num_rollouts  # of this device, in each rollout

        def of_rollout(index, number):
            own_key = jax.random.fold_in(key, number)
            own = minibatch_indices(
                own_key, args.samples_per_env, local, epochs, num_minibatches, args.processes
            )
            step, env = jnp.divmod(own, local)
            return step * num_envs + index * local + env

        indices = jax.vmap(of_rollout)(
            jnp.arange(num_rollouts), ids_over_processes(num_rollouts, args.processes)
        )
        # Of [R, E, M, B / R]
        return jnp.moveaxis(indices, 0, 2).reshape(epochs, num_minibatches, -1)

    def publish(learner: Any, run: RunState) -> Any:
        return learner.replace(
            **{name: () for name in vars(learner) if name.startswith("opt_state")}
        )

    def act_on_host(
        learner: Any, memory: Any, key_data: jax.Array, step: jax.Array, seen: PolicyInput
    ) -> tuple[Any, ...]:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), step)
        return recurrent.explore(
            learner, seen, memory, action_noise(key, env.action_space, batch_shape(seen.obs))
        )

    return HostDriver(
        begin=begin,
        update=update,
        publish=publish,
        act_on_host=act_on_host,
        memory=recurrent.training_memory or recurrent.initial_memory,
    )


def as_rollout(host: HostRollout) -> Rollout:
    """What actors collected, as algorithms take it."""
    reward = jnp.concatenate([jnp.zeros_like(host.reward[:1]), host.reward])
    seen = PolicyInput(
        host.obs, jnp.concatenate([host.first, begins(host)]), reward
    )  # [T + 1, N, ...]
    before = jax.tree.map(lambda x: x[:-1], seen)
    last = jax.tree.map(lambda x: x[-1], seen)
    memory = jax.tree.map(lambda x: x[0], host.memory)
    outcome = host.reward, host.terminated, host.truncated, host.final_obs
    kept = {"valid": host.valid, "version": host.version}
    return Rollout(before, host.action, host.extras, *outcome, last, memory, **kept)


def off_policy(algorithm: OffPolicy, args: Any, env: EnvSpec) -> HostDriver:
    """Updates that store some rollouts of actors, and make the gradient updates that are due after
    them.
    """
    groups = args.envs_per_actor // args.block * args.parts
    own_parts = args.parts // args.processes
    # Nothing to compute with
    like = jax.eval_shape(lambda: algorithm.init(jax.random.key(0), hparams_of(args)))

    def begin(params_key: jax.Array, key: jax.Array) -> tuple[Any, RunState]:
        run = RunState(
            key=key,
            updates=jnp.int32(0),
            member_values={},
            gradient_updates=jnp.int32(0),
            env_steps=jnp.int32(0),
        )
        return algorithm.init(params_key, hparams_of(args)), run

    def with_empty_buffer() -> Actors:
        num_rings = args.envs_per_update // jax.lax.axis_size(AXIS)
        replay = new_replay(example_transition(args, env, versions=True), num_rings, args.capacity)
        return Actors(
            (), (), (), (), replay, jnp.zeros(num_rings) if args.normalize_rewards else ()
        )

    def update(
        state: TrainState, rollouts: tuple[HostRollout, ...]
    ) -> tuple[TrainState, Any, MetricSums]:
        run = state.run
        rollout = merge_rollouts(rollouts, own_parts, args.block)
        transitions = transitions_of(rollout, with_first=args.n_steps > 1)
        valid = rollout.valid
        actors = state.actors.replace(replay=state.actors.replay.add_valid(transitions, valid))
        new, stored = jax.lax.psum((jnp.sum(valid), jnp.sum(actors.replay.count)), AXIS)
        state = TrainState(state.learner, actors, run.replace(env_steps=run.env_steps + new))
        key = jax.random.fold_in(run.key, run.updates + 1)
        due = args.updates_due(stored) - args.updates_due(stored - new)
        # A ring may have less than others: steps that only reset are not stored, and any actor's
        # rollout may come first
        due = jnp.where(jax.lax.pmin(can_sample(actors.replay, args.n_steps), AXIS), due, 0)
        # Nothing goes on behind a step that counts nothing
        done = rollout.terminated | rollout.truncated | ~valid
        state, tally = learn(state, transitions, done, key, due, valid)
        tally |= MetricSums.of(range_metrics(env.observation_space, AXIS, transitions.obs))
        return state, publish(state.learner, state.run), tally

    def keys_of_groups(key: jax.Array) -> jax.Array:
        """A key for each of this device's groups of rings, [G]: by block of environments, and in it
        by part.
        """
        block = ids_in_process(groups // own_parts // jax.lax.axis_size(AXIS), args.processes)[
            :, None
        ]
        part = ids_over_processes(own_parts, args.processes)
        return jax.vmap(jax.random.fold_in, (None, 0))(key, (block * args.parts + part).ravel())

    def can_sample(replay: Replay, num_steps: int) -> jax.Array:
        return replay.can_sample(groups // jax.lax.axis_size(AXIS), num_steps)

    learn = replay_learner(algorithm, args, keys_of_groups, args.batch_size // groups)

    def publish(learner: Any, run: RunState) -> Any:
        return acting_part(learner), run.env_steps < args.learning_starts

    def act_on_host(
        published: Any, memory: Any, key_data: jax.Array, step: jax.Array, seen: PolicyInput
    ) -> tuple[Any, ...]:
        """Actions as environments take them and as the buffer keeps them: sampled, or at first at
        random.
        """
        (part, warming_up), obs = published, seen.obs
        policy_key, held = jax.random.split(jax.random.wrap_key_data(key_data))
        policy_key = jax.random.fold_in(policy_key, step)
        held = jax.random.fold_in(held, step // args.hold_random)
        noise = action_noise(policy_key, env.action_space, batch_shape(obs))
        action = algorithm.explore(with_acting_part(like, part), obs, noise)
        random = random_actions(jax.random.split(held, batch_shape(obs)[0]), obs, env)
        action = jnp.where(warming_up, random, action)
        return to_env(action, env.action_space), action, memory

    def snapshot_metrics(state: TrainState) -> dict[str, jax.Array]:
        run = state.run
        replay = state.actors.replay
        # Below zero are keys that no update has
        keys = keys_of_groups(jax.random.fold_in(run.key, -1 - run.updates))
        age = run.updates - replay.sample(keys, args.batch_size // groups).version
        age = jnp.where(can_sample(replay, 1), age, jnp.nan)
        return {
            "gradient_updates": run.gradient_updates,
            "replay/stored": jax.lax.psum(jnp.sum(replay.count), AXIS),
            "replay/fill": jax.lax.pmean(jnp.mean(replay.fill), AXIS),
            # Updates since the policy that acted
            "replay/age_p50": jnp.median(jax.lax.all_gather(age, AXIS)),
            "replay/ratio": run.gradient_updates
            / jnp.maximum(run.env_steps - args.learning_starts, 1),
        }

    return HostDriver(
        begin=begin,
        update=update,
        publish=publish,
        act_on_host=act_on_host,
        memory=lambda count: (),
        actors=with_empty_buffer,
        snapshot_metrics=snapshot_metrics,
    )


def merge_rollouts(rollouts: tuple[HostRollout, ...], parts: int, width: int) -> HostRollout:
    """One rollout of the environments of all of them, [T, N of all, ...].

    Blocks of `width` environments come one after another, of each block the `parts` of the
    rollouts, of each part the environments, of each environment the rollouts: those of a device are
    neighbours, however many devices there are.
    """

    def merge(*x):
        steps, envs, *shape = x[0].shape
        x = jnp.stack(x, axis=2).reshape(steps, envs // width, width, parts, -1, *shape)
        return jnp.swapaxes(x, 2, 3).reshape(steps, -1, *shape)

    return jax.tree.map(merge, *rollouts)


def transitions_of(host: HostRollout, with_first: bool = False) -> Transition:
    """What the buffer keeps of the steps of a rollout, [T, N, ...].

    With `first`, where that is asked for: an episode begins, or the rollout, as the one before may
    be another actor's.
    """
    rollout = as_rollout(host)
    first = rollout.seen.first.at[0].set(True) if with_first else None
    kept = (
        rollout.obs,
        rollout.extras,
        rollout.reward,
        rollout.terminated,
        rollout.next_obs,
        rollout.version,
    )
    return Transition(*kept, first)
