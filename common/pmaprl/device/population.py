"""Population-based training (Jaderberg et al. 2017).

The rules are close to Sample Factory's (Petrenko et al. 2020). An exchange is a gather over the
axis of the members, inside the compiled program: nothing returns to the host. Every device computes
the same exchange, for its replica of the members or with --sharding members for its part of them.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pmaprl.cli.population_flags import PbtArgs, Rules
from pmaprl.device.episodes import WINDOW
from pmaprl.device.interface import RunState
from pmaprl.device.keys import OTHER_STREAM
from pmaprl.device.optim import all_finite
from pmaprl.device.sharding import GROUPS, gathered, global_ids
from pmaprl.device.state import TrainState, key_data, with_keys
from pmaprl.device.statistics import Metrics

SOURCE = "pbt/source"  # metric: index of the member whose weights a member has now
OBJECTIVE = "pbt/objective"  # metric by which members are sorted; -inf without episodes


def evolve(
    args: PbtArgs,
    before: Array,
    state: Any,
    limits: Mapping[str, tuple[float, float]] | None = None,
) -> tuple[Any, Metrics]:
    """Exchange between members, if an exchange is due.

    With --sharding members each device has its own part of the agents: all gather them, and compute
    the same exchange.

    Args:
        args: flags.
        before: [] number of updates before those that have just run.
        state: the `TrainState` [S, ...].
        limits: lowest and highest value of a flag, by flag, from the algorithm.

    Returns:
        The state [S, ...] and metrics [S].
    """
    rules = args.rules._replace(limits={**args.rules.limits, **(limits or {})})
    interval = -(-args.exchange_interval // args.steps_per_update)  # updates, rounded up
    start = -(-args.pbt_start // args.steps_per_update)
    size = state.run.updates.size
    is_split = args.sharding == "members"
    places = global_ids(size, GROUPS) if is_split else jnp.arange(size)

    def at_rest(learner: Any, run: RunState) -> tuple[Any, RunState, Metrics]:
        objective = objective_of(learner, run, rules.window)
        return learner, run, {SOURCE: places, OBJECTIVE: objective}

    def exchanged(learner: Any, run: RunState) -> tuple[Any, RunState, Metrics]:
        if not is_split:
            return exchange(learner, run, args.evolving, rules)
        agents = learner, run
        arrays = jax.tree.map(lambda x: gathered(x, GROUPS), key_data(agents))
        learner, run = with_keys(arrays, agents)
        after = exchange(learner, run, args.evolving, rules)
        return jax.tree.map(lambda x: x[places], after)

    updates = state.run.updates[0]
    due = (updates // interval > before // interval) & (updates >= start)
    learner, run, metrics = jax.lax.cond(due, exchanged, at_rest, state.learner, state.run)
    taken = metrics[SOURCE] != places
    tracker = state.actors.tracker
    # Running episodes of other weights do not count
    length = jnp.where(taken[:, None], -jnp.inf, tracker.length)
    actors = state.actors.replace(tracker=tracker._replace(length=length))
    metrics |= {f"hyper/{name}": values for name, values in run.member_values.items()}
    return TrainState(
        learner=learner,
        actors=actors,
        run=run,
    ), metrics


def exchange(
    learner: Any,
    run: Any,
    start_values: dict[str, float],
    rules: Rules,
) -> tuple[Any, Any, Metrics]:
    """Let the worst members copy the best, and perturb hyperparameters.

    The best stay as they are. Each of the worst takes over one of the best, if that is clearly
    better. All but the best then change their hyperparameters. Member 0 is a control: it stays as
    it is, and only others learn from it.

    Args:
        learner: learners [S, ...].
        run: `RunState`s [S, ...].
        start_values: the flags that change, with their values on the command line.
        rules: constants of the exchange.

    Returns:
        Learners and `RunState`s after the exchange, and the metrics SOURCE and OBJECTIVE [S].
    """
    objective = objective_of(learner, run, rules.window)
    broken = diverged_members(learner)
    key = jax.random.fold_in(jax.random.fold_in(run.key[0], OTHER_STREAM), run.updates[0])
    source_key, change_key = jax.random.split(key)
    source, is_best = choose_sources(source_key, objective, broken, rules)
    # A gather over the members
    learner, member_values = jax.tree.map(lambda x: x[source], (learner, run.member_values))
    fixed = is_best | (jnp.arange(source.size) == 0)
    after = perturb(change_key, member_values, start_values, fixed, rules)
    taken = source != jnp.arange(source.size)
    # Returns that other weights have earned do not count
    recent = run.recent.replace(count=jnp.where(taken, 0, run.recent.count))
    run = run.replace(member_values=after, recent=recent)
    return learner, run, {SOURCE: source, OBJECTIVE: objective}


def objective_of(
    learner: Any,
    run: Any,
    window: int,
) -> Array:
    """Mean return [S] of the last `window` episodes.

    It is -inf without episodes, or if the weights are not finite.
    """
    recent = run.recent
    count = jnp.minimum(recent.count, window)
    newest = jnp.arange(WINDOW) < count[:, None]
    ret = jnp.sum(recent.ret, axis=1, where=newest) / jnp.maximum(count, 1)
    is_sound = (recent.count > 0) & ~diverged_members(learner) & jnp.isfinite(ret)
    return jnp.where(is_sound, ret, -jnp.inf)


def diverged_members(learner: Any) -> Array:
    """True [S] for members whose weights are not finite."""
    return ~jax.vmap(all_finite)(learner.params)


def choose_sources(
    key: Array,
    objective: Array,
    broken: Array,
    rules: Rules,
) -> tuple[Array, Array]:
    """Choose the member whose weights each member takes over.

    A member whose weights have had no episode yet is left alone, unless they are broken.

    Args:
        key: random key.
        objective: [S] objectives.
        broken: [S] bool, True if the weights are not finite.
        rules: constants of the exchange.

    Returns:
        [S] indices of the chosen members, and [S] bool, True for the best ones.
    """
    size = objective.size
    count = math.ceil(rules.fraction * size)
    order = jnp.argsort(-objective)  # stable: of equal ones the first is the best
    rank = jnp.argsort(order)
    num_sound = jnp.sum(jnp.isfinite(objective))  # sound members come first in the order
    drawn = order[jax.random.randint(key, (size,), 0, jnp.clip(num_sound, 1, count))]
    theirs = objective[drawn]
    scale = jnp.maximum(jnp.abs(theirs), jnp.abs(objective))
    is_clearly_better = theirs - objective > rules.gap * scale
    better = jnp.isfinite(theirs) & ((is_clearly_better & jnp.isfinite(objective)) | broken)
    indices = jnp.arange(size)
    worst = (rank >= size - count) & (rank >= count)
    takes = (worst | broken) & better & (indices != 0)
    source = jnp.where(takes, drawn, indices)
    is_best = (rank < count) & jnp.isfinite(objective)
    return source, is_best


def perturb(
    key: Array,
    member_values: dict[str, Array],
    start_values: dict[str, float],
    fixed: Array,
    rules: Rules,
) -> dict[str, Array]:
    """Perturb hyperparameters at random.

    Args:
        key: random key.
        member_values: values [S] of flags, by name.
        start_values: the flags that may change, with their values on the command line.
        fixed: [S] bool, True for members that change nothing.
        rules: constants of the exchange.

    Returns:
        Values [S] of all flags, by name.
    """
    after = dict(member_values)
    moved = partial(rules.moved, clip=jnp.clip)
    for index, name in enumerate(sorted(start_values)):
        values = member_values[name]
        keys = jax.random.split(jax.random.fold_in(key, index), 4)
        mutates, inverts, resets = (jax.random.uniform(key, values.shape) for key in keys[:3])
        low, high = rules.factors_of(name)
        factor = jax.random.uniform(keys[3], values.shape, minval=low, maxval=high)
        new = moved(name, values, jnp.where(inverts < 0.5, factor, 1 / factor))
        new = jnp.where(resets < rules.reset_rate, jnp.float32(start_values[name]), new)
        changes = (mutates < rules.mutation_rate) & ~fixed
        after[name] = jnp.where(changes, new, values)
    return after
