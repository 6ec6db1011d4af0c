"""Population-based training (Jaderberg et al. 2017), by rules close to Sample Factory's (Petrenko
et al. 2020), and Elo ratings of members that play against each other.

An exchange is a gather over the axis of the members, inside the compiled program: nothing returns
to the host. Every device does the same, to its replica or with --sharding members to its part.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.cli.files import write_json
from pmaprl.cli.population_flags import PbtArgs, Rules
from pmaprl.device.agents import Policy
from pmaprl.device.evaluation import SEED, play_episodes
from pmaprl.device.interface import RunState
from pmaprl.device.optim import all_finite
from pmaprl.device.rollout import OTHER_STREAM
from pmaprl.device.sharding import GROUPS, TrainState, gathered, global_ids, key_data, with_keys
from pmaprl.device.statistics import WINDOW, Metrics
from pmaprl.envs.environment import Env

SOURCE = "pbt/source"  # whose weights a member has now: its own place, or another one's
OBJECTIVE = "pbt/objective"  # by which members are sorted; -inf where there is none


def evolve(
    args: PbtArgs,
    before: jax.Array,
    state: Any,
    limits: Mapping[str, tuple[float, float]] | None = None,
) -> tuple[Any, Metrics]:
    """The state [S, ...] after an exchange, if one is due since there were `before` [] updates, and
    metrics.

    `limits` are those of the algorithm. With --sharding members each device has its own part of the
    agents: all gather them, and compute the same exchange.
    """
    rules = args.rules._replace(limits=args.rules.limits | (limits or {}))
    every, start = (
        -(-steps // args.steps_per_update) for steps in (args.exchange_interval, args.pbt_start)
    )
    size = state.run.updates.size
    apart = args.sharding == "members"
    places = global_ids(size, GROUPS) if apart else jnp.arange(size)

    def at_rest(learner: Any, run: RunState) -> tuple[Any, RunState, Metrics]:
        return learner, run, {SOURCE: places, OBJECTIVE: objective_of(learner, run, rules.window)}

    def exchanged(*own: Any) -> tuple[Any, RunState, Metrics]:
        if apart:
            own = with_keys(jax.tree.map(lambda x: gathered(x, GROUPS), key_data(own)), own)
        after = exchange(*own, args.evolving, rules)
        return jax.tree.map(lambda x: x[places], after) if apart else after

    now = state.run.updates[0]
    due = (now // every > before // every) & (now >= start)
    learner, run, metrics = jax.lax.cond(due, exchanged, at_rest, state.learner, state.run)
    taken = metrics[SOURCE] != places  # their running episodes do not count
    tracker = state.actors.tracker
    tracker = tracker._replace(length=jnp.where(taken[:, None], -jnp.inf, tracker.length))
    metrics |= {f"hyper/{name}": values for name, values in run.member_values.items()}
    return TrainState(learner, state.actors.replace(tracker=tracker), run), metrics


def exchange(
    learner: Any, run: Any, given: dict[str, float], rules: Rules
) -> tuple[Any, Any, Metrics]:
    """Learners and `RunState`s [S, ...] after an exchange, and its metrics [S], SOURCE and
    OBJECTIVE; `given` are the flags that change, as on the command line.

    The best stay as they are. Each of the worst takes over one of the best, where that is clearly
    better. All but the best then change their hyper-parameters. Member 0 is a control: it stays as
    it is, and only others learn from it.
    """
    objective = objective_of(learner, run, rules.window)
    broken = diverged_members(learner)
    key = jax.random.fold_in(jax.random.fold_in(run.key[0], OTHER_STREAM), run.updates[0])
    source_key, change_key = jax.random.split(key)
    source, is_best = copy_best(source_key, objective, broken, rules)
    # A gather over the members
    learner, member_values = jax.tree.map(lambda x: x[source], (learner, run.member_values))
    fixed = is_best | (jnp.arange(source.size) == 0)
    after = explore(change_key, member_values, given, fixed, rules)
    taken = source != jnp.arange(source.size)  # what they have earned was earned by other weights
    recent = run.recent.replace(count=jnp.where(taken, 0, run.recent.count))
    return (
        learner,
        run.replace(member_values=after, recent=recent),
        {SOURCE: source, OBJECTIVE: objective},
    )


def objective_of(learner: Any, run: Any, window: int) -> jax.Array:
    """The mean return of the last `window` episodes, [S]; -inf without any, or where the weights
    are not finite.
    """
    recent = run.recent
    count = jnp.minimum(recent.count, window)
    newest = jnp.arange(WINDOW) < count[:, None]
    ret = jnp.sum(recent.ret, axis=1, where=newest) / jnp.maximum(count, 1)
    return jnp.where(
        (recent.count > 0) & ~diverged_members(learner) & jnp.isfinite(ret), ret, -jnp.inf
    )


def diverged_members(learner: Any) -> jax.Array:
    """Whose weights are not finite, [S]."""
    return ~jax.vmap(all_finite)(learner.params)


def copy_best(
    key: jax.Array, objective: jax.Array, broken: jax.Array, rules: Rules
) -> tuple[jax.Array, jax.Array]:
    """Whose weights each member has afterwards, and who is among the best, [S] each.

    One whose weights have had no episode yet is left alone, unless they are broken.
    """
    size = objective.size
    count = math.ceil(rules.fraction * size)
    order = jnp.argsort(-objective)  # stable: of equal ones the first is the best
    rank = jnp.argsort(order)
    sound = jnp.sum(jnp.isfinite(objective))  # which come first
    drawn = order[jax.random.randint(key, (size,), 0, jnp.clip(sound, 1, count))]
    theirs = objective[drawn]
    scale = jnp.maximum(jnp.abs(theirs), jnp.abs(objective))
    clearly = theirs - objective > rules.gap * scale
    better = jnp.isfinite(theirs) & (clearly & jnp.isfinite(objective) | broken)
    itself = jnp.arange(size)
    worst = (rank >= size - count) & (rank >= count)
    takes = (worst | broken) & better & (itself != 0)
    return jnp.where(takes, drawn, itself), (rank < count) & jnp.isfinite(objective)


def explore(
    key: jax.Array,
    member_values: dict[str, jax.Array],
    given: dict[str, float],
    fixed: jax.Array,
    rules: Rules,
) -> dict[str, jax.Array]:
    """Hyper-parameters [S] after chance has changed some of those that are `given`, of members that
    are not `fixed`.
    """
    after = dict(member_values)
    moved = partial(rules.moved, clip=jnp.clip)
    for index, name in enumerate(sorted(given)):
        values = member_values[name]
        keys = jax.random.split(jax.random.fold_in(key, index), 4)
        whether, which, reset = (jax.random.uniform(key, values.shape) for key in keys[:3])
        low, high = rules.factors_of(name)
        factor = jax.random.uniform(keys[3], values.shape, minval=low, maxval=high)
        new = moved(name, values, jnp.where(which < 0.5, factor, 1 / factor))
        new = jnp.where(reset < rules.reset_rate, jnp.float32(given[name]), new)
        after[name] = jnp.where((whether < rules.mutation_rate) & ~fixed, new, values)
    return after


MANY = 16  # members, from which on the games of each no longer become more
SHOWN = 10  # members in the table
MEAN_ELO = 1000.0  # of all ratings
PER_FACTOR_TEN = 400.0  # points between two of whom one wins ten times as often as the other


def rate_members(run: Any, env: Env, algorithm: Any, learners: Any, status: str) -> str:
    """Rate `learners` [S, ...] of a finished run with --opponent members: in elo.json, and lines
    for `Run.finish`.
    """
    args = run.args
    if args.opponent != "members" or status != "finished" or not env.is_game:
        return ""
    games = math.ceil(args.eval_episodes * min(1, (MANY - 1) / (args.num_agents - 1)))
    run.console.say("playing all with all ...")
    scores = play_all(env, algorithm, learners, games)
    ratings = elo_ratings(scores, games)
    found = {"ratings": ratings, "scores": scores}
    found = {name: np.where(np.isnan(x), None, x).tolist() for name, x in found.items()}
    write_json(run.dir / "elo.json", {"env_steps": run.steps, "games": games} | found)
    best = np.argsort(-ratings, kind="stable")[: np.sum(~np.isnan(ratings))]  # NaN comes last
    lines = [
        f"elo      {games} games of each of {len(best)} members with each other one; the best:"
    ]
    return "\n".join(
        [*lines, *(f"{'member':>15} {member:<5}{ratings[member]:10.1f}" for member in best[:SHOWN])]
    )


def play_all(env: Env, algorithm: Any, learners: Any, games: int) -> np.ndarray:
    """What each of `learners` [S, ...] scores on average of so many `games` against each other one,
    [S, S].

    A win is 1 and a draw 1/2. NaN on the diagonal, and for those whose weights are broken. All
    games of one member are played side by side, in a single program for all of them.
    """
    broken = np.asarray(diverged_members(learners))

    def score(us: tuple, them: tuple) -> jax.Array:
        """Of one that an episode counts for, where the other plays everybody else; seats are drawn,
        actions sampled.
        """
        policy, other = (Policy(algorithm, learner, env.spec) for _, learner in (us, them))
        game = env.against(lambda key, obs: other(obs, key=key))
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(SEED), us[0]), them[0])
        episodes = play_episodes(game, policy.player(stochastic=True), jax.random.split(key, games))
        return jnp.mean((1 + jnp.sign(episodes.ret)) / 2)

    @jax.jit
    def all_scores(members: tuple) -> jax.Array:
        return jax.lax.map(lambda us: jax.vmap(partial(score, us))(members), members)

    scores = np.array(all_scores((jnp.arange(len(broken)), learners)), np.float64)
    scores[broken | broken[:, None] | np.eye(len(broken), dtype=bool)] = np.nan
    return scores


def elo_ratings(scores: np.ndarray, games: int) -> np.ndarray:
    """Ratings [S] by the model of Bradley and Terry (1952), whose mean is `MEAN_ELO`; NaN for who
    has played nobody.

    `scores` [S, S] is what the row earns of a game against the column, 1 for a win and 1/2 for a
    draw, on average over `games`; (i, j) and (j, i) are different games of the same two. Each two
    have one drawn game more, by which ratings remain finite where somebody has won, or lost, every
    game.
    """
    from scipy.optimize import minimize
    from scipy.special import expit, log_expit

    rated = ~np.isnan(scores).all(axis=1)
    own = scores[np.ix_(rated, rated)]
    points = games * (own + 1 - own.T) + 0.5  # of the row from the column
    np.fill_diagonal(points, 0.0)

    def loss_and_gradient(logits: np.ndarray) -> tuple[float, np.ndarray]:
        better = logits[:, None] - logits
        return -np.sum(points * log_expit(better)), np.sum(
            (points + points.T) * expit(better) - points, axis=1
        )

    ratings = np.full(len(scores), np.nan)
    if rated.any():
        logits = minimize(loss_and_gradient, np.zeros(len(own)), jac=True).x
        ratings[rated] = MEAN_ELO + PER_FACTOR_TEN / np.log(10) * (logits - logits.mean())
    return ratings
