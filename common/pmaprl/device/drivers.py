"""The drivers of algorithms whose environments step on the devices: rollouts, replay, and what an
update is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pmaprl.device.agents import PolicyInput, at_start, with_memory
from pmaprl.device.interface import (
    Actors,
    OffPolicy,
    OnPolicy,
    Rollout,
    RunState,
    Transition,
    UpdateContext,
)
from pmaprl.device.loops import Packed, repeat
from pmaprl.device.opponents import draw_own_components, init_pool, sample_opponent, update_pool
from pmaprl.device.optim import apply_schedules, global_norm, hparams_of
from pmaprl.device.replay import example_transition, new_replay
from pmaprl.device.rollout import (
    OTHER_STREAM,
    action_noise,
    keys_of,
    keys_of_steps,
    minibatch_indices,
    new_starts,
    reset_mid_episode,
    resets_of_steps,
    rollout_keys,
    split_keys,
    step_envs,
)
from pmaprl.device.sharding import AXIS, TrainState, flat_pmean, same_for_all_seeds
from pmaprl.device.statistics import (
    MetricSums,
    count_episodes,
    mean_metrics_over_devices,
    new_recent,
    new_tracker,
)
from pmaprl.envs.environment import Env, Step
from pmaprl.envs.masks import is_mask, legal_actions, legal_metrics, to_env, uniform_action
from pmaprl.envs.ranges import range_metrics
from pmaprl.envs.spaces import EnvSpec, leaves
from pmaprl.envs.variation import member_env

# Numbers of an environment, up to which an array of a step is kept beside others in one vector
SMALL = 64


class Driver(NamedTuple):
    """An algorithm's run on the devices, as functions of one agent."""

    init: Callable  # seed [], flags of its own {name: []} -> TrainState
    update: Callable  # TrainState -> TrainState, Tally, Tally of episodes
    # TrainState -> metrics of how things stand at the end of an interval
    snapshot_metrics: Callable = lambda state: {}


def on_policy(algorithm: OnPolicy, args: Any, env: Env) -> Driver:
    """Updates that collect a rollout of --num-steps steps with the newest policy, and learn from
    it.
    """
    recurrent = with_memory(algorithm)
    explore = recurrent.explore
    new_memory = recurrent.training_memory or recurrent.initial_memory

    def init(seed: jax.Array, member_values: dict[str, jax.Array] | None = None) -> TrainState:
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = args.num_envs // jax.lax.axis_size(AXIS)
        learner = algorithm.init(params_key, hparams_of(args, member_values))
        keys = keys_of(envs_key, num_envs)
        begun = member_env(env, member_values)
        obs, env_state = (
            reset_mid_episode(begun, keys) if args.decorrelate else jax.vmap(begun.reset)(keys)
        )
        actors = Actors(
            env_state, at_start(obs), new_memory(num_envs), new_tracker(num_envs, args.decorrelate)
        )
        run = RunState(
            key=key,
            updates=jnp.int32(0),
            member_values=member_values or {},
            recent=new_recent(),
            opponent_pool=init_pool(args, learner),
        )
        return TrainState(learner, actors, run)

    def update(state: TrainState) -> tuple[TrainState, MetricSums, MetricSums]:
        learner = state.learner
        run = state.run
        run = run.replace(opponent_pool=update_pool(args, run, learner))
        rollout_key, key = jax.random.split(jax.random.fold_in(run.key, run.updates))
        actors, rollout, steps = collect(learner, state.actors, run, rollout_key)
        tracker, recent, episodes = count_episodes(actors.tracker, run.recent, steps)
        hparams, scheduled = apply_schedules(args, run, learner)
        minibatches = partial(minibatch_indices, key, args.samples_per_env, tracker.ret.size)
        context = UpdateContext(
            hparams=hparams,
            updates=run.updates,
            key=jax.random.fold_in(key, OTHER_STREAM),
            minibatches=minibatches,
        )
        learner, metrics = algorithm.update(learner, rollout, context)
        metrics = (
            mean_metrics_over_devices(metrics)
            | scheduled
            | legal_metrics(rollout.obs, env.action_space, AXIS)
        )
        metrics |= range_metrics(env.observation_space, AXIS, rollout.obs, rollout.next_obs)
        metrics |= {"params/norm": global_norm(learner.params)}
        run = run.replace(recent=recent, updates=run.updates + 1)
        return (
            TrainState(learner, actors.replace(tracker=tracker), run),
            MetricSums.of(metrics),
            episodes,
        )

    def collect(
        learner: Any, actors: Actors, run: RunState, key: jax.Array
    ) -> tuple[Actors, Rollout, Step]:
        """Step all environments `num_steps` times with the current policy; also what episodes are
        counted by.
        """
        num_envs = actors.tracker.ret.size
        noise_keys, env_keys = split_keys(rollout_keys(key, args.num_steps, num_envs), 2)  # [T, N]
        # All steps in one pass
        noise = jax.vmap(jax.vmap(partial(action_noise, space=env.action_space)))(noise_keys)
        starts_key, other_key, deal_key = (
            jax.random.fold_in(key, args.num_steps + more) for more in range(3)
        )
        game = member_env(env, run.member_values)
        own = None
        other = sample_opponent(args, run, learner, other_key)
        if other is not None and env.is_game:  # it plays everybody else
            game = game.against(
                lambda key, obs: algorithm.act(other, jax.tree.map(lambda x: x[None], obs), key)[0]
            )
        elif other is not None:  # it plays the others of a team
            own = draw_own_components(keys_of(deal_key, num_envs), env.agents)
        starts = new_starts(game, starts_key, args.reset_pool)

        def step(carry, inputs):
            env_state, seen, memory = carry
            noise, keys, resets = inputs
            action, extras, memory = explore(learner, seen, memory, noise)
            if own is not None:
                action = jnp.where(own, action, explore(other, seen, memory, noise)[0])
            out = step_envs(game, keys, env_state, action, starts, resets)._replace(
                final_state=None
            )
            # Else what is kept of a step computes it once more
            out = jax.lax.optimization_barrier(out)
            seen_next = PolicyInput(out.obs, out.terminated | out.truncated, out.reward)
            kept = seen.obs, action, extras, out._replace(obs=None, state=None)
            return (out.state, seen_next, memory), Packed.of(kept, largest=SMALL * num_envs)

        start = actors.env_state, actors.seen, actors.memory
        resets = None if starts else resets_of_steps(game, env_keys)
        inputs = noise, keys_of_steps(game, env_keys, starts, resets), resets
        (env_state, after, memory), kept = jax.lax.scan(step, start, inputs)
        obs, action, extras, steps = kept.tree
        # Taken from the steps: then XLA carries through the loop only what the policy reads
        first = jnp.concatenate([actors.seen.first[None], steps.terminated | steps.truncated])
        reward = jnp.concatenate([actors.seen.reward[None], steps.reward])
        seen = PolicyInput(obs, first[:-1], reward[:-1])
        last = PolicyInput(after.obs, first[-1], reward[-1])
        own = None if own is None else jnp.broadcast_to(own, (args.num_steps, *own.shape))
        outcome = steps.reward, steps.terminated, steps.truncated, steps.final_obs
        rollout = Rollout(seen, action, extras, *outcome, last, actors.memory, own)
        return actors.replace(env_state=env_state, seen=last, memory=memory), rollout, steps

    return Driver(init, update)


