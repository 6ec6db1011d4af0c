"""The driver of algorithms that learn from rollouts of environments on the devices."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from common.device.algorithm import (
    Actors,
    Now,
    OnPolicy,
    Rollout,
    RunState,
    explore_with_memory,
    memory_to_begin_with,
)
from common.device.episodes import EpisodeTotals, count_episodes, new_recent, new_tracker
from common.device.memory import Seen, at_start
from common.device.opponents import draw_other, first_past, own_components, renewed_past, with_opponent
from common.device.reductions import Tally
from common.device.sampling import action_noise, keys_of, minibatch_indices, rollout_keys, split_keys
from common.device.schedules import hp_now, hp_of
from common.device.sharding import AXIS, TrainState
from common.device.stepping import new_starts, reset_envs, step_envs
from common.envs.environment import Env
from common.envs.masks import legal_metrics
from common.envs.varied import for_member


class Driver(NamedTuple):
    """An algorithm's run on the devices, as functions of one agent."""

    init: Any  # seed [], flags of its own {name: []} -> TrainState
    update: Any  # TrainState -> TrainState, Tally, EpisodeTotals
    gauges: Any = lambda state: {}  # TrainState -> metrics of how things stand at the end of an interval


class Outcome(NamedTuple):
    """What episodes are counted by, [T, N]."""

    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    objective: jax.Array | None  # what episodes are judged by, where it is not their return
    info: Any  # what --log-info names, by metric


def on_policy(algorithm: OnPolicy, args: Any, env: Env) -> Driver:
    """Updates that collect a rollout of --num-steps steps with the newest policy, and learn from it."""
    explore = explore_with_memory(algorithm)

    def init(seed: jax.Array, hyper: dict[str, jax.Array] | None = None) -> TrainState:
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = args.num_envs // jax.lax.axis_size(AXIS)
        learner = algorithm.init(params_key, hp_of(args, hyper))
        obs, env_state = reset_envs(for_member(env, hyper), keys_of(envs_key, num_envs), mid_episode=args.decorrelate)
        memory, tracker = memory_to_begin_with(algorithm, num_envs), new_tracker(env, num_envs, args.decorrelate)
        run = RunState(key, jnp.int32(0), hyper or {}, new_recent(env), first_past(args, learner))
        return TrainState(learner, Actors(env_state, at_start(obs), memory, tracker), run)

    def update(state: TrainState) -> tuple[TrainState, Tally, EpisodeTotals]:
        learner, actors = state.learner, state.actors
        run = state.run.replace(past=renewed_past(args, state.run, learner))
        rollout_key, key = jax.random.split(jax.random.fold_in(run.key, run.updates))
        actors, rollout, outcome = collect(learner, actors, run, rollout_key)
        tracker, recent, episodes = count_episodes(actors.tracker, run.recent, outcome)
        hp, scheduled = hp_now(args, run, learner)
        minibatches = partial(minibatch_indices, key, args.samples_per_env, tracker.ret.size)
        learner, metrics = algorithm.update(learner, rollout, Now(hp, run.updates, key, minibatches))
        metrics |= scheduled | legal_metrics(rollout.obs, env.action_space, AXIS)
        metrics |= {"params/norm": optax.global_norm(learner.params)}
        run = run.replace(recent=recent, updates=run.updates + 1)
        return TrainState(learner, actors.replace(tracker=tracker), run), Tally.of(metrics), episodes

    def collect(learner: Any, actors: Actors, run: RunState, key: jax.Array) -> tuple[Actors, Rollout, Outcome]:
        """Step all environments `num_steps` times with the current policy."""
        num_envs = actors.tracker.ret.size
        noise_keys, env_keys = split_keys(rollout_keys(key, args.num_steps, num_envs), 2)  # [T, N]
        noise = jax.vmap(jax.vmap(partial(action_noise, space=env.action_space)))(noise_keys)  # all steps in one pass
        starts_key, other_key, deal_key = (jax.random.fold_in(key, args.num_steps + more) for more in range(3))
        other = draw_other(args, run, learner, other_key)
        game = with_opponent(for_member(env, run.hyper), other, algorithm.act)
        own = own_components(args, env, deal_key, num_envs)
        starts = new_starts(game, starts_key, args.reset_pool)

        def step(carry, inputs):
            env_state, seen, memory = carry
            noise, keys = inputs
            action, extras, memory = explore(learner, seen, memory, noise)
            if own is not None:
                action = jnp.where(own, action, explore(other, seen, memory, noise)[0])
            out = step_envs(game, keys, env_state, action, starts)
            seen_next = Seen(out.obs, out.terminated | out.truncated, out.reward)
            outcome = Outcome(out.reward, out.terminated, out.truncated, out.objective, out.info)
            return (out.state, seen_next, memory), (seen, action, extras, outcome, out.final_obs, own)

        start = actors.env_state, actors.seen, actors.memory
        (env_state, last, memory), steps = jax.lax.scan(step, start, (noise, env_keys))
        seen, action, extras, outcome, final_obs, own = steps
        rollout = Rollout(seen, action, extras, *outcome[:3], final_obs, last, actors.memory, own)
        return actors.replace(env_state=env_state, seen=last, memory=memory), rollout, outcome

    return Driver(init, update)
