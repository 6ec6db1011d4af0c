"""Helpers of several test files: small arguments, running PPO's functions directly, and toy
environments.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dqn_pmap as dqn
import jax
import jax.numpy as jnp
import numpy as np
import ppo_pmap as ppo
import ppo_rnn_pmap as ppo_rnn
import pqn_pmap as pqn
import sac_pmap as sac
from flax import struct
from gymnax.environments import environment
from gymnax.environments.spaces import Box, Dict, Discrete, Tuple
from ppo_pmap import Args, train  # noqa: F401  (re-exported)

import pmaprl.device.programs
import pmaprl.runs.run
from pmaprl.device import drivers
from pmaprl.device.collectives import in_one_order
from pmaprl.device.contract import RecurrentOnPolicy
from pmaprl.device.drivers import Driver
from pmaprl.device.programs import Programs, for_seeds
from pmaprl.device.sharding import AXIS
from pmaprl.device.state import TrainState, key_data, members_on_devices
from pmaprl.envs.custom import wrap
from pmaprl.envs.environment import Env
from pmaprl.envs.registry import make
from pmaprl.runs.metrics import read
from pmaprl.runs.run import Run

SMALL = {
    "num_envs": 16,
    "num_steps": 8,
    "num_minibatches": 4,
    "update_epochs": 2,
    "hidden_sizes": (16,),
}
SMALL |= {
    "total_timesteps": 10 * 16 * 8,
    "eval_episodes": 4,
    "log_interval": 10**9,
    "eval_interval": 0,
}
SMALL |= {"checkpoint_interval": 0, "num_devices": 1, "quiet": True}


def small_args(**flags: Any) -> Args:
    return Args(**SMALL | flags)


def small_rnn_args(**flags: Any) -> ppo_rnn.Args:
    return ppo_rnn.Args(**SMALL | {"rnn_size": 8} | flags)


def small_pqn_args(**flags: Any) -> pqn.Args:
    return pqn.Args(**SMALL | {"epsilon_fraction": 0.5} | flags)


SMALL_SAC = {
    "env": "Pendulum-v1",
    "num_envs": 16,
    "batch_size": 64,
    "learning_starts": 32,
    "utd_ratio": 0.125,
    "buffer_size": 16 * 20,
    "hidden_sizes": (16,),
    "total_timesteps": 10**6,
} | {
    name: SMALL[name]
    for name in ("eval_episodes", "log_interval", "eval_interval", "checkpoint_interval", "quiet")
}


def small_sac_args(**flags: Any) -> sac.Args:
    return sac.Args(**SMALL_SAC | {"num_devices": 1} | flags)


def small_dqn_args(**flags: Any) -> dqn.Args:
    given = SMALL_SAC | {"env": "CartPole-v1", "num_devices": 1, "n_steps": 1} | flags
    return dqn.Args(**given)


def over_devices(function, count: int, *args: Any) -> Any:
    """`function` on `count` devices of the axis, simulated by vmap; arguments are split along their
    leading axis.
    """
    per_device = jax.vmap(lambda _, *shard: function(*shard), axis_name=AXIS)
    outputs = jax.jit(per_device)
    shards = (jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), x) for x in args)
    return outputs(
        jnp.arange(count),
        *shards,
    )


@dataclass(frozen=True, eq=False)
class OnlyActs(RecurrentOnPolicy[Any, Any]):
    """An algorithm without memory that acts by a function (learner, `PolicyInput`, key)."""

    function: Callable

    def init(self, key: Any, hparams: Any) -> Any:
        raise NotImplementedError

    def explore(self, learner: Any, seen: Any, memory: Any, noise: Any) -> Any:
        raise NotImplementedError

    def update(self, learner: Any, rollout: Any, context: Any) -> Any:
        raise NotImplementedError

    def initial_memory(self, count: int) -> tuple:
        return ()

    def act(self, learner: Any, seen: Any, memory: Any, key: Any = None) -> Any:
        return self.function(learner, seen, key), memory


def only_acts(function: Callable) -> OnlyActs:
    """An algorithm that acts by a function (learner, `PolicyInput`, key)."""
    return OnlyActs(args=None, env=None, function=function)  # type: ignore[arg-type,]


def module_of(args: Any) -> Any:
    """The algorithm whose arguments these are."""
    modules = (ppo, ppo_rnn, pqn, sac, dqn)
    return next(module for module in modules if isinstance(args, module.Args))


def driver_of(args: Any, env: Env) -> Driver:
    """`init` and `update` of one agent on one device, with the algorithm of `args`."""
    algorithm = module_of(args).make_algorithm(args, env.spec)
    return drivers.driver_of(algorithm, args, env)


def functions_of(args: Args, env: Env) -> Programs:
    """The algorithm of `args` for all seeds, on one device."""
    algorithm = module_of(args).make_algorithm(args, env.spec)
    return for_seeds(algorithm, args, env)


def init_over(args: Args, env: Env, num_devices: int) -> Callable[[], TrainState]:
    """`init` over devices."""
    init = jax.pmap(
        functions_of(args, env).init,
        axis_name=AXIS,
        devices=jax.devices()[:num_devices],
    )
    return functools.partial(
        init,
        members_on_devices(args.members, num_devices),
    )


def programs(args: Args, env: Env, num_devices: int):
    """`init` and `update` over devices, compiled as a run compiles them, without the run around
    them.
    """
    init = init_over(args, env, num_devices)
    devices = jax.devices()[:num_devices]
    update = in_one_order(functions_of(args, env).update, devices, AXIS)
    update = jax.pmap(
        update,
        in_axes=(0, None),
        out_axes=(0, None),
        axis_name=AXIS,
        devices=devices,
    )
    lowered = update.lower(jax.eval_shape(init), np.int32(0))
    update = lowered.compile(pmaprl.device.programs._options(1))
    return init, update


def run_updates(
    args: Args, env: Env, num_devices: int, updates: int
) -> tuple[TrainState, dict[str, np.ndarray]]:
    """State on the devices and metrics of the last call after `updates` updates from scratch."""
    init, update = programs(args, env, num_devices)
    state, outcome = update(init(), np.int32(updates))
    return state, outcome.fetch(updates).metrics


COLLECTIVES = {"all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"}


def collectives_beside_each_other(compiled: Any) -> list[str]:
    """Pairs of collectives, or of loops and branches with some, of which neither needs a result of
    the other.

    Also fails where a compiled program has no collectives.
    """
    programs: dict[str, dict[str, tuple[str, list[str]]]] = {}
    for line in compiled.as_text().splitlines():
        if begin := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            program = programs[begin[1]] = {}
        elif found := re.match(r" +(?:ROOT )?%([\w.-]+) = .*? ([a-z][\w-]*)\((.*)", line):
            name, operation, rest = found.groups()
            program[name] = operation, re.findall(r"%([\w.-]+)", rest)

    @functools.cache
    def exchanges(name: str) -> bool:
        operations = programs.get(name, {}).values()
        return any(kind in COLLECTIVES or any(map(exchanges, names)) for kind, names in operations)

    pairs = []
    count = 0
    for program in programs.values():
        needed: dict[str, set[str]] = {}
        last = None
        for name, (operation, names) in program.items():
            needed[name] = set().union(*(needed[x] | {x} for x in names if x in needed))
            if operation not in COLLECTIVES and not any(map(exchanges, names)):
                continue
            count += 1
            if last is not None and last not in needed[name]:
                pairs.append(f"{last} and {name}")
            last = name
    assert count
    return pairs


def relative_difference(a: Any, b: Any) -> float:
    """Largest difference between two trees, each array measured by its own largest magnitude.

    What float32 does not hold of running statistics, arrays called `..._rest`, is below any
    tolerance and left out.
    """

    def difference(path, x, y):
        if jax.tree_util.keystr(path, simple=True).endswith("_rest"):
            return 0.0
        x = np.asarray(x, np.float64)
        y = np.asarray(y, np.float64)
        apart = np.max(np.abs(x - y), initial=0.0)
        return apart / max(np.max(np.abs(x), initial=0.0), 1e-30)

    differences = jax.tree.map_with_path(difference, a, b)
    return max(jax.tree.leaves(differences))


def same_bits(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def replicas_are_identical(state: Any) -> bool:
    """Tell whether every device holds the same bits of the learner."""
    leaves = jax.tree.leaves(key_data((state.learner, state.run)))
    copies = [[np.asarray(shard.data).tobytes() for shard in x.addressable_shards] for x in leaves]
    return all(len(of_one) > 1 and len(set(of_one)) == 1 for of_one in copies)


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics without what a clock decides."""
    rows = read(Path(run_dir) / "metrics.jsonl")
    return [
        {name: value for name, value in row.items() if not name.startswith("time/")} for row in rows
    ]


