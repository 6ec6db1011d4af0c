"""Drivers of algorithms that learn from actors, which step environments on the host."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from pmaprl.actors.threads import HostRollout
from pmaprl.cli.errors import UsageError
from pmaprl.device.agents import acting_part, with_acting_part
from pmaprl.device.contract import (
    AnyAlgorithm,
    OffPolicy,
    OnPolicy,
    RecurrentOnPolicy,
    as_recurrent,
)
from pmaprl.device.drivers import random_actions, replay_learner
from pmaprl.device.interface import PolicyInput, Rollout, RunState, Transition, UpdateContext
from pmaprl.device.keys import OTHER_STREAM, action_noise, ids_in_process, ids_over_processes
from pmaprl.device.minibatches import minibatch_indices
from pmaprl.device.optim import apply_schedules, global_norm, hparams_of
from pmaprl.device.replay import Replay, example_transition, new_replay
from pmaprl.device.sharding import AXIS
from pmaprl.device.state import TrainState
from pmaprl.device.statistics import MetricSums, check_metrics, reduce_over_devices
from pmaprl.envs.host import begins
from pmaprl.envs.masks import to_env
from pmaprl.envs.ranges import range_metrics
from pmaprl.envs.spaces import EnvSpec, batch_shape


class Experience(struct.PyTreeNode):
    """Steps of actors that the devices keep, with the names of the same parts of `Actors`."""

    replay: Replay  # [N, K, ...] rings of K slots
    discounted: Any  # [N] discounted returns so far, with --normalize-rewards; otherwise ()


class HostDriver(NamedTuple):
    """An algorithm's run beside actors, as functions of one agent."""

    # (key of the learner, key of everything random) -> (learner, RunState)
    begin: Callable
    # (TrainState, tuple of HostRollout) -> (TrainState, published, MetricSums)
    update: Callable
    # (learner, RunState) -> published: all that an actor needs to act
    publish: Callable
    # (published, memory, key data, number of the step, PolicyInput [N, ...]) ->
    # (actions [N, ...], extras [N, ...], memory)
    act_on_host: Callable
    # number of environments N -> first memory of `act_on_host`
    memory: Callable
    # () -> first `actors` of a TrainState: `Experience`, or () without a replay buffer
    actors: Callable = tuple
    # TrainState -> metrics of the state after an update
    snapshot_metrics: Callable = lambda state: {}

    def init(self, seed: jax.Array) -> TrainState:
        """Begin a run with this `seed` []."""
        params_key, key = jax.random.split(jax.random.key(seed))
        learner, run = self.begin(params_key, key)
        return TrainState(learner, self.actors(), run)


def host_driver(algorithm: AnyAlgorithm, args: Any, env: EnvSpec) -> HostDriver:
    """The driver for the kind of `algorithm`."""
    if isinstance(algorithm, OffPolicy):
        return off_policy(algorithm, args, env)
    return on_policy(algorithm, args, env)