def off_policy(algorithm: OffPolicy, args: Any, env: Env) -> Driver:
    """Updates that step every environment once, store that, and make the gradient updates that are
    due after it.
    """
    groups = args.num_envs // args.block

    def keys_of_groups(key: jax.Array) -> jax.Array:
        return keys_of(key, groups // jax.lax.axis_size(AXIS))

    learn = replay_learner(algorithm, args, keys_of_groups, args.batch_size // groups)

    def init(seed: jax.Array, member_values: dict[str, jax.Array] | None = None) -> TrainState:
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = args.num_envs // jax.lax.axis_size(AXIS)
        obs, env_state = jax.vmap(member_env(env, member_values).reset)(keys_of(envs_key, num_envs))
        replay = new_replay(example_transition(args, env.spec), num_envs, args.capacity)
        run = RunState(
            key=key,
            updates=jnp.int32(0),
            member_values=member_values or {},
            recent=new_recent(),
            gradient_updates=jnp.int32(0),
        )
        discounted = jnp.zeros(num_envs) if args.normalize_rewards else ()
        actors = Actors(env_state, at_start(obs), (), new_tracker(num_envs), replay, discounted)
        return TrainState(algorithm.init(params_key, hparams_of(args, member_values)), actors, run)

    def update(state: TrainState) -> tuple[TrainState, MetricSums, MetricSums]:
        act_key, learn_key = jax.random.split(jax.random.fold_in(state.run.key, state.run.updates))
        actors, out, transition = collect(state.learner, state.actors, state.run, act_key)
        # [1, N, ...]
        steps, new = jax.tree.map(lambda x: x[None], (out._replace(state=None), transition))
        tracker, recent, episodes = count_episodes(actors.tracker, state.run.recent, steps)
        actors = actors.replace(tracker=tracker, replay=actors.replay.add(transition))
        stored = actors.replay.added * args.num_envs
        due = args.updates_due(stored) - args.updates_due(stored - args.num_envs)
        state = TrainState(state.learner, actors, state.run.replace(recent=recent))
        state, tally = learn(state, new, steps.terminated | steps.truncated, learn_key, due)
        # Learning may meet a broken number long after it was stored: these show it at once, before
        # it can be saved.
        seen = leaves(env.observation_space, transition.next_obs)
        magnitudes = [jnp.mean(jnp.abs(jnp.float32(x))) for name, _, x in seen if not is_mask(name)]
        found = {
            "env/reward": jnp.mean(out.reward),
            "env/obs_magnitude": sum(magnitudes) / len(magnitudes),
        }
        found = flat_pmean(found) | legal_metrics(transition.obs, env.action_space, AXIS)
        tally |= MetricSums.of(
            found | range_metrics(env.observation_space, AXIS, transition.obs, transition.next_obs)
        )
        return state, tally, episodes

    def collect(
        learner: Any, actors: Actors, run: RunState, key: jax.Array
    ) -> tuple[Actors, Step, Transition]:
        """Step every environment once: at random until --learning-starts, then with the current
        policy.
        """
        num_envs = actors.tracker.ret.size
        obs = actors.seen.obs
        policy_keys, env_keys = split_keys(keys_of(key, num_envs), 2)
        noise = jax.vmap(partial(action_noise, space=env.action_space))(policy_keys)
        action = algorithm.explore(learner, obs, noise)
        # Below zero are keys that no update has; each serves for as long as an action is held.
        held = keys_of(jax.random.fold_in(run.key, -1 - run.updates // args.hold_random), num_envs)
        warming_up = run.updates * args.num_envs < args.learning_starts
        action = jnp.where(warming_up, random_actions(held, obs, env), action)

        out = step_envs(
            member_env(env, run.member_values),
            env_keys,
            actors.env_state,
            to_env(action, env.action_space),
        )
        first = actors.seen.first if args.n_steps > 1 else None
        transition = Transition(
            obs=obs,
            action=action,
            reward=out.reward,
            terminated=out.terminated,
            next_obs=out.final_obs,
            first=first,
        )
        seen = actors.seen._replace(obs=out.obs, first=out.terminated | out.truncated)
        return actors.replace(env_state=out.state, seen=seen), out, transition

    def snapshot_metrics(state: TrainState) -> dict[str, jax.Array]:
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
    algorithm: OffPolicy, args: Any, keys_of_groups: Callable, per_group: int
) -> Callable:
    """What an update learns, wherever environments step: `learn(state, new, done, key, due, valid)`
    -> state, Tally.

    `new` are the transitions [T, N, ...] that were just stored, `done` [T, N] where they end
    episodes, `valid` [T, N] which of them count, None for all. As many gradient updates as are
    `due` [] each take `per_group` transitions of every group; `keys_of_groups` makes a key for each
    of this device's groups from one key.
    """

    def learn(state, new, done, key, due, valid=None) -> tuple[TrainState, MetricSums]:
        run = state.run
        actors = state.actors
        hparams, scheduled = apply_schedules(args, run, state.learner)
        if args.normalize_rewards:
            actors, new = with_returns(hparams.gamma, actors, new, done)

        def gradient_update(index, carry):
            learner, before = carry
            sample_keys, *keys = split_keys(keys_of_groups(jax.random.fold_in(key, index)), 3)
            number = same_for_all_seeds(before) + 1
            batch = actors.replay.sample(sample_keys, per_group, args.n_steps, hparams.gamma)
            learner, metrics = algorithm.update(
                learner, batch, UpdateContext(hparams, number, keys=tuple(keys))
            )
            return (learner, number), MetricSums.of(metrics)

        start = algorithm.observe(state.learner, new, valid), run.gradient_updates
        (learner, number), tally = repeat(gradient_update, start, due)
        tally = tally.replace(value=mean_metrics_over_devices(tally.value)) | MetricSums.of(
            scheduled
        )
        return TrainState(
            learner, actors, run.replace(updates=run.updates + 1, gradient_updates=number)
        ), tally

    return learn


def with_returns(
    gamma: Any, actors: Actors, new: Transition, done: jax.Array
) -> tuple[Actors, Transition]:
    """`new` [T, N, ...] with the discounted returns of episodes so far, which go on where they are
    not `done` [T, N].

    The standard deviation of those is the unit in which rewards are learned from (Engstrom et al.
    2020).
    """

    def step(before, inputs):
        reward, done = inputs
        total = gamma * before + reward
        return jnp.where(done, 0.0, total), total

    carried, totals = jax.lax.scan(step, actors.discounted, (new.reward, done))
    return actors.replace(discounted=carried), new._replace(discounted=totals)


def random_actions(keys: jax.Array, obs: Any, env: Env | EnvSpec) -> jax.Array:
    """Uniformly random actions [N, ...] as the buffer keeps them, each by its own of `keys` [N];
    legal ones.
    """
    return jax.vmap(partial(uniform_action, space=env.action_space))(keys, legal=legal_actions(obs))