def result_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((Path(run_dir) / "result.json").read_text())


def calls_of_gae(monkeypatch: Any, args: Any, critic: type, updates: int) -> list[list[np.ndarray]]:
    """Reward, value (not of PQN), next_value, terminated and truncated of every call, in episodes
    of every end.
    """
    algorithm = module_of(args)
    calls = []
    name, network, count = (
        ("gae", "Critic", 5) if algorithm is not pqn else ("q_lambda_returns", "QNetwork", 4)
    )
    gae = getattr(algorithm, name)

    def recording(*given, **named):
        arrays_and_decays = [*given, *named.values()]
        jax.debug.callback(
            lambda *call: calls.append([np.asarray(x) for x in call]),
            *arrays_and_decays[:count],
        )
        return gae(*arrays_and_decays)

    monkeypatch.setattr(algorithm, name, recording)
    monkeypatch.setattr(algorithm, network, critic)
    args = dataclasses.replace(
        args,
        num_steps=16,
        update_epochs=1,
        num_minibatches=1,
    )
    args.normalize_returns = False  # the critic knows the values themselves
    run_updates(args, make_env("Endings"), 1, updates)
    jax.effects_barrier()
    assert len(calls) == updates * args.num_seeds
    assert any(truncated[-1].any() for *_, truncated in calls)  # also in the last step of a rollout
    return calls


