"""Drivers of algorithms on the devices: rollouts, updates, and learning from a replay buffer,
wherever environments step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from pmaprl.device.contract import (
    AnyAlgorithm,
    Metrics,
    OffPolicy,
    OnPolicy,
    RecurrentOnPolicy,
    as_recurrent,
)
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
from pmaprl.device.statistics import MetricSums, check_metrics, reduce_over_devices
from pmaprl.envs.environment import Env, Step
from pmaprl.envs.masks import is_mask, legal_actions, legal_metrics, to_env, uniform_action
from pmaprl.envs.ranges import range_metrics
from pmaprl.envs.spaces import EnvSpec, leaves
from pmaprl.envs.variation import member_env

# Arrays with up to this many numbers of an environment are packed into one vector of a step
MOST_PACKED_NUMBERS = 64


class Driver(Protocol):
    """A run of an algorithm on the devices, as functions of one agent."""

    def init(self, seed: Array, member_values: dict[str, Array] | None = None) -> TrainState:
        """Begin a run.

        Args:
            seed: [] the agent's seed.
            member_values: [] values of the flags that differ between members, by name.
        """
        ...

    def update(self, state: TrainState) -> tuple[TrainState, MetricSums, MetricSums]:
        """Make an update.

        Returns:
            The state, the sums of its metrics, and those of its episodes.
        """
        ...

    def snapshot_metrics(self, state: TrainState) -> Metrics:
        """Metrics [] of the state at the end of an interval."""
        ...


def driver_of(algorithm: AnyAlgorithm, args: Any, env: Env) -> Driver:
    """Make the driver for this kind of algorithm."""
    if isinstance(algorithm, OffPolicy):
        return OffPolicyDriver(algorithm, args, env)
    return OnPolicyDriver(algorithm, args, env)


class Match(NamedTuple):
    """The game of a rollout: who else plays."""

    game: Env  # the environment, in which an opponent plays all other seats
    opponent: Any  # learner that plays the components of a teammate, or None
    acted_by_us: Array | None  # [N, A] bool, components of actions that are not the teammate's


class StepInputs(NamedTuple):
    """Random numbers and resets of T steps of N environments, [T, N, ...]."""

    noise: Array  # of the policy
    keys: Any  # of the environments
    resets: Any  # first observations and states of new episodes; None: a pool has them


@dataclass(frozen=True, eq=False)
class OnPolicyDriver:
    """Drives an algorithm by rollouts.

    Each update collects a rollout of --num-steps steps with the newest policy, and learns from it.
    """

    algorithm: OnPolicy | RecurrentOnPolicy
    args: Any
    env: Env

    @cached_property
    def recurrent(self) -> RecurrentOnPolicy:
        """The algorithm in the form of one with memory."""
        return as_recurrent(self.algorithm)

    def init(self, seed: Array, member_values: dict[str, Array] | None = None) -> TrainState:
        """Begin a run, see `Driver`."""
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = self.args.num_envs // jax.lax.axis_size(AXIS)
        learner = self.algorithm.init(params_key, hparams_of(self.args, member_values))
        keys = keys_of(envs_key, num_envs)
        env_of_member = member_env(self.env, member_values)
        if self.args.decorrelate:
            obs, env_state = reset_mid_episode(env_of_member, keys)
        else:
            obs, env_state = jax.vmap(env_of_member.reset)(keys)
        actors = Actors(
            env_state=env_state,
            seen=PolicyInput.at_start(obs),
            memory=self.recurrent.training_memory(num_envs),
            tracker=new_tracker(num_envs, self.args.decorrelate),
        )
        run = RunState(
            key=key,
            updates=jnp.int32(0),
            member_values=member_values or {},
            recent=new_recent(),
            opponent_pool=init_pool(self.args, learner),
        )
        return TrainState(
            learner=learner,
            actors=actors,
            run=run,
        )

    def update(self, state: TrainState) -> tuple[TrainState, MetricSums, MetricSums]:
        """Collect a rollout with the newest policy, and learn from it; see `Driver`."""
        learner = state.learner
        run = state.run
        run = run.replace(opponent_pool=update_pool(self.args, run, learner))
        rollout_key, key = jax.random.split(jax.random.fold_in(run.key, run.updates))
        actors, rollout, steps = self.collect(learner, state.actors, run, rollout_key)
        tracker, recent, episodes = count_episodes(actors.tracker, run.recent, steps)
        actors = actors.replace(tracker=tracker)

        hparams, scheduled = apply_schedules(self.args, run, learner)
        num_envs = tracker.ret.size
        context = UpdateContext(
            hparams=hparams,
            updates=run.updates,
            key=jax.random.fold_in(key, OTHER_STREAM),
            minibatches=partial(minibatch_indices, key, self.args.samples_per_env, num_envs),
        )
        learner, metrics = self.algorithm.update(learner, rollout, context)
        check_metrics(metrics)
        run = run.replace(recent=recent, updates=run.updates + 1)

        metrics = reduce_over_devices(metrics) | scheduled
        metrics |= legal_metrics(rollout.obs, self.env.action_space, AXIS)
        metrics |= range_metrics(self.env.observation_space, AXIS, rollout.obs, rollout.next_obs)
        metrics |= {"params/norm": global_norm(learner.params)}
        state = TrainState(
            learner=learner,
            actors=actors,
            run=run,
        )
        return state, MetricSums.of(metrics), episodes

    def collect(
        self,
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
        num_steps = self.args.num_steps
        noise_keys, env_keys = split_keys(rollout_keys(key, num_steps, num_envs), 2)  # [T, N]
        # Numbers below `num_steps` are those of `rollout_keys`
        starts_key, opponent_key, deal_key = (
            jax.random.fold_in(key, num_steps + index) for index in range(3)
        )
        match = self.match(learner, run, opponent_key, keys_of(deal_key, num_envs))
        game = match.game
        starts = new_starts(game, starts_key, self.args.reset_pool)

        def step(carry, inputs: StepInputs):
            env_state, seen, memory = carry
            action, extras, memory = self.act(learner, match, seen, memory, inputs.noise)
            out = step_envs(game, inputs.keys, env_state, action, starts, inputs.resets)
            # Without the barrier, XLA computes a step twice: once more for the rollout's arrays
            out = jax.lax.optimization_barrier(out._replace(final_state=None))
            seen_next = PolicyInput(
                obs=out.obs,
                first=out.terminated | out.truncated,
                reward=out.reward,
            )
            recorded = seen.obs, action, extras, out._replace(obs=None, state=None)
            return (out.state, seen_next, memory), Packed.of(
                recorded, largest=MOST_PACKED_NUMBERS * num_envs
            )

        draw_noise = partial(action_noise, space=self.env.action_space)
        resets = None if starts else resets_of_steps(game, env_keys)
        inputs = StepInputs(
            noise=jax.vmap(jax.vmap(draw_noise))(noise_keys),  # all steps in one pass
            keys=keys_of_steps(game, env_keys, starts, resets),
            resets=resets,
        )
        start = actors.env_state, actors.seen, actors.memory
        (env_state, after, memory), recorded = jax.lax.scan(step, start, inputs)
        obs, action, extras, steps = recorded.tree
        rollout = rollout_of(
            actors=actors,
            obs=obs,
            action=action,
            extras=extras,
            steps=steps,
            last_obs=after.obs,
            acted_by_us=match.acted_by_us,
        )
        actors = actors.replace(env_state=env_state, seen=rollout.last, memory=memory)
        return actors, rollout, steps

    def match(self, learner: Any, run: RunState, key: Array, deal_keys: Array) -> Match:
        """Choose the opponent or teammate of a rollout, if there is one.

        Args:
            learner: the learner.
            run: has past and other policies.
            key: key that draws the opponent.
            deal_keys: [N] keys that deal the components of actions to both of a team.
        """
        game = member_env(self.env, run.member_values)
        opponent = sample_opponent(self.args, run, learner, key)
        if opponent is None:
            return Match(game=game, opponent=None, acted_by_us=None)
        if not self.env.is_game:  # a teammate, which plays some agents of the team
            acted_by_us = deal_components(deal_keys, self.env.agents)
            return Match(game=game, opponent=opponent, acted_by_us=acted_by_us)

        def reply(key: Array, obs: Any) -> Array:
            row = jax.tree.map(lambda x: x[None], obs)
            return self.algorithm.act(opponent, row, key)[0]

        # It plays all other seats
        return Match(game=game.against(reply), opponent=None, acted_by_us=None)

    def act(
        self,
        learner: Any,
        match: Match,
        seen: PolicyInput,
        memory: Any,
        noise: Array,
    ) -> tuple[Array, Any, Any]:
        """Choose the actions of a step, with a teammate's among them.

        Returns:
            Actions [N, ...], extras, and the memory after the step.
        """
        action, extras, memory_after = self.recurrent.explore(learner, seen, memory, noise)
        if match.acted_by_us is not None:
            # The memory is (), and one noise serves both: each component takes one of the actions
            theirs, _, _ = self.recurrent.explore(match.opponent, seen, memory_after, noise)
            action = jnp.where(match.acted_by_us, action, theirs)
        return action, extras, memory_after

    def snapshot_metrics(self, state: TrainState) -> Metrics:
        """Metrics [] of the state at the end of an interval: none."""
        return {}


def rollout_of(
    actors: Actors,
    obs: Any,
    action: Array,
    extras: Any,
    steps: Step,
    last_obs: Any,
    acted_by_us: Array | None,
) -> Rollout:
    """Make a rollout of what its steps have recorded.

    First steps and rewards come from the outcomes. Then XLA carries through the loop only what the
    policy reads.

    Args:
        actors: the actors before the rollout.
        obs: [T, N, ...] observations before each step.
        action: [T, N, ...] actions.
        extras: [T, N, ...] what `explore` returned beside them.
        steps: [T, N, ...] outcomes.
        last_obs: [N, ...] observations after the last step.
        acted_by_us: [N, A] bool, as in `Match`.
    """
    first = jnp.concatenate([actors.seen.first[None], steps.terminated | steps.truncated])
    reward = jnp.concatenate([actors.seen.reward[None], steps.reward])
    last = PolicyInput(
        obs=last_obs,
        first=first[-1],
        reward=reward[-1],
    )
    if acted_by_us is not None:
        acted_by_us = jnp.broadcast_to(acted_by_us, (len(steps.reward), *acted_by_us.shape))
    return Rollout(
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


@dataclass(frozen=True, eq=False)
class OffPolicyDriver:
    """Drives an algorithm by a replay buffer.

    Each update steps every environment once, stores that, and makes the gradient updates that are
    due.
    """

    algorithm: OffPolicy
    args: Any
    env: Env

    @cached_property
    def learn(self) -> Callable:
        """The function that learns from the replay buffer, see `replay_learner`."""
        groups = self.args.num_envs // self.args.block

        def keys_of_groups(key: Array) -> Array:
            return keys_of(key, groups // jax.lax.axis_size(AXIS))

        per_group = self.args.batch_size // groups
        return replay_learner(self.algorithm, self.args, keys_of_groups, per_group)

    def init(self, seed: Array, member_values: dict[str, Array] | None = None) -> TrainState:
        """Begin a run, see `Driver`."""
        params_key, envs_key, key = jax.random.split(jax.random.key(seed), 3)
        num_envs = self.args.num_envs // jax.lax.axis_size(AXIS)
        env_of_member = member_env(self.env, member_values)
        obs, env_state = jax.vmap(env_of_member.reset)(keys_of(envs_key, num_envs))
        example = example_transition(self.args, self.env.spec)
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
            replay=new_replay(example, num_envs, self.args.capacity),
            discounted=jnp.zeros(num_envs) if self.args.normalize_rewards else (),
        )
        learner = self.algorithm.init(params_key, hparams_of(self.args, member_values))
        return TrainState(
            learner=learner,
            actors=actors,
            run=run,
        )

    def update(self, state: TrainState) -> tuple[TrainState, MetricSums, MetricSums]:
        """Step every environment once, and make the gradient updates that are due; see `Driver`."""
        learner = state.learner
        run = state.run
        act_key, learn_key = jax.random.split(jax.random.fold_in(run.key, run.updates))
        actors, out, transition = self.collect(learner, state.actors, run, act_key)
        # [1, N, ...]
        steps, new = jax.tree.map(lambda x: x[None], (out._replace(state=None), transition))
        tracker, recent, episodes = count_episodes(actors.tracker, run.recent, steps)
        actors = actors.replace(tracker=tracker, replay=actors.replay.add(transition))
        stored = actors.replay.added * self.args.num_envs
        due = self.args.updates_due(stored) - self.args.updates_due(stored - self.args.num_envs)
        state = TrainState(
            learner=learner,
            actors=actors,
            run=run.replace(recent=recent),
        )
        done = steps.terminated | steps.truncated
        state, tally = self.learn(state, new, done, learn_key, due)
        return state, tally | MetricSums.of(self.metrics_of(transition)), episodes

    def metrics_of(self, transition: Transition) -> Metrics:
        """Metrics of new transitions [N, ...].

        Learning may meet a broken number long after it was stored: these show it at once, before it
        can be saved.
        """
        magnitudes = []
        for name, _, x in leaves(self.env.observation_space, transition.next_obs):
            if not is_mask(name):
                magnitudes.append(jnp.mean(jnp.abs(jnp.float32(x))))
        metrics = {
            "env/reward": jnp.mean(transition.reward),
            "env/obs_magnitude": sum(magnitudes) / len(magnitudes),
        }
        metrics = flat_pmean(metrics) | legal_metrics(transition.obs, self.env.action_space, AXIS)
        return metrics | range_metrics(
            self.env.observation_space,
            AXIS,
            transition.obs,
            transition.next_obs,
        )

    def collect(
        self,
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
        noise = jax.vmap(partial(action_noise, space=self.env.action_space))(policy_keys)
        action = self.algorithm.explore(learner, obs, noise)
        # No update folds in a negative number; each key serves for as long as an action is held
        hold = -1 - run.updates // self.args.hold_random
        held_keys = keys_of(jax.random.fold_in(run.key, hold), num_envs)
        warming_up = run.updates * self.args.num_envs < self.args.learning_starts
        action = jnp.where(warming_up, random_actions(held_keys, obs, self.env), action)

        env_of_member = member_env(self.env, run.member_values)
        env_action = to_env(action, self.env.action_space)
        out = step_envs(env_of_member, env_keys, actors.env_state, env_action)
        transition = Transition(
            obs=obs,
            action=action,
            reward=out.reward,
            terminated=out.terminated,
            next_obs=out.final_obs,
            first=actors.seen.first if self.args.n_steps > 1 else None,
        )
        seen = actors.seen._replace(obs=out.obs, first=out.terminated | out.truncated)
        return actors.replace(env_state=out.state, seen=seen), out, transition

    def snapshot_metrics(self, state: TrainState) -> Metrics:
        """Metrics [] of the state at the end of an interval: updates made, and the buffer."""
        replay = state.actors.replay
        run = state.run
        learned_from = run.updates * self.args.num_envs - self.args.learning_starts
        return {
            "gradient_updates": run.gradient_updates,
            "replay/fill": jnp.mean(replay.fill),
            "replay/ratio": run.gradient_updates / jnp.maximum(learned_from, 1),
        }


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
        tally = tally.replace(value=reduce_over_devices(tally.value))
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
