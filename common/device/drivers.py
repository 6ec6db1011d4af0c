"""The drivers of algorithms whose environments step on the devices: rollouts, replay, and the loop of updates."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from common.device.agents import Seen, at_start
from common.device.interface import Actors, Now, OffPolicy, OnPolicy, Rollout, RunState, Transition, with_memory
from common.device.loops import Packed
from common.device.opponents import draw_other, first_past, own_components, renewed_past, with_opponent
from common.device.optim import global_norm, hp_now, hp_of, zeros_of
from common.device.replay import Replay, example_transition, n_steps, new_replay, num_groups
from common.device.rollout import (
    OTHER_STREAM,
    action_noise,
    keys_of,
    minibatch_indices,
    new_starts,
    reset_envs,
    resets_of_steps,
    rollout_keys,
    split_keys,
    step_envs,
)
from common.device.sharding import AXIS, TrainState, flat_pmean, same_for_all_seeds
from common.device.statistics import Tally, count_episodes, episode_metrics, new_recent, new_tracker, same_everywhere
from common.envs.environment import Env, Step
from common.envs.masks import legal_actions, legal_metrics, to_env, uniform_action
from common.envs.spaces import EnvSpec
from common.envs.variation import member_env

SMALL = 64  # numbers of an environment, up to which an array of a step is kept beside others in one vector


class Driver(NamedTuple):
    """An algorithm's run on the devices, as functions of one agent."""

    init: Any  # seed [], flags of its own {name: []} -> TrainState
    update: Any  # TrainState -> TrainState, Tally, Tally of episodes
    gauges: Any = lambda state: {}  # TrainState -> metrics of how things stand at the end of an interval


class Outcome(NamedTuple):
    """What episodes are counted by, [T, N]."""

    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    info: Any  # what --log-info names, by metric


def on_policy(algorithm: OnPolicy, args: Any, env: Env) -> Driver:
    """Updates that collect a rollout of --num-steps steps with the newest policy, and learn from it."""
    explore, new_memory = with_memory(algorithm)

    def init(seed: jax.Array, hyper: dict[str, jax.Array] | None = None) -> TrainState:
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = args.num_envs // jax.lax.axis_size(AXIS)
        learner = algorithm.init(params_key, hp_of(args, hyper))
        obs, env_state = reset_envs(member_env(env, hyper), keys_of(envs_key, num_envs), mid_episode=args.decorrelate)
        memory, tracker = new_memory(num_envs), new_tracker(num_envs, args.decorrelate)
        run = RunState(key, jnp.int32(0), hyper or {}, new_recent(), first_past(args, learner))
        return TrainState(learner, Actors(env_state, at_start(obs), memory, tracker), run)

    def update(state: TrainState) -> tuple[TrainState, Tally, Tally]:
        learner, actors = state.learner, state.actors
        run = state.run.replace(past=renewed_past(args, state.run, learner))
        rollout_key, key = jax.random.split(jax.random.fold_in(run.key, run.updates))
        actors, rollout, outcome = collect(learner, actors, run, rollout_key)
        tracker, recent, episodes = count_episodes(actors.tracker, run.recent, outcome)
        hp, scheduled = hp_now(args, run, learner)
        minibatches = partial(minibatch_indices, key, args.samples_per_env, tracker.ret.size)
        now = Now(hp, run.updates, jax.random.fold_in(key, OTHER_STREAM), minibatches)
        learner, metrics = algorithm.update(learner, rollout, now)
        metrics = same_everywhere(metrics)
        metrics |= scheduled | legal_metrics(rollout.obs, env.action_space, AXIS)
        metrics |= {"params/norm": global_norm(learner.params)}
        run = run.replace(recent=recent, updates=run.updates + 1)
        return TrainState(learner, actors.replace(tracker=tracker), run), Tally.of(metrics), episodes

    def collect(learner: Any, actors: Actors, run: RunState, key: jax.Array) -> tuple[Actors, Rollout, Outcome]:
        """Step all environments `num_steps` times with the current policy."""
        num_envs = actors.tracker.ret.size
        noise_keys, env_keys = split_keys(rollout_keys(key, args.num_steps, num_envs), 2)  # [T, N]
        noise = jax.vmap(jax.vmap(partial(action_noise, space=env.action_space)))(noise_keys)  # all steps in one pass
        starts_key, other_key, deal_key = (jax.random.fold_in(key, args.num_steps + more) for more in range(3))
        other = draw_other(args, run, learner, other_key)
        game = with_opponent(member_env(env, run.hyper), other, algorithm.act)
        own = own_components(args, env, deal_key, num_envs)
        starts = new_starts(game, starts_key, args.reset_pool)

        def step(carry, inputs):
            env_state, seen, memory = carry
            noise, keys, resets = inputs
            action, extras, memory = explore(learner, seen, memory, noise)
            if own is not None:
                action = jnp.where(own, action, explore(other, seen, memory, noise)[0])
            out = step_envs(game, keys, env_state, action, starts, resets)._replace(final_state=None)
            out = jax.lax.optimization_barrier(out)  # else what is kept of a step computes it once more
            seen_next = Seen(out.obs, out.terminated | out.truncated, out.reward)
            outcome = Outcome(out.reward, out.terminated, out.truncated, out.info)
            kept = Packed.of((seen.obs, action, extras, outcome, out.final_obs), largest=SMALL * num_envs)
            return (out.state, seen_next, memory), kept

        start = actors.env_state, actors.seen, actors.memory
        inputs = noise, env_keys, None if starts else resets_of_steps(game, env_keys)
        (env_state, after, memory), steps = jax.lax.scan(step, start, inputs)
        obs, action, extras, outcome, final_obs = steps.tree
        # Taken from the outcome: then XLA carries through the loop only what the policy reads
        first = jnp.concatenate([actors.seen.first[None], outcome.terminated | outcome.truncated])
        reward = jnp.concatenate([actors.seen.reward[None], outcome.reward])
        seen, last = Seen(obs, first[:-1], reward[:-1]), Seen(after.obs, first[-1], reward[-1])
        own = None if own is None else jnp.broadcast_to(own, (args.num_steps, *own.shape))
        rollout = Rollout(seen, action, extras, *outcome[:3], final_obs, last, actors.memory, own)
        return actors.replace(env_state=env_state, seen=last, memory=memory), rollout, outcome

    return Driver(init, update)