def on_policy(algorithm: OnPolicy | RecurrentOnPolicy, args: Any, env: EnvSpec) -> HostDriver:
    """Driver whose updates learn from rollouts of actors, from each rollout once."""
    recurrent = as_recurrent(algorithm)
    if recurrent.wants_reward:
        raise UsageError(
            "--obs-prev-action-reward needs an environment on the devices: actors do not "
            "show rewards"
        )

    def begin(params_key: jax.Array, key: jax.Array) -> tuple[Any, RunState]:
        learner = algorithm.init(params_key, hparams_of(args))
        return learner, RunState(key=key, updates=jnp.int32(0), member_values={})

    def update(
        state: TrainState, rollouts: tuple[HostRollout[Array], ...]
    ) -> tuple[TrainState, Any, MetricSums]:
        learner = state.learner
        run = state.run
        # [T, N of all rollouts, ...]
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *rollouts)
        rollout = as_rollout(joined)
        hparams, scheduled = apply_schedules(args, run, learner)
        key = jax.random.fold_in(run.key, run.updates)
        num_envs = rollout.reward.shape[1]
        minibatches = partial(minibatches_of, key, num_envs, len(rollouts))
        context = UpdateContext(
            hparams=hparams,
            updates=run.updates,
            key=jax.random.fold_in(key, OTHER_STREAM),
            minibatches=minibatches,
        )
        learner, metrics = algorithm.update(learner, rollout, context)
        check_metrics(metrics)
        metrics = reduce_over_devices(metrics)
        metrics |= range_metrics(env.observation_space, AXIS, rollout.obs)
        metrics |= scheduled
        metrics["params/norm"] = global_norm(learner.params)
        run = run.replace(updates=run.updates + 1)
        state = TrainState(learner, (), run)
        return state, publish(learner, run), MetricSums.of(metrics)

    def minibatches_of(
        key: jax.Array, num_envs: int, num_rollouts: int, epochs: int, num_minibatches: int
    ):
        """Indices [E, M, B] of this device's samples in each minibatch.

        Every minibatch has equal parts of all rollouts, the same samples on any number of devices.
        """
        local = num_envs // num_rollouts  # this device's environments in each rollout

        def of_rollout(index, rollout_id):
            rollout_key = jax.random.fold_in(key, rollout_id)
            samples = minibatch_indices(
                rollout_key, args.samples_per_env, local, epochs, num_minibatches, args.processes
            )
            step, env = jnp.divmod(samples, local)
            return step * num_envs + index * local + env

        rollout_ids = ids_over_processes(num_rollouts, args.processes)
        indices = jax.vmap(of_rollout)(jnp.arange(num_rollouts), rollout_ids)
        by_minibatch = jnp.moveaxis(indices, 0, 2)  # [E, M, R, B / R]
        return by_minibatch.reshape(epochs, num_minibatches, -1)

    def publish(learner: Any, run: RunState) -> Any:
        # Actors do not need the optimizer's state, which is twice as large as the parameters
        unneeded = {name: () for name in vars(learner) if name.startswith("opt_state")}
        return learner.replace(**unneeded)

    def act_on_host(
        learner: Any, memory: Any, key_data: jax.Array, step: jax.Array, seen: PolicyInput
    ) -> tuple[Any, ...]:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), step)
        noise = action_noise(key, env.action_space, batch_shape(seen.obs))
        return recurrent.explore(learner, seen, memory, noise)

    return HostDriver(
        begin=begin,
        update=update,
        publish=publish,
        act_on_host=act_on_host,
        memory=recurrent.training_memory,
    )


def as_rollout(host: HostRollout[Array]) -> Rollout:
    """Convert a rollout of actors to the form that algorithms take."""
    first_reward = jnp.zeros_like(host.reward[:1])
    seen = PolicyInput(  # [T + 1, N, ...]
        obs=host.obs,
        first=jnp.concatenate([host.first, begins(host)]),
        reward=jnp.concatenate([first_reward, host.reward]),
    )
    return Rollout(
        seen=jax.tree.map(lambda x: x[:-1], seen),
        action=host.action,
        extras=host.extras,
        reward=host.reward,
        terminated=host.terminated,
        truncated=host.truncated,
        final_obs=host.final_obs,
        last=jax.tree.map(lambda x: x[-1], seen),
        memory=jax.tree.map(lambda x: x[0], host.memory),
        valid=host.valid,
        version=host.version,
    )


