"""The driver of algorithms that learn from a replay buffer, of environments on the devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from common.device.algorithm import Actors, Now, OffPolicy, RunState, Transition
from common.device.episodes import EpisodeTotals, count_episodes, new_recent, new_tracker
from common.device.memory import at_start
from common.device.on_policy import Driver
from common.device.reductions import Tally
from common.device.replay import Replay, example_transition, new_replay, num_groups
from common.device.sampling import action_noise, keys_of, split_keys
from common.device.schedules import hp_of
from common.device.seeds import same_for_all_seeds
from common.device.sharding import AXIS, TrainState, flat_pmean
from common.device.stepping import reset_envs, step_envs
from common.device.update_loop import repeat_and_add
from common.envs.environment import Env, Step
from common.envs.masks import legal_actions, legal_metrics
from common.envs.spec import EnvSpec
from common.envs.unit_actions import to_env, uniform_action
from common.envs.varied import for_member


def off_policy(algorithm: OffPolicy, args: Any, env: Env) -> Driver:
    """Updates that step every environment once, store that, and make the gradient updates that are due after it."""
    groups = num_groups(args.num_envs, args.batch_size)

    def init(seed: jax.Array, hyper: dict[str, jax.Array] | None = None) -> TrainState:
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = args.num_envs // jax.lax.axis_size(AXIS)
        obs, env_state = reset_envs(for_member(env, hyper), keys_of(envs_key, num_envs))
        replay = new_replay(example_transition(env), num_envs, args.capacity)
        run = RunState(key, jnp.int32(0), hyper or {}, new_recent(env), gradient_updates=jnp.int32(0))
        actors = Actors(env_state, at_start(obs), (), new_tracker(env, num_envs), replay)
        return TrainState(algorithm.init(params_key, hp_of(args, hyper)), actors, run)

    def update(state: TrainState) -> tuple[TrainState, Tally, EpisodeTotals]:
        learner, run = state.learner, state.run
        act_key, learn_key = jax.random.split(jax.random.fold_in(run.key, run.updates))
        actors, out, transition = collect(learner, state.actors, run, act_key)
        one_step = jax.tree.map(lambda x: x[None], out._replace(state=()))  # [1, N, ...]
        tracker, recent, episodes = count_episodes(actors.tracker, run.recent, one_step)
        actors = actors.replace(tracker=tracker, replay=actors.replay.add(transition))
        learner = algorithm.observe(learner, jax.tree.map(lambda x: x[None], transition), None)
        run = run.replace(recent=recent, updates=run.updates + 1)
        learner, run, tally = learn(learner, run, actors.replay, learn_key)
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

        out = step_envs(for_member(env, run.hyper), env_keys, actors.env_state, to_env(action, env.action_space))
        transition = Transition(obs, action, out.reward, out.terminated, out.final_obs)
        return actors.replace(env_state=out.state, seen=actors.seen._replace(obs=out.obs)), out, transition

    def learn(learner: Any, run: RunState, replay: Replay, key: jax.Array) -> tuple[Any, RunState, Tally]:
        stored = replay.added * args.num_envs
        due = args.ratio.due(stored) - args.ratio.due(stored - args.num_envs)
        keys = partial(keys_of, local=groups // jax.lax.axis_size(AXIS))
        return gradient_updates(algorithm, args, learner, run, replay, key, due, keys, args.batch_size // groups)

    def gauges(state: TrainState) -> dict[str, jax.Array]:
        replay, run = state.actors.replay, state.run
        learned_from = run.updates * args.num_envs - args.learning_starts
        return {
            "gradient_updates": run.gradient_updates,
            "replay/fill": jnp.mean(jnp.where(replay.filled == replay.capacity, 1.0, replay.filled / replay.capacity)),
            "replay/ratio": run.gradient_updates / jnp.maximum(learned_from, 1),
        }

    return Driver(init, update, gauges)


def gradient_updates(
    algorithm: OffPolicy,
    args: Any,
    learner: Any,
    run: RunState,
    replay: Replay,
    key: jax.Array,
    due: jax.Array,
    keys_of_groups: Callable,
    per_group: int,
) -> tuple[Any, RunState, Tally]:
    """So many gradient updates as are `due` [], each from a batch of `per_group` transitions of every group."""
    hp = hp_of(args, run.hyper)

    def one(index, carry):
        learner, done = carry
        sample_keys, *keys = split_keys(keys_of_groups(jax.random.fold_in(key, index)), 3)
        done = same_for_all_seeds(done) + 1
        batch = replay.sample(sample_keys, per_group)
        learner, metrics = algorithm.update(learner, batch, Now(hp, done, keys=tuple(keys)))
        return (learner, done), Tally.of(metrics)

    (learner, done), tally = repeat_and_add(one, (learner, run.gradient_updates), due)
    return learner, run.replace(gradient_updates=done), tally


def random_actions(keys: jax.Array, obs: Any, env: Env | EnvSpec) -> jax.Array:
    """Uniformly random actions [N, ...] as the buffer keeps them, each by its own of `keys` [N]; legal ones."""
    return jax.vmap(partial(uniform_action, space=env.action_space))(keys, legal=legal_actions(obs))
