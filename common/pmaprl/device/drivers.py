"""Drivers of algorithms whose environments step on the devices: rollouts, replay, updates."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pmaprl.device.contract import OffPolicy, OnPolicy, RecurrentOnPolicy, with_memory
from pmaprl.device.episodes import count_episodes, new_recent, new_tracker
from pmaprl.device.interface import (
    Actors,
    GradientContext,
    PolicyInput,
    Rollout,
    RunState,
    Transition,
    UpdateContext,
)
from pmaprl.device.keys import OTHER_STREAM, action_noise, keys_of, rollout_keys, split_keys
from pmaprl.device.loops import Packed, repeat
from pmaprl.device.minibatches import minibatch_indices
from pmaprl.device.opponents import deal_components, init_pool, sample_opponent, update_pool
from pmaprl.device.optim import apply_schedules, global_norm, hparams_of
from pmaprl.device.replay import example_transition, new_replay
from pmaprl.device.rollout import (
    keys_of_steps,
    new_starts,
    reset_mid_episode,
    resets_of_steps,
    step_envs,
)
from pmaprl.device.sharding import AXIS, flat_pmean, same_for_all_seeds
from pmaprl.device.state import TrainState
from pmaprl.device.statistics import MetricSums, check_metrics, mean_metrics_over_devices
from pmaprl.envs.environment import Env, Step
from pmaprl.envs.masks import is_mask, legal_actions, legal_metrics, to_env, uniform_action
from pmaprl.envs.ranges import range_metrics
from pmaprl.envs.spaces import EnvSpec, leaves
from pmaprl.envs.variation import member_env

# A rollout keeps arrays of a step in one vector, up to this many numbers of an environment
SMALL = 64


class Driver(NamedTuple):
    """A run of an algorithm on the devices, as functions of one agent.

    Attributes:
        init: `init(seed, member_values)` returns the `TrainState` for a seed [] and the values []
            of the flags that differ between members, by name.
        update: `update(state)` returns the `TrainState` after an update, the `MetricSums` of its
            metrics and those of its episodes.
        snapshot_metrics: `snapshot_metrics(state)` returns metrics [] at the end of an interval.
    """

    init: Callable
    update: Callable
    snapshot_metrics: Callable = lambda state: {}


def on_policy(
    algorithm: OnPolicy | RecurrentOnPolicy,
    args: Any,
    env: Env,
) -> Driver:
    """Drive an algorithm by rollouts.

    Each update collects a rollout of --num-steps steps with the newest policy, and learns from it.
    """
    recurrent = with_memory(algorithm)
    explore = recurrent.explore

    def init(seed: Array, member_values: dict[str, Array] | None = None) -> TrainState:
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = args.num_envs // jax.lax.axis_size(AXIS)
        learner = algorithm.init(params_key, hparams_of(args, member_values))
        keys = keys_of(envs_key, num_envs)
        env_of_member = member_env(env, member_values)
        if args.decorrelate:
            obs, env_state = reset_mid_episode(env_of_member, keys)
        else:
            obs, env_state = jax.vmap(env_of_member.reset)(keys)
        actors = Actors(
            env_state=env_state,
            seen=PolicyInput.at_start(obs),
            memory=recurrent.training_memory(num_envs),
            tracker=new_tracker(num_envs, args.decorrelate),
        )
        run = RunState(
            key=key,
            updates=jnp.int32(0),
            member_values=member_values or {},
            recent=new_recent(),
            opponent_pool=init_pool(args, learner),
        )
        return TrainState(
            learner=learner,
            actors=actors,
            run=run,
        )

    def update(state: TrainState) -> tuple[TrainState, MetricSums, MetricSums]:
        learner = state.learner
        run = state.run
        run = run.replace(opponent_pool=update_pool(args, run, learner))
        rollout_key, key = jax.random.split(jax.random.fold_in(run.key, run.updates))
        actors, rollout, steps = collect(learner, state.actors, run, rollout_key)
        tracker, recent, episodes = count_episodes(actors.tracker, run.recent, steps)
        actors = actors.replace(tracker=tracker)

        hparams, scheduled = apply_schedules(args, run, learner)
        num_envs = tracker.ret.size
        context = UpdateContext(
            hparams=hparams,
            updates=run.updates,
            key=jax.random.fold_in(key, OTHER_STREAM),
            minibatches=partial(minibatch_indices, key, args.samples_per_env, num_envs),
        )
        learner, metrics = algorithm.update(learner, rollout, context)
        check_metrics(metrics)
        run = run.replace(recent=recent, updates=run.updates + 1)

        metrics = mean_metrics_over_devices(metrics) | scheduled
        metrics |= legal_metrics(rollout.obs, env.action_space, AXIS)
        metrics |= range_metrics(env.observation_space, AXIS, rollout.obs, rollout.next_obs)
        metrics |= {"params/norm": global_norm(learner.params)}
        state = TrainState(
            learner=learner,
            actors=actors,
            run=run,
        )
        return state, MetricSums.of(metrics), episodes

    def collect(
        learner: Any,
        actors: Actors,
        run: RunState,
        key: Array,
    ) -> tuple[Actors, Rollout, Step]:
        """Step all environments `num_steps` times with the current policy.

        Returns:
            The actors after the rollout, the rollout, and its steps, by which episodes are counted.
        """
        num_envs = actors.tracker.ret.size
        noise_keys, env_keys = split_keys(rollout_keys(key, args.num_steps, num_envs), 2)  # [T, N]
        draw_noise = partial(action_noise, space=env.action_space)
        noise = jax.vmap(jax.vmap(draw_noise))(noise_keys)  # all steps in one pass
        starts_key, opponent_key, deal_key = (
            jax.random.fold_in(key, args.num_steps + index) for index in range(3)
        )
        game = member_env(env, run.member_values)
        acted_by_us = None
        opponent = sample_opponent(args, run, learner, opponent_key)

        def reply(key: Array, obs: Any) -> Array:
            row = jax.tree.map(lambda x: x[None], obs)
            return algorithm.act(opponent, row, key)[0]

        if opponent is not None and env.is_game:  # it plays all other seats
            game = game.against(reply)
        elif opponent is not None:  # a teammate, which plays some agents of the team
            acted_by_us = deal_components(keys_of(deal_key, num_envs), env.agents)
        starts = new_starts(game, starts_key, args.reset_pool)

        def step(carry, inputs):
            env_state, seen, memory = carry
            noise, keys, resets = inputs
            action, extras, memory = explore(learner, seen, memory, noise)
            if acted_by_us is not None:
                action = jnp.where(acted_by_us, action, explore(opponent, seen, memory, noise)[0])
            out = step_envs(game, keys, env_state, action, starts, resets)
            # Without the barrier, XLA computes a step twice: once more for the rollout's arrays
            out = jax.lax.optimization_barrier(out._replace(final_state=None))
            over = out.terminated | out.truncated
            seen_next = PolicyInput(
                obs=out.obs,
                first=over,
                reward=out.reward,
            )
            recorded = seen.obs, action, extras, out._replace(obs=None, state=None)
            return (out.state, seen_next, memory), Packed.of(recorded, largest=SMALL * num_envs)

        start = actors.env_state, actors.seen, actors.memory
        resets = None if starts else resets_of_steps(game, env_keys)
        inputs = noise, keys_of_steps(game, env_keys, starts, resets), resets
        (env_state, after, memory), recorded = jax.lax.scan(step, start, inputs)
        obs, action, extras, steps = recorded.tree

        # First steps and rewards come from the outcomes. Then XLA carries through the loop only
        # what the policy reads
        over = steps.terminated | steps.truncated
        first = jnp.concatenate([actors.seen.first[None], over])
        reward = jnp.concatenate([actors.seen.reward[None], steps.reward])
        last = PolicyInput(
            obs=after.obs,
            first=first[-1],
            reward=reward[-1],
        )
        if acted_by_us is not None:
            acted_by_us = jnp.broadcast_to(acted_by_us, (args.num_steps, *acted_by_us.shape))
        rollout = Rollout(
            seen=PolicyInput(
                obs=obs,
                first=first[:-1],
                reward=reward[:-1],
            ),
            action=action,
            extras=extras,
            reward=steps.reward,
            terminated=steps.terminated,
            truncated=steps.truncated,
            final_obs=steps.final_obs,
            last=last,
            memory=actors.memory,
            acted_by_us=acted_by_us,
        )
        return (
            actors.replace(
                env_state=env_state,
                seen=last,
                memory=memory,
            ),
            rollout,
            steps,
        )

    return Driver(init, update)


def off_policy(
    algorithm: OffPolicy,
    args: Any,
    env: Env,
) -> Driver:
    """Drive an algorithm by a replay buffer.

    Each update steps every environment once, stores that, and makes the gradient updates that are
    due.
    """
    groups = args.num_envs // args.block

    def keys_of_groups(key: Array) -> Array:
        return keys_of(key, groups // jax.lax.axis_size(AXIS))

    learn = replay_learner(algorithm, args, keys_of_groups, args.batch_size // groups)

    def init(seed: Array, member_values: dict[str, Array] | None = None) -> TrainState:
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = args.num_envs // jax.lax.axis_size(AXIS)
        env_of_member = member_env(env, member_values)
        obs, env_state = jax.vmap(env_of_member.reset)(keys_of(envs_key, num_envs))
        replay = new_replay(example_transition(args, env.spec), num_envs, args.capacity)
        run = RunState(
            key=key,
            updates=jnp.int32(0),
            member_values=member_values or {},
            recent=new_recent(),
            gradient_updates=jnp.int32(0),
        )
        actors = Actors(
            env_state=env_state,
            seen=PolicyInput.at_start(obs),
            memory=(),
            tracker=new_tracker(num_envs),
            replay=replay,
            discounted=jnp.zeros(num_envs) if args.normalize_rewards else (),
        )
        learner = algorithm.init(params_key, hparams_of(args, member_values))
        return TrainState(
            learner=learner,
            actors=actors,
            run=run,
        )

    def update(state: TrainState) -> tuple[TrainState, MetricSums, MetricSums]:
        learner = state.learner
        run = state.run
        act_key, learn_key = jax.random.split(jax.random.fold_in(run.key, run.updates))
        actors, out, transition = collect(learner, state.actors, run, act_key)
        # [1, N, ...]
        steps, new = jax.tree.map(lambda x: x[None], (out._replace(state=None), transition))
        tracker, recent, episodes = count_episodes(actors.tracker, run.recent, steps)
        actors = actors.replace(tracker=tracker, replay=actors.replay.add(transition))
        stored = actors.replay.added * args.num_envs
        due = args.updates_due(stored) - args.updates_due(stored - args.num_envs)
        state = TrainState(
            learner=learner,
            actors=actors,
            run=run.replace(recent=recent),
        )
        done = steps.terminated | steps.truncated
        state, tally = learn(state, new, done, learn_key, due)

        # Learning may meet a broken number long after it was stored: these metrics show it at once,
        # before it can be saved
        magnitudes = []
        for name, _, x in leaves(env.observation_space, transition.next_obs):
            if not is_mask(name):
                magnitudes.append(jnp.mean(jnp.abs(jnp.float32(x))))
        metrics = {
            "env/reward": jnp.mean(out.reward),
            "env/obs_magnitude": sum(magnitudes) / len(magnitudes),
        }
        metrics = flat_pmean(metrics) | legal_metrics(transition.obs, env.action_space, AXIS)
        metrics |= range_metrics(
            env.observation_space,
            AXIS,
            transition.obs,
            transition.next_obs,
        )
        return state, tally | MetricSums.of(metrics), episodes

    def collect(
        learner: Any,
        actors: Actors,
        run: RunState,
        key: Array,
    ) -> tuple[Actors, Step, Transition]:
        """Step every environment once: at random until --learning-starts, then with the policy.

        Returns:
            The actors after the step, its outcome [N, ...], and the transitions [N, ...] to store.
        """
        num_envs = actors.tracker.ret.size
        obs = actors.seen.obs
        policy_keys, env_keys = split_keys(keys_of(key, num_envs), 2)
        noise = jax.vmap(partial(action_noise, space=env.action_space))(policy_keys)
        action = algorithm.explore(learner, obs, noise)
        # No update folds in a negative number; each key serves for as long as an action is held
        hold = -1 - run.updates // args.hold_random
        held_keys = keys_of(jax.random.fold_in(run.key, hold), num_envs)
        warming_up = run.updates * args.num_envs < args.learning_starts
        action = jnp.where(warming_up, random_actions(held_keys, obs, env), action)

        env_of_member = member_env(env, run.member_values)
        env_action = to_env(action, env.action_space)
        out = step_envs(env_of_member, env_keys, actors.env_state, env_action)
        transition = Transition(
            obs=obs,
            action=action,
            reward=out.reward,
            terminated=out.terminated,
            next_obs=out.final_obs,
            first=actors.seen.first if args.n_steps > 1 else None,
        )
        seen = actors.seen._replace(obs=out.obs, first=out.terminated | out.truncated)
        return actors.replace(env_state=out.state, seen=seen), out, transition

    def snapshot_metrics(state: TrainState) -> dict[str, Array]:
        replay = state.actors.replay
        run = state.run
        learned_from = run.updates * args.num_envs - args.learning_starts
        return {
            "gradient_updates": run.gradient_updates,
            "replay/fill": jnp.mean(replay.fill),
            "replay/ratio": run.gradient_updates / jnp.maximum(learned_from, 1),
        }

    return Driver(init, update, snapshot_metrics)


def replay_learner(
    algorithm: OffPolicy,
    args: Any,
    keys_of_groups: Callable,
    per_group: int,
) -> Callable:
    """Make the function that learns from the replay buffer, wherever environments step.

    Args:
        algorithm: the algorithm.
        args: flags.
        keys_of_groups: makes a key for each of this device's groups of rings from one key.
        per_group: transitions that each group gives to a batch.

    Returns:
        `learn(state, new, done, key, due, valid)`, which makes the `due` [] gradient updates and
        returns the state and `MetricSums`. `new` are the transitions [T, N, ...] that were just
        stored, `done` [T, N] is True where they end episodes, and `valid` [T, N] where they count
        (None: all).
    """

    def learn(state, new, done, key, due, valid=None) -> tuple[TrainState, MetricSums]:
        run = state.run
        actors = state.actors
        hparams, scheduled = apply_schedules(args, run, state.learner)
        if args.normalize_rewards:
            actors, new = with_returns(hparams.gamma, actors, new, done)

        def gradient_update(index, carry):
            learner, before = carry
            group_keys = keys_of_groups(jax.random.fold_in(key, index))
            sample_keys, *noise_keys = split_keys(group_keys, 3)
            number = same_for_all_seeds(before) + 1
            batch = actors.replay.sample(sample_keys, per_group, args.n_steps, hparams.gamma)
            context = GradientContext(
                hparams=hparams,
                updates=number,
                keys=tuple(noise_keys),
            )
            learner, metrics = algorithm.update(learner, batch, context)
            check_metrics(metrics)
            return (learner, number), MetricSums.of(metrics)

        start = algorithm.observe(state.learner, new, valid), run.gradient_updates
        (learner, number), tally = repeat(gradient_update, start, due)
        tally = tally.replace(value=mean_metrics_over_devices(tally.value))
        run = run.replace(updates=run.updates + 1, gradient_updates=number)
        state = TrainState(
            learner=learner,
            actors=actors,
            run=run,
        )
        return state, tally | MetricSums.of(scheduled)

    return learn


def with_returns(
    gamma: Any,
    actors: Actors,
    new: Transition,
    done: Array,
) -> tuple[Actors, Transition]:
    """Add the discounted returns of episodes so far to new transitions.

    Their standard deviation is the unit of the rewards in learning (Engstrom et al. 2020).

    Args:
        gamma: discount factor.
        actors: has the discounted returns [N] before.
        new: transitions [T, N, ...].
        done: [T, N] bool, True where an episode ends.

    Returns:
        Actors and transitions with the discounted returns.
    """

    def step(before, inputs):
        reward, done = inputs
        total = gamma * before + reward
        return jnp.where(done, 0.0, total), total

    carried, totals = jax.lax.scan(step, actors.discounted, (new.reward, done))
    return actors.replace(discounted=carried), new._replace(discounted=totals)


def random_actions(
    keys: Array,
    obs: Any,
    env: Env | EnvSpec,
) -> Array:
    """Draw uniformly random legal actions [N, ...], as the buffer keeps them, by keys [N]."""
    draw = jax.vmap(partial(uniform_action, space=env.action_space))
    return draw(keys, legal=legal_actions(obs))
