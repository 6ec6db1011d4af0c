"""When members exchange weights, and what a row of metrics says of it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from common.cli.pbt_flags import PbtArgs
from common.device.algorithm import RunState
from common.device.episodes import uncounted
from common.device.sharding import GROUPS, TrainState, global_ids, members_of_all
from common.population.exchange import Exchange, exchange, objective_of


def evolution(args: PbtArgs, groups: int = 1) -> Callable[[jax.Array, Any], tuple[Any, dict[str, jax.Array]]] | None:
    """Of the number of updates before and the state [S, ...] now: the state after an exchange, if one is due between,
    and metrics. None without --pbt.

    Of several `groups` of devices each has its own part of the learners: then they are gathered for an exchange, which
    all compute.
    """
    if not args.pbt:
        return None
    every, start = (-(-steps // args.steps_per_update) for steps in (args.exchange_interval, args.pbt_start))

    def places(run: RunState) -> jax.Array:
        own = run.updates.size
        return global_ids(own, GROUPS) if groups > 1 else jnp.arange(own)

    def exchanged(learner: Any, run: RunState) -> tuple[Any, RunState, Exchange]:
        if groups == 1:
            return exchange(learner, run, args.evolving, args.rules)
        own = places(run)
        everyone = members_of_all((learner, run))
        return jax.tree.map(lambda x: x[own], exchange(*everyone, args.evolving, args.rules))

    def at_rest(learner: Any, run: RunState) -> tuple[Any, RunState, Exchange]:
        objective = objective_of(learner, run, args.rules.window)
        return learner, run, Exchange(places(run), objective, run.hyper, run.hyper)

    def evolve(before: jax.Array, state: Any) -> tuple[Any, dict[str, jax.Array]]:
        now = state.run.updates[0]
        due = (now // every > before // every) & (now >= start)
        learner, run, done = jax.lax.cond(due, exchanged, at_rest, state.learner, state.run)
        tracker = uncounted(state.actors.tracker, done.source != places(run))
        metrics = {
            "pbt/due": jnp.broadcast_to(due, done.source.shape),
            "pbt/source": done.source,
            "pbt/objective": done.objective,
        }
        metrics |= {f"pbt/before/{name}": values for name, values in done.before.items()}
        metrics |= {f"hyper/{name}": values for name, values in done.after.items()}
        return TrainState(learner, state.actors.replace(tracker=tracker), run), metrics

    return evolve