def compiled_updates(monkeypatch: Any) -> list[Any]:
    """The updates of the runs to come, as they were compiled."""
    updates = []
    compile_together = pmaprl.runs.run.compile_together

    def noting(*inputs):
        programs = compile_together(*inputs)
        updates.append(programs.update)
        return programs

    monkeypatch.setattr(pmaprl.runs.run, "compile_together", noting)
    return updates


class Watch:
    """A record of what a run compiled, and of the bytes that its arrays held after each chunk."""

    def __init__(self, monkeypatch):
        self.compiled = []
        self.steps = []
        self.bytes = []
        advance = Run.advance

        def watched(run, state, *report):
            advance(run, state, *report)
            self.steps.append(run.steps)
            self.bytes.append(sum(x.nbytes for x in jax.live_arrays()))

        monkeypatch.setattr(Run, "advance", watched)

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *error):
        jax.monitoring.unregister_event_duration_listener(self._on_event)

    def _on_event(self, event, seconds, **more):
        if event == "/jax/core/compile/backend_compile_duration":
            self.compiled.append((more.get("fun_name"), len(self.steps)))


# -------------------------------------------------------------------------------------------------
# toy environments


@struct.dataclass
class ToyState(environment.EnvState):
    time: jax.Array
    episode: jax.Array


@struct.dataclass
class ToyParams(environment.EnvParams):
    max_steps_in_episode: int = 7


class Toy(environment.Environment):
    """Observes (episode id, step); every episode is truncated after `max_steps_in_episode` steps of
    reward 2.5.
    """

    parameters = ToyParams()
    observations = Box(
        low=-np.inf,
        high=np.inf,
        shape=(2,),
        dtype=jnp.float32,
    )
    actions = Discrete(3)

    @property
    def default_params(self):
        return self.parameters

    def observation_space(self, params):
        return self.observations

    def action_space(self, params=None):
        return self.actions

    def reset_env(self, key, params):
        episode = jax.random.randint(key, (), 0, 3 * 1000)
        state = ToyState(time=jnp.int32(0), episode=episode)
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        state = state.replace(time=state.time + 1)
        return (
            self.get_obs(state),
            state,
            self.reward(state, action),
            self.is_terminated(state, params),
            {},
        )

    def get_obs(self, state, params=None, key=None):
        return jnp.stack([state.episode, state.time]).astype(jnp.float32)

    def reward(self, state, action):
        return jnp.float32(2.5)

    def is_terminated(self, state, params):
        return jnp.bool_(False)