def off_policy(algorithm: OffPolicy, args: Any, env: Env) -> Driver:
    """Updates that step every environment once, store that, and make the gradient updates that are due after it."""
    groups = num_groups(args.num_envs, args.batch_size)

    def init(seed: jax.Array, hyper: dict[str, jax.Array] | None = None) -> TrainState:
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = args.num_envs // jax.lax.axis_size(AXIS)
        obs, env_state = reset_envs(member_env(env, hyper), keys_of(envs_key, num_envs))
        replay = new_replay(example_transition(args, env.spec), num_envs, args.capacity)
        run = RunState(key, jnp.int32(0), hyper or {}, new_recent(), gradient_updates=jnp.int32(0))
        discounted = jnp.zeros(num_envs) if args.normalize_rewards else ()
        actors = Actors(env_state, at_start(obs), (), new_tracker(num_envs), replay, discounted)
        return TrainState(algorithm.init(params_key, hp_of(args, hyper)), actors, run)

    def update(state: TrainState) -> tuple[TrainState, Tally, Tally]:
        learner, run = state.learner, state.run
        act_key, learn_key = jax.random.split(jax.random.fold_in(run.key, run.updates))
        actors, out, transition = collect(learner, state.actors, run, act_key)
        one_step = jax.tree.map(lambda x: x[None], out._replace(state=()))  # [1, N, ...]
        tracker, recent, episodes = count_episodes(actors.tracker, run.recent, one_step)
        actors = actors.replace(tracker=tracker, replay=actors.replay.add(transition))
        new = jax.tree.map(lambda x: x[None], transition)
        actors, new = with_returns(args, run, actors, new, one_step.terminated | one_step.truncated)
        learner, flags = algorithm.observe(learner, new, None), hp_now(args, run, learner)
        run = run.replace(recent=recent, updates=run.updates + 1)
        learner, run, tally = learn(learner, run, flags, actors.replay, learn_key)
        # Learning may meet a broken number long after it was stored: these show it at once, before it can be saved.
        magnitudes = [jnp.mean(jnp.abs(x * 1.0)) for x in jax.tree.leaves(transition.next_obs)]
        found = {"env/reward": jnp.mean(out.reward), "env/obs_magnitude": sum(magnitudes) / len(magnitudes)}
        tally |= Tally.of(flat_pmean(found) | legal_metrics(transition.obs, env.action_space, AXIS))
        return TrainState(learner, actors, run), tally, episodes

    def collect(learner: Any, actors: Actors, run: RunState, key: jax.Array) -> tuple[Actors, Step, Transition]:
        """Step every environment once: at random until --learning-starts, then with the current policy."""
        num_envs, obs = actors.tracker.ret.size, actors.seen.obs
        policy_keys, env_keys = split_keys(keys_of(key, num_envs), 2)
        noise = jax.vmap(partial(action_noise, space=env.action_space))(policy_keys)
        action = algorithm.explore(learner, obs, noise)
        # Below zero are keys that no update has; each serves for as long as an action is held.
        held = keys_of(jax.random.fold_in(run.key, -1 - run.updates // args.hold_random), num_envs)
        warming_up = run.updates * args.num_envs < args.learning_starts
        action = jnp.where(warming_up, random_actions(held, obs, env), action)

        out = step_envs(member_env(env, run.hyper), env_keys, actors.env_state, to_env(action, env.action_space))
        first = actors.seen.first if n_steps(args) > 1 else None
        transition = Transition(obs, action, out.reward, out.terminated, out.final_obs, first=first)
        seen = actors.seen._replace(obs=out.obs, first=out.terminated | out.truncated)
        return actors.replace(env_state=out.state, seen=seen), out, transition

    def learn(learner: Any, run: RunState, flags: Any, replay: Replay, key: jax.Array) -> tuple[Any, RunState, Tally]:
        stored = replay.added * args.num_envs
        due = args.updates_due(stored) - args.updates_due(stored - args.num_envs)
        keys = partial(keys_of, local=groups // jax.lax.axis_size(AXIS))
        sizes = keys, args.batch_size // groups
        return learn_from_replay(algorithm, args, learner, run, flags, replay, key, due, *sizes)

    def gauges(state: TrainState) -> dict[str, jax.Array]:
        replay, run = state.actors.replay, state.run
        learned_from = run.updates * args.num_envs - args.learning_starts
        return {
            "gradient_updates": run.gradient_updates,
            "replay/fill": jnp.mean(jnp.where(replay.filled == replay.capacity, 1.0, replay.filled / replay.capacity)),
            "replay/ratio": run.gradient_updates / jnp.maximum(learned_from, 1),
        }

    return Driver(init, update, gauges)


def with_returns(
    args: Any, run: RunState, actors: Actors, new: Transition, done: jax.Array
) -> tuple[Actors, Transition]:
    """Where --normalize-rewards asks for it, `new` [T, N, ...] with the discounted returns of episodes, `done` or not.

    The standard deviation of those is the unit in which rewards are learned from (Engstrom et al. 2020).
    """
    if not args.normalize_rewards:
        return actors, new
    gamma = hp_of(args, run.hyper).gamma

    def step(before, inputs):
        reward, done = inputs
        total = gamma * before + reward
        return jnp.where(done, 0.0, total), total

    carried, totals = jax.lax.scan(step, actors.discounted, (new.reward, done))
    return actors.replace(discounted=carried), new._replace(discounted=totals)


def learn_from_replay(
    algorithm: OffPolicy,
    args: Any,
    learner: Any,
    run: RunState,
    flags: tuple[Any, dict[str, jax.Array]],
    replay: Replay,
    key: jax.Array,
    due: jax.Array,
    keys_of_groups: Callable,
    per_group: int,
) -> tuple[Any, RunState, Tally]:
    """So many gradient updates as are `due` [], each from a batch of `per_group` transitions of every group.

    `flags` are those of `hp_now`.
    """
    hp, scheduled = flags

    def one(index, carry):
        learner, done = carry
        sample_keys, *keys = split_keys(keys_of_groups(jax.random.fold_in(key, index)), 3)
        done = same_for_all_seeds(done) + 1
        if n_steps(args) > 1:
            batch = replay.sample_n_step(sample_keys, per_group, args.n_steps, hp.gamma)
        else:
            batch = replay.sample(sample_keys, per_group)
        learner, metrics = algorithm.update(learner, batch, Now(hp, done, keys=tuple(keys)))
        return (learner, done), Tally.of(metrics)

    (learner, done), tally = repeat_and_add(one, (learner, run.gradient_updates), due)
    tally = tally.replace(value=same_everywhere(tally.value)) | Tally.of(scheduled)
    return learner, run.replace(gradient_updates=done), tally


def random_actions(keys: jax.Array, obs: Any, env: Env | EnvSpec) -> jax.Array:
    """Uniformly random actions [N, ...] as the buffer keeps them, each by its own of `keys` [N]; legal ones."""
    return jax.vmap(partial(uniform_action, space=env.action_space))(keys, legal=legal_actions(obs))


def repeat(
    update: Callable[[Any], tuple[Any, Tally, Tally]], state: Any, num_updates: jax.Array
) -> tuple[Any, dict[str, jax.Array], dict[str, jax.Array]]:
    """Run `update` `num_updates` times; metrics are put together.

    `num_updates` is traced: one executable serves every length, and a resumed run executes the very same code. Returns
    the state, the metrics, and for each of `update`'s metrics the index of the first update in which it was not finite
    (or -1).
    """
    update = jax.jit(update)  # traced once, although its shapes are asked for too
    _, zeros, no_episodes = zeros_of(update, state)
    never = {name: jnp.int32(-1) for name in zeros.value}

    def body(index, carry):
        state, packed = carry
        tally, broken, episodes = packed.tree
        state, new, finished = update(state)
        broken = {
            name: jnp.where((first < 0) & ~jnp.isfinite(new.value[name]), index, first)
            for name, first in broken.items()
        }
        return state, Packed.of((tally + new, broken, episodes + finished))

    start = state, Packed.of((zeros, never, no_episodes))
    state, packed = jax.lax.fori_loop(0, num_updates, body, start)
    tally, broken, episodes = packed.tree
    return state, tally.metrics() | episode_metrics(episodes), broken


def repeat_and_add(step: Callable[[jax.Array, Any], tuple[Any, Tally]], state: Any, count: jax.Array):
    """Run `step` of 0 .. `count` - 1 and the state, `count` times; the state and the sum of the tallies."""
    step = jax.jit(step)  # traced once, although its shapes are asked for too
    _, zeros = zeros_of(step, jnp.int32(0), state)

    def body(index, carry):
        state, tally = carry
        state, new = step(index, state)
        return state, Packed.of(tally.tree + new)

    state, tally = jax.lax.fori_loop(0, count, body, (state, Packed.of(zeros)))
    return state, tally.tree
