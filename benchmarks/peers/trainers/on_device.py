"""Trains peers that are written in JAX: all seeds at once, with greedy evaluations in between."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import gymnax
import jax
import jax.numpy as jnp
from rows import Rows, evaluation_points

REPEATS = 3


class Peer(NamedTuple):
    """How a peer trains one agent."""

    init: Callable[[Any], Any]  # a random key to a state of training
    update: Callable[[Any], Any]  # the state after `steps_per_update` more environment steps
    # A state of training, observation and memory to action and memory
    act: Callable[[Any, Any, Any], tuple[Any, Any]]
    env: Any
    env_params: Any
    steps_per_update: int
    memory: Any = ()  # at the start of an episode


def train(rows: Rows, peer: Peer) -> None:
    """Train the agents of all seeds, and write what they earn."""
    rows.begin(jax.default_backend(), jax.devices())
    init = jax.jit(lambda seeds: jax.vmap(lambda seed: peer.init(jax.random.PRNGKey(seed)))(seeds))
    advance = jax.jit(
        lambda states, count: jax.lax.fori_loop(
            0, count, lambda _, x: jax.vmap(peer.update)(x), states
        )
    )
    play = partial(returns, peer, rows.args["eval_episodes"], rows.args["eval_seed"])
    evaluate = jax.jit(jax.vmap(lambda state: play(state).mean()))
    with rows.spent_on("compiling"):
        states = init(jnp.array(rows.seeds))
        # Counters may begin as integers and go on as floats
        after = jax.eval_shape(jax.vmap(peer.update), states)
        states = jax.block_until_ready(
            jax.tree.map(lambda x, later: jnp.asarray(x, later.dtype), states, after)
        )
        advance = advance.lower(states, 1).compile()
        evaluate = evaluate.lower(states).compile()
    updates = -(-rows.args["total_timesteps"] // peer.steps_per_update)
    done = 0
    for point in evaluation_points(updates, rows.args["eval_interval"] / peer.steps_per_update):
        states = jax.block_until_ready(advance(states, point - done))
        done = point
        with rows.spent_on("evaluating"):
            earned = jax.block_until_ready(evaluate(states))
        rows.write(done * peer.steps_per_update, earned)


def update_of(train_all: Callable[[Any], dict]) -> tuple[Callable, Callable]:
    """`init` and `update` of a `Peer`, from a function that trains in one scan, of which an update
    is taken out.
    """
    update = []

    def init(key):
        def scan(function, carry, xs, length=None, **options):
            if function.__name__ != "_update_step":
                return real_scan(function, carry, xs, length, **options)
            update[:] = [function]
            return carry, None

        real_scan = jax.lax.scan
        with mock.patch.object(jax.lax, "scan", scan):
            return train_all(key)["runner_state"]

    return init, lambda state: update[0](state, None)[0]


def speed_of(train_all: Callable[[Any], Any], steps: int) -> dict[str, float]:
    """Steps per second of such a function, the median of some warm runs, and the seconds of its
    compilation.
    """
    began = time.perf_counter()
    compiled = jax.jit(train_all).lower(jax.random.PRNGKey(0)).compile()
    compile_seconds = time.perf_counter() - began
    seconds = []
    for seed in range(1 + REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(compiled(jax.random.PRNGKey(seed)))
        seconds.append(time.perf_counter() - began)
    speed = round(steps / statistics.median(seconds[1:]))
    return {"steps_per_second": speed, "compile_seconds": round(compile_seconds, 2)}


def returns(peer: Peer, episodes: int, seed: int, state: Any) -> Any:
    """Returns [episodes] of greedy episodes of one agent, each to its end or time limit.

    Their keys are those of `run_episodes` in common/pmaprl/device/evaluation.py, which cannot be
    imported here.
    """

    def episode(key):
        reset_key, step_key, _ = jax.random.split(key, 3)
        obs, env_state = peer.env.reset(reset_key, peer.env_params)

        def step(carry):
            time, obs, env_state, memory, _, total = carry
            (action, memory), key = peer.act(state, obs, memory), jax.random.fold_in(step_key, time)
            obs, env_state, reward, done, _ = peer.env.step(key, env_state, action, peer.env_params)
            return time + 1, obs, env_state, memory, done, total + jnp.squeeze(reward)

        first = jnp.int32(0), obs, env_state, peer.memory, jnp.zeros((), bool), jnp.zeros(())
        return jax.lax.while_loop(lambda carry: ~carry[-2], step, first)[-1]

    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.PRNGKey(seed), jnp.arange(episodes))
    return jax.vmap(episode)(keys)


class OldGymnax:
    """An environment of today's gymnax for peers that are written for 0.0.9: `step` returns `done`,
    as it did then.
    """

    def __init__(self, env: Any):
        self._env = env

    def __getattr__(self, name: str) -> Any:
        if name == "_env":  # asked for by `copy`, before there is one
            raise AttributeError(name)
        return getattr(self._env, name)

    def step(self, key, state, action, params=None):
        """Observation, state, reward, whether the episode is over for whatever reason, and no
        further information.
        """
        obs, state, reward, terminated, truncated, _ = self._env.step(key, state, action, params)
        return obs, state, reward, jnp.logical_or(terminated, truncated), {}


def make(name: str, **params: Any) -> tuple[OldGymnax, Any]:
    """Make an environment with the results that `gymnax.make` gave before."""
    env, env_params = gymnax.make(name, **params)
    return OldGymnax(env), env_params