class Chatty(Toy):
    """Tells the step in its info, and at the end of an episode ten times that; what is no number,
    too.
    """

    def step_env(self, key, state, action, params):
        obs, state, *rest, info = super().step_env(key, state, action, params)
        is_last = state.time == params.max_steps_in_episode
        end = jnp.where(is_last, 10.0 * state.time, jnp.nan)
        more = {"time": state.time, "end": end, "end_last": state.time == 2, "all": obs}
        return (
            obs,
            state,
            *rest,
            info | more,
        )


class ChattyReset(Chatty):
    """A `Chatty` whose `step` is its own."""

    def step(self, key, state, action, params=None):
        return super().step(key, state, action, params)


class Endings(Toy):
    """Episodes of 3, 4 or 5 steps by id, ended by termination (id % 3 == 0), truncation (1) or both
    at once (2).
    """

    def over(self, state):
        return state.time >= 3 + state.episode // 3 % 3

    def is_terminated(self, state, params):
        return self.over(state) & (state.episode % 3 != 1)

    def is_truncated(self, state, params):
        return self.over(state) & (state.episode % 3 != 0)

    def reward(self, state, action):
        return state.episode % 7 + 0.5 * state.time


class Luck(Endings):
    """Rewards depend on the action and on the key of the step, too."""

    def step_env(self, key, state, action, params):
        obs, state, reward, *rest = super().step_env(key, state, action, params)
        return obs, state, reward + action + jax.random.uniform(key), *rest


class RewardIsEpisode(Toy):
    """The return of an episode is known from its first observation alone."""

    def reward(self, state, action):
        return state.episode.astype(jnp.float32)


class Endless(Toy):
    """Never ends, and declares no time limit."""

    parameters = environment.EnvParams(max_steps_in_episode=0)

    def is_truncated(self, state, params):
        return jnp.bool_(False)


class TwoDials(Toy):
    """MultiDiscrete actions: reward for the first dial at 1 and the second at 2."""

    actions = Tuple([Discrete(2), Discrete(3)])

    def get_obs(self, state, params=None, key=None):
        angle = state.episode + 0.3 * state.time
        return jnp.stack([jnp.sin(angle), jnp.cos(0.7 * state.time)])

    def reward(self, state, action):
        return (action[0] == 1) + 0.5 * (action[1] == 2)


@struct.dataclass
class KeyedState(ToyState):
    key: jax.Array  # a typed PRNG key


class KeyInState(Toy):
    """Keeps a typed PRNG key in its state and draws its observations from it."""

    def reset_env(self, key, params):
        state = KeyedState(
            time=jnp.int32(0),
            episode=jnp.int32(0),
            key=jax.random.fold_in(key, 1),
        )
        return self.get_obs(state), state

    def step_env(self, key, state, action, params):
        state = state.replace(key=jax.random.fold_in(state.key, state.time))
        return super().step_env(key, state, action, params)

    def get_obs(self, state, params=None, key=None):
        return jax.random.normal(state.key, (2,))


class Pusher(Toy):
    """Box actions within [-1, 0.5]; the reward is the action that arrives."""

    actions = Box(low=-1.0, high=0.5, shape=(1,), dtype=jnp.float32)

    def reward(self, state, action):
        return jnp.sum(action)


class Blink(Toy):
    """Small observations; every second step ends an episode by termination."""

    def get_obs(self, state, params=None, key=None):
        numbers = [jnp.sin(state.episode), jnp.cos(state.time)]
        return jnp.stack(numbers).astype(jnp.float32)

    def reward(self, state, action):
        return 0.5 * action - 0.3

    def is_terminated(self, state, params):
        return state.time >= 2


class Poison(Toy):
    """The reward is NaN from step 41 of an episode on."""

    parameters = ToyParams(max_steps_in_episode=100)

    def reward(self, state, action):
        return jnp.where(state.time > 40, jnp.nan, 1.0)


class Pixels(Toy):
    """Observes a small image of bytes."""

    observations = Box(
        low=0,
        high=255,
        shape=(5, 6, 2),
        dtype=jnp.uint8,
    )

    def get_obs(self, state, params=None, key=None):
        return jnp.full((5, 6, 2), 10 * state.time, jnp.uint8)