def off_policy(algorithm: OffPolicy, args: Any, env: EnvSpec) -> HostDriver:
    """Driver whose updates store rollouts of actors, and make the gradient updates then due."""
    groups = args.envs_per_actor // args.block * args.replay_partitions
    local_partitions = args.replay_partitions // args.processes
    # Shapes only, so that making the driver computes nothing
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

    def with_empty_buffer() -> Experience:
        num_rings = args.envs_per_update // jax.lax.axis_size(AXIS)
        example = example_transition(args, env, versions=True)
        return Experience(
            replay=new_replay(example, num_rings, args.capacity),
            discounted=jnp.zeros(num_rings) if args.normalize_rewards else (),
        )

    def update(
        state: TrainState, rollouts: tuple[HostRollout[Array], ...]
    ) -> tuple[TrainState, Any, MetricSums]:
        run = state.run
        rollout = merge_rollouts(rollouts, local_partitions, args.block)
        transitions = transitions_of(rollout, with_first=args.n_steps > 1)
        valid = rollout.valid
        replay = state.actors.replay.add_valid(transitions, valid)
        actors = state.actors.replace(replay=replay)
        new, stored = jax.lax.psum((jnp.sum(valid), jnp.sum(replay.count)), AXIS)
        state = TrainState(state.learner, actors, run.replace(env_steps=run.env_steps + new))
        key = jax.random.fold_in(run.key, run.updates + 1)
        due = args.updates_due(stored) - args.updates_due(stored - new)
        # Some rings may have too few steps still: steps that only reset are not stored, and the
        # rollout of any actor may come first
        is_ready = jax.lax.pmin(can_sample(replay, args.n_steps), AXIS)
        due = jnp.where(is_ready, due, 0)
        # An n-step return never crosses a step that only reset
        done = rollout.terminated | rollout.truncated | ~valid
        state, tally = learn(state, transitions, done, key, due, valid)
        tally |= MetricSums.of(range_metrics(env.observation_space, AXIS, transitions.obs))
        return state, publish(state.learner, state.run), tally

    def keys_of_groups(key: jax.Array) -> jax.Array:
        """Keys [G] of this device's groups of rings, ordered by block and then by part."""
        num_blocks = groups // local_partitions // jax.lax.axis_size(AXIS)
        block = ids_in_process(num_blocks, args.processes)
        part = ids_over_processes(local_partitions, args.processes)
        group_ids = block[:, None] * args.replay_partitions + part
        return jax.vmap(jax.random.fold_in, (None, 0))(key, group_ids.ravel())

    def can_sample(replay: Replay, num_steps: int) -> jax.Array:
        return replay.can_sample(groups // jax.lax.axis_size(AXIS), num_steps)

    learn = replay_learner(algorithm, args, keys_of_groups, args.batch_size // groups)

    def publish(learner: Any, run: RunState) -> Any:
        return acting_part(learner), run.env_steps < args.learning_starts

    def act_on_host(
        published: Any, memory: Any, key_data: jax.Array, step: jax.Array, seen: PolicyInput
    ) -> tuple[Any, ...]:
        """Sample actions; at first random ones.

        Returns:
            The actions as environments take them, as the buffer stores them, and the memory.
        """
        part, warming_up = published
        obs = seen.obs
        policy_key, random_key = jax.random.split(jax.random.wrap_key_data(key_data))
        policy_key = jax.random.fold_in(policy_key, step)
        random_key = jax.random.fold_in(random_key, step // args.hold_random)
        noise = action_noise(policy_key, env.action_space, batch_shape(obs))
        action = algorithm.explore(with_acting_part(like, part), obs, noise)
        random_keys = jax.random.split(random_key, batch_shape(obs)[0])
        action = jnp.where(warming_up, random_actions(random_keys, obs, env), action)
        return to_env(action, env.action_space), action, memory

    def snapshot_metrics(state: TrainState) -> dict[str, jax.Array]:
        run = state.run
        replay = state.actors.replay
        # No update folds in a negative number
        keys = keys_of_groups(jax.random.fold_in(run.key, -1 - run.updates))
        samples = replay.sample(keys, args.batch_size // groups)
        age = run.updates - samples.version  # updates since the policy that acted
        age = jnp.where(can_sample(replay, 1), age, jnp.nan)
        steps_of_learning = jnp.maximum(run.env_steps - args.learning_starts, 1)
        return {
            "gradient_updates": run.gradient_updates,
            "replay/stored": jax.lax.psum(jnp.sum(replay.count), AXIS),
            "replay/fill": jax.lax.pmean(jnp.mean(replay.fill), AXIS),
            "replay/age_p50": jnp.median(jax.lax.all_gather(age, AXIS)),
            "replay/ratio": run.gradient_updates / steps_of_learning,
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


def merge_rollouts(
    rollouts: tuple[HostRollout[Array], ...], parts: int, width: int
) -> HostRollout[Array]:
    """Merge rollouts into one with the environments of all, [T, N of all, ...].

    The environment axis is ordered by (block, part, environment, rollout), so that the share of
    each device is contiguous, however many devices there are.

    Args:
        rollouts: the rollouts of this device.
        parts: number of parts that the rollouts are divided into.
        width: number of environments of a block.
    """

    def merge(*arrays):
        steps, envs, *shape = arrays[0].shape
        stacked = jnp.stack(arrays, axis=2)  # [T, N, R, ...]
        blocks = stacked.reshape(steps, envs // width, width, parts, -1, *shape)
        return jnp.swapaxes(blocks, 2, 3).reshape(steps, -1, *shape)

    return jax.tree.map(merge, *rollouts)


def transitions_of(host: HostRollout[Array], with_first: bool = False) -> Transition:
    """Transitions [T, N, ...] of a rollout, for the buffer.

    Args:
        host: the rollout.
        with_first: Add `first`, which is True where an episode or the rollout begins: the rollout
            before may be another actor's.
    """
    rollout = as_rollout(host)
    return Transition(
        obs=rollout.obs,
        action=rollout.extras,
        reward=rollout.reward,
        terminated=rollout.terminated,
        next_obs=rollout.next_obs,
        version=rollout.version,
        first=rollout.seen.first.at[0].set(True) if with_first else None,
    )