class Hybrid(Toy):
    """Actions of a choice and a vector: reward for the right choice, and for a vector near (1,
    -1).
    """

    actions = Tuple([Discrete(3), Box(low=-2.0, high=2.0, shape=(2,), dtype=jnp.float32)])

    def reward(self, state, action):
        choice, vector = action
        return (choice == state.time % 3) - 0.1 * jnp.sum(
            jnp.square(vector - jnp.array([1.0, -1.0]))
        )


class Parts(Toy):
    """Observes a dictionary of an image of bytes, of a tuple of numbers and a choice, and of
    nothing else.
    """

    observations = Dict(
        {"picture": Pixels.observations, "body": Tuple((Toy.observations, Discrete(3)))}
    )

    def get_obs(self, state, params=None, key=None):
        numbers = jnp.stack([jnp.sin(state.episode), 100.0 + state.time])
        picture = jnp.full((5, 6, 2), 10 * state.time, jnp.uint8)
        return {"picture": picture, "body": (numbers.astype(jnp.float32), state.time % 3)}

    def reward(self, state, action):
        return jnp.where(action == state.time % 3, 1.0, 0.0)


class Fussy(Toy):
    """An environment in which every step changes which of three actions are legal; any other is
    worth -100.
    """

    observations = Dict(
        {"obs": Toy.observations, "action_mask": Box(low=0, high=1, shape=(3,), dtype=jnp.bool_)}
    )

    def legal(self, state):
        return jnp.stack(
            [state.time % 2 == 0, state.time % 2 == 1, (state.time + state.episode) % 3 == 0]
        )

    def get_obs(self, state, params=None, key=None):
        return {"obs": super().get_obs(state), "action_mask": self.legal(state)}

    def step_env(self, key, state, action, params):
        legal = self.legal(state)[action]
        obs, state, _, *rest = super().step_env(key, state, action, params)
        return obs, state, jnp.where(legal, 1.0, -100.0), *rest


@struct.dataclass
class BribeParams(ToyParams):
    bonus: float = 2.0


class Bribe(Toy):
    """Pays what its parameter says, whatever one does."""

    parameters = BribeParams()

    def step_env(self, key, state, action, params):
        obs, state, _, *rest = super().step_env(key, state, action, params)
        return obs, state, jnp.float32(params.bonus), *rest


class BribedEndings(Endings):
    """`Endings` with a bribe on top of what it pays; it is seen, too."""

    parameters = BribeParams()

    def step_env(self, key, state, action, params):
        obs, state, reward, *rest = super().step_env(key, state, action, params)
        return obs + params.bonus, state, reward + params.bonus * state.time, *rest


def make_env(name: str, env_params: str = "") -> Env:
    """A gymnax id, or the name of a toy class of this module."""
    return wrap(globals()[name](), env_params) if name in globals() else make(name, env_params)


# --------------------------------------------------------------------------------------------------
# trained runs

TINY = {
    "total_timesteps": 256,
    "checkpoint_interval": 128,
    "eval_interval": 128,
    "hidden_sizes": (8,),
}
TINY_SAC = {
    "total_timesteps": 64,
    "learning_starts": 16,
    "hidden_sizes": (64, 64),
}
TRAINED = {
    "normalized": small_args(normalize_obs=True, num_seeds=2, **TINY),
    "box": small_args(env="helpers:Pusher", **TINY),
    "one-hot": small_args(env="FrozenLake-misc", **TINY),
    "memory": small_rnn_args(env="helpers:Endings", obs_prev_action_reward=True, **TINY),
    "hybrid": small_args(env="helpers:Hybrid", **TINY),
    "parts": small_args(env="helpers:Parts", normalize_obs=True, **TINY),
    "q": small_pqn_args(env="helpers:Parts", rnn="gru", rnn_size=8, normalize_obs=True, **TINY),
    "sac": small_sac_args(**TINY_SAC | {"recipe": "crossq", "critic_hidden_sizes": (8,)}),
    "sac discrete": small_sac_args(**TINY_SAC | {"env": "CartPole-v1"}),
    "dqn": small_dqn_args(**TINY_SAC | {"env": "helpers:Parts", "distribution": "qr"}),
}


def train_tiny(name: str, run_dir: Path) -> tuple[Path, Env, Any]:
    """Run directory, environment and result of one of TRAINED."""
    args = dataclasses.replace(TRAINED[name], run_dir=str(run_dir))
    return run_dir, make(args.env), module_of(args).train(args)
