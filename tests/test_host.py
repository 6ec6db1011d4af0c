"""Environments on the host, actors, queues and parameter slots, and what happens when they fail."""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import host_toys
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_helpers import (
    ROOT,
    checkpoint_steps,
    read_until,
    run_python,
    start_script,
    succeed,
)
from helpers import only_acts, result_of, same_bits
from host_helpers import TOY, TOYS
from numpy.testing import assert_array_equal
from test_appo import rows, small_args, train

import pmaprl.actors.host_evaluation
import pmaprl.actors.threads
from pmaprl import play
from pmaprl.actors.actor import Actor, Stepper, inspect_env
from pmaprl.actors.batches import ActorsFailed, Batches
from pmaprl.actors.host_evaluation import HostEvaluation, run_host_episodes
from pmaprl.actors.threads import (
    GRACE,
    Activity,
    Collected,
    ParameterSlots,
    RolloutQueue,
    Slot,
    Worker,
)
from pmaprl.cli.env_flags import read_params
from pmaprl.cli.errors import FailedEnvError, TrainingError, UsageError
from pmaprl.device.agents import Player
from pmaprl.device.evaluation import SEED
from pmaprl.envs.host import evaluation_params
from pmaprl.envs.numbers import cast
from pmaprl.envs.registry import make_host
from pmaprl.envs.spaces import Box, Discrete, EnvSpec, clip, convert, map_leaves
from pmaprl.policies.policy import Policy
from pmaprl.suites.gymnasium import SuiteEnv
from pmaprl.suites.tools.checked import _element, _number, of_each, true_of_each
from pmaprl.suites.tools.conversion import Conversion
from pmaprl.suites.tools.processes import Processes

SCRIPT = ROOT / "algos" / "appo_pmap.py"


def steps(name: str, count: int, **more: Any) -> tuple[Any, list[Any]]:
    """The first observations, and what `count` steps with action 0 or zeros return."""
    envs = make_host(name, num_envs=2, seed=3, **more)
    shape = (2, *envs.spec.action_space.shape)
    action = np.zeros(shape, np.int32)
    first = envs.reset()
    outputs = [envs.step(action) for _ in range(count)]
    envs.close()
    return first, outputs


def trouble(folder: Path, **more: Any) -> str:
    return json.dumps({"once": str(folder / "once"), **more})


def wait_until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """All processes below `pid`."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    below = [int(word) for file in files for word in file.read_text().split()]
    return below + [process for child in below for process in children(child)]


def runs(pid: int) -> bool:
    """Tell whether there is such a process, one that has ended and that nobody has asked about left
    aside.
    """
    with suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


# --------------------------------------------------------------------------------------------------
# environments


@pytest.mark.parametrize("vectorization", ["async", "sync"])
def test_a_last_observation_outlives_a_reset_that_writes_into_the_same_array(vectorization):
    plain, reused = (
        steps(f"{TOYS}{name}-v0", 8, vectorization=vectorization)[1]
        for name in ("Toy", "OneArrayToy")
    )
    assert plain[6].truncated.all()
    for out, other in zip(plain, reused, strict=True):
        assert_array_equal(out.obs, other.obs)
        assert_array_equal(out.final_obs, other.final_obs)


@pytest.mark.parametrize("names", [["a..b"], ["\x1b[31m"], ["a\nb"]], ids=str)
def test_names_of_parts_that_a_checkpoint_could_not_keep_are_refused(names):
    leaf = gymnasium.spaces.Box(0, 1, (2,))
    for kind in ("observation space", "action space"):
        with pytest.raises(ValueError, match="printable"):
            convert(gymnasium.spaces.Dict(dict.fromkeys(names, leaf)), kind)


@pytest.mark.parametrize("inner", ["Dict", "Tuple"])
def test_parts_of_one_name_are_refused(inner):
    leaf = gymnasium.spaces.Box(0, 1, (2,))
    part, name = {
        "Dict": (gymnasium.spaces.Dict({"b": leaf}), "a/b"),
        "Tuple": (gymnasium.spaces.Tuple((leaf, leaf)), "a/1"),
    }[inner]
    nested = gymnasium.spaces.Dict({"a": part, "b": leaf, "/c": leaf})
    assert convert(nested, "observation space")
    with pytest.raises(ValueError, match=name):
        convert(gymnasium.spaces.Dict({"a": part, name: leaf}), "observation space")


def test_a_space_of_one_of_several_is_refused():
    box = gymnasium.spaces.Box(0, 1, (1,))
    parts = (gymnasium.spaces.Discrete(2), box)
    space = gymnasium.spaces.OneOf(parts)
    for kind in ("observation space", "action space"):
        with pytest.raises(ValueError, match="not supported"):
            convert(space, kind)


@pytest.mark.parametrize(("vectorization", "terminates"), [("async", False), ("sync", True)])
def test_a_reset_within_the_step_leaves_the_final_observation_and_its_numbers(
    vectorization, terminates
):
    params = json.dumps({"terminates": terminates})
    first, outputs = steps(
        TOYS + "ChattyToy-v0",
        8,
        vectorization=vectorization,
        env_params=params,
    )
    episode = first[:, 0]
    for number, out in enumerate(outputs, 1):
        time = number - 7 * (number > 7)
        assert out.valid.all()
        assert (out.truncated == (number == 7 and not terminates)).all()
        assert (out.terminated == (number == 7 and terminates)).all()
        final = np.stack([episode + (number > 7), [time] * 2], 1)
        assert_array_equal(out.final_obs, final)
        assert_array_equal(out.obs[:, 1], [number % 7] * 2)
        assert out.numbers("time").tolist() == [time] * 2
        assert out.numbers("even").tolist() == [time % 2 == 0] * 2
        expected = [70] * 2 * (number == 7)
        assert out.numbers("end").tolist() == expected
        assert not len(out.numbers("all"))
        assert not len(out.numbers("text"))
    assert_array_equal(outputs[6].obs[:, 0], episode + 1)
    assert len(set(episode)) == 2


@pytest.mark.parametrize("name", ["envpool:CartPole-v1", "gymnasium:CartPole-v1"])
def test_a_reset_in_a_step_of_its_own_is_not_valid(name):
    first, outputs = steps(name, 12, env_params='{"max_episode_steps": 5}', vectorization="vector")
    if "envpool" in name:  # numbers in infos are those of valid steps
        counts = [len(out.numbers("elapsed_step")) for out in outputs[:7]]
        assert counts == [2, 2, 2, 2, 2, 0, 2]
    assert all(out.final_obs is None for out in outputs)
    truncated = [out.truncated.all() for out in outputs]
    assert_array_equal(truncated, [i % 6 == 4 for i in range(12)])
    valid = [out.valid.all() for out in outputs]
    assert_array_equal(valid, [i % 6 != 5 for i in range(12)])
    assert (outputs[5].reward == 0).all()
    assert (np.abs(outputs[5].obs) <= 0.05).all()  # where CartPole begins
    assert (np.abs(outputs[4].obs) > 0.05).any()  # the true next observation
    assert (np.abs(first) <= 0.05).all()


OF_ACTIONS = {
    "column": gymnasium.spaces.MultiDiscrete(np.array([[2], [3]])),
    "switches": gymnasium.spaces.MultiBinary((2, 2)),
    "bytes": gymnasium.spaces.MultiDiscrete([2, 3], dtype=np.int8),
    "tenth": gymnasium.spaces.Box(-0.1, 0.1, (2,), np.float64),
    "half": gymnasium.spaces.Box(-0.1, 0.1, (), np.float16),
    "whole": gymnasium.spaces.Box(-7, 200, (3,), np.int64),
    "pixels": gymnasium.spaces.Box(0, 255, (2, 2), np.uint8),
    "fixed": gymnasium.spaces.Box(np.array([0.5, -1.0]), np.array([0.5, 1.0]), dtype=np.float64),
    "parts": gymnasium.spaces.Dict(
        {
            "a": gymnasium.spaces.Tuple(
                (gymnasium.spaces.Box(-0.3, 0.7, (2, 1), np.float64), gymnasium.spaces.Discrete(3))
            )
        }
    ),
}


@pytest.mark.parametrize("space", OF_ACTIONS.values(), ids=OF_ACTIONS)
def test_actions_are_elements_of_the_declared_space_at_the_environment_and_from_a_policy(space):
    """Networks may give anything: numbers far beyond all bounds, and every choice."""
    conversion = Conversion("odd", gymnasium.spaces.Discrete(2), space)
    text = json.dumps(conversion.spec.to_json())
    ours = EnvSpec.from_json(json.loads(text))

    def act(learner, obs, key):
        def chosen(leaf):
            if isinstance(leaf, Box):
                count = 4 * math.prod(leaf.shape)
                return jnp.linspace(-999.0, 999.0, count).reshape(4, -1)
            bounds = [jnp.array([0, n - 1, n - 1, 0]) for n in leaf.nvec]
            picks = jnp.stack(bounds, axis=-1)
            return picks[:, 0] if isinstance(leaf, Discrete) else picks

        return map_leaves(chosen, ours.action_space)

    raw = act(None, None, None)
    batched = gymnasium.vector.utils.batch_space(space, 4)
    converted = conversion.actions(jax.device_get(raw))
    at_environment = list(gymnasium.vector.utils.iterate(batched, converted))
    algorithm = only_acts(act)
    from_policy = Policy(algorithm, (), ours)(np.zeros(4, int))
    assert len(at_environment) == 4
    for index, action in enumerate(at_environment):
        whole = jax.tree.map(np.asarray, action)
        assert space.contains(whole), action
        assert space.contains(jax.tree.map(lambda x: np.asarray(x[index]), from_policy))
        dtypes = jax.tree.map(lambda x: x.dtype, whole)
        assert dtypes == jax.tree.map(
            lambda x: np.asarray(x).dtype,
            space.sample(),
        )


def test_actions_are_shaped_clipped_and_cast():
    whole = Conversion(
        "whole",
        gymnasium.spaces.Discrete(2),
        gymnasium.spaces.Box(0, 5, (1,), np.int32),
    )
    numbers = np.array([[-0.2], [0.4], [0.6], [4.8], [9.0]], np.float32)
    actions = whole.actions(numbers)
    assert actions.dtype == np.int32 and actions.ravel().tolist() == [0, 0, 1, 5, 5], (
        "the nearest ones"
    )
    for name, action, reward in (
        (TOYS + "BoxToy-v0", np.float32([[-9, 9, 0.5, 0.25]] * 2), [-2 + 1 + 0.75] * 2),
        (TOYS + "MultiToy-v0", np.array([[1, 2], [0, 1]]), [21, 10]),
        (TOYS + "HybridToy-v0", (np.array([2, 1]), np.float32([[-9, 9]] * 2)), [2 - 0.5, 1 - 0.5]),
        ("envpool:Pendulum-v1", np.full((2, 1), 7, np.float32), None),
    ):
        with closing(make_host(name, 2, 0, vectorization="sync")) as envs:
            first = envs.reset()
            out = envs.step(action)
        assert out.obs.shape == first.shape
        assert reward is None or out.reward.tolist() == pytest.approx(reward)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
@pytest.mark.parametrize("numpy", [np, jnp])
def test_an_action_does_not_become_infinite_in_its_type(dtype, numpy):
    unbounded = convert(gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float16), "action space")
    space = unbounded._replace(dtype=np.dtype(dtype))
    huge = numpy.asarray(np.float32([[-3e38, 1e6, 3.4e38]]))
    action = clip(huge, space, (1,), numpy)
    assert action.dtype == dtype
    assert np.isfinite(np.asarray(action, np.float32)).all()
    assert np.sign(np.asarray(action, np.float32)).tolist() == [[-1, 1, 1]]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("params", ["", '{"at_resets": true}'])
def test_a_mask_that_the_first_reset_lacks_is_refused(vectorization, params):
    name = f"{TOYS}LateToy-v0"
    how = {"env_params": params, "vectorization": vectorization}
    with closing(make_host(name, 2, 0, **how)) as envs:
        assert isinstance(envs.spec.observation_space, Box)
        envs.reset()
        action = np.zeros(2, np.int32)
        with pytest.raises(FailedEnvError, match="action_mask.*return it from every reset"):
            for _ in range(7 + 1):
                envs.step(action)


@pytest.mark.parametrize("params", ["", '{"at_resets": true}'])
def test_masks_in_infos_of_a_suite_that_vectorizes_itself_are_refused(params):
    def played(params):
        name = f"{TOYS}TellingToys-v0"
        with closing(make_host(name, 2, 0, env_params=params, vectorization="vector")) as envs:
            envs.reset()
            assert not params, "refused before"
            envs.step(np.zeros(2, np.int32))

    with pytest.raises(FailedEnvError, match="take --vectorization sync"):
        played(params)


def test_atari_frames_have_their_channels_last():
    envpool = pytest.importorskip("envpool")
    envs = make_host("envpool:Pong-v5", 1, 5)
    raw = envpool.make(
        "Pong-v5",
        env_type="gymnasium",
        num_envs=1,
        seed=5,
    )
    picture = np.moveaxis(raw.reset()[0][0], 0, -1)
    assert_array_equal(envs.reset()[0], picture)
    for action in (2, 3, 2, 2):
        obs = envs.step(np.array([action])).obs
        frames = raw.step(np.array([action]))[0]
        picture = np.moveaxis(frames[0], 0, -1)
        assert_array_equal(obs[0], picture)
    assert obs.shape[1:] == envs.spec.observation_space.shape == (84, 84, 4)
    assert obs.dtype == envs.spec.obs_dtype == np.uint8


class NeverBegins:
    """A maker that hangs while another process reads it."""

    __call__ = host_toys.Toy

    def __reduce__(self):
        return time.sleep, (1e6,)


def test_a_process_that_never_begins_is_given_up():
    with pytest.raises(FailedEnvError, match="--reset-timeout"):
        Processes(
            NeverBegins(),
            1,
            reset_timeout=0.1,
            step_timeout=None,
        )


@pytest.mark.parametrize(
    ("end", "trouble", "message"),
    [
        ("close", "hang_at", "--step-timeout"),
        ("close", "raise_odd_at", "odd trouble"),
        ("close", "exit_at", "exit code 7"),
        ("kill", "", ""),
    ],
)
def test_what_an_environment_has_started_ends_with_it(end, trouble, message, tmp_path):
    """Also once it hangs, has ended, or has raised an error that cannot be sent to another
    process.
    """
    given = {"simulator": str(tmp_path / "simulator"), trouble or "limit": 1}
    params = json.dumps(given)
    envs = make_host(TOYS + "Toy-v0", 1, 0, params, step_timeout=2.0)
    envs.reset()
    simulator = int((tmp_path / "simulator").read_text())
    wait_until(lambda: runs(simulator))
    if trouble:
        with pytest.raises((FailedEnvError, RuntimeError), match=message):
            envs.step(np.zeros(1, int))
    getattr(envs, end)()
    wait_until(lambda: not runs(simulator))
    envs.close()
    assert not any(process.is_alive() for process in envs._inner.processes)


@pytest.mark.slow
def test_runs_may_be_in_processes_of_other_programs(tmp_path):
    """Processes of environments do not import the program, nor does the temporary folder of
    multiprocessing go.
    """
    program = tmp_path / "program.py"
    code = f"""
        import os, sys
        from multiprocessing import get_context, util
        sys.path.insert(0, {str(ROOT / "common")!r})
        print(__name__, flush=True)

        def run():
            from pmaprl.envs.registry import make_host
            envs = make_host("gymnasium:CartPole-v1", 2, 0)
            print(envs.reset().shape, flush=True)
            envs.close()

        if __name__ == "__main__":
            run()
            folder = util.get_temp_dir()
            process = get_context("spawn").Process(target=run)
            process.start()
            process.join()
            print(os.path.isdir(folder))
        """
    program.write_text(textwrap.dedent(code))
    done = run_python(program)
    wanted = ["__main__", "(2,", "4)", "__mp_main__", "(2,", "4)", "True"]
    assert done.stdout.split() == wanted, done.stderr


def test_evaluations_count_whole_games_unless_told_otherwise():
    for flags, wanted in (
        ({"env_params": '{"reward_clip": true}'}, {"reward_clip": False}),
        (
            {"env_params": '{"episodic_life": true}', "eval_env_params": '{"a": 1}'},
            {"episodic_life": False, "a": 1},
        ),
        ({"eval_env_params": '{"episodic_life": true}'}, {"episodic_life": True}),
        (
            {"env": "gymnasium:ale_py:ALE/Pong-v5", "vectorization": "vector"},
            {"reward_clipping": False},
        ),
        ({"env": "gymnasium:ale_py:ALE/Pong-v5", "vectorization": "async"}, {}),
    ):
        assert (
            read_params(evaluation_params({"env": "envpool:Pong-v5", "env_params": ""} | flags))
            == wanted
        )


# --------------------------------------------------------------------------------------------------
# slots and queues


def in_threads(*functions: Callable[[], None]) -> list[threading.Thread]:
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    return threads


def test_readers_see_whole_versions_only():
    """While others are published that are still being computed."""
    device = jax.devices()[0]
    wrong = []
    found = set()
    slots = ParameterSlots([device])
    tree = [jnp.zeros((100, 100)) for _ in range(4)]

    def slowly(tree):
        return jax.tree.map(lambda x: jnp.tanh(x @ x) * 0 + x + 1, tree)

    advance = jax.jit(slowly)
    slots.publish(0, tree)

    def read():
        last = 0
        while last < 39 and not wrong:
            version, params = slots.latest(device)
            if {float(x[i, i]) for x in params for i in (0, -1)} != {
                float(version)
            } or version < last:
                wrong.append(version)
            last = version
            found.add(last)

    readers = in_threads(read, read, read)
    for version in range(1, 40):
        tree = advance(tree)
        slots.publish(version, tree)
    for reader in readers:
        reader.join(timeout=100)
    assert 39 in found
    assert not wrong
    assert slots.wait_for(39, device, 0).version == 39
    assert slots.wait_for(40, device, 0.01) is None


def test_the_queue_loses_nothing():
    queue = RolloutQueue()
    stop = threading.Event()

    def produce(actor):
        for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
            queue.put(Collected(actor, number, []), stop.is_set)

    producers = in_threads(*(partial(produce, actor) for actor in range(3)))
    seen = {actor: [] for actor in range(3)}
    for turn in range(121):
        wanted = turn % 3 if turn < 60 else None
        collected = queue.take(wanted, 5.0)
        assert wanted in (None, collected.actor)
        seen[collected.actor].append(collected.rollout)
        if turn % 2:
            queue.train(2)
        counts = queue.counts
        assert counts.pop("produced") == sum(counts.values())
        assert counts["waiting"] <= 3
    wait_until(lambda: queue.counts["waiting"] == 3)
    stop.set()
    for producer in producers:
        producer.join()
    queue.discard()
    assert queue.counts == {
        "produced": 127,
        "trained": 120,
        "discarded": 7,
        "waiting": 0,
        "held": 0,
    }
    assert all(numbers == list(range(len(numbers))) for numbers in seen.values())


# --------------------------------------------------------------------------------------------------
# actors


def actor_on(name: str, **more: Any) -> Actor:
    def act(params, memory, key, step, seen):
        memory = np.where(seen.first, 0, memory) + 1
        return (
            np.full(len(memory), params % 3, np.int32),
            {"step": np.full(len(memory), step)},
            memory,
        )

    args = small_args(env=name, envs_per_actor=2, num_steps=6, **more)
    return Actor(0, None, args, act, memory=np.zeros(2), version=0)


def collect(actor: Actor, count: int) -> list[Collected]:
    versions = itertools.count()
    actor.start()
    found = [actor.collect(lambda slot: Slot(next(versions), 1)) for _ in range(count)]
    actor.close()
    return found


def test_rollouts_hang_together():
    parts = collect(actor_on(TOYS + "Toy-v0", vectorization="sync"), 4)
    rollouts = [part.rollout for part in parts]
    for before, after in itertools.pairwise(rollouts):
        assert_array_equal(before.obs[-1], after.obs[0])

    def joined(*x):
        return np.concatenate(x)

    whole = jax.tree.map(joined, *rollouts)
    limits = [step % 7 == 6 for step in range(24)]
    assert_array_equal(whole.truncated[:, 0], limits)
    times = [step % 7 + 1 for step in range(24)]
    assert_array_equal(whole.final_obs[:, 0, 1], times)
    assert_array_equal(whole.version[:, 0], np.arange(24))
    assert_array_equal(whole.extras["step"][:, 0], np.arange(24))
    assert_array_equal(whole.memory[:, 0], [0, 6, 5, 4])
    episodes = [part.episodes for part in parts]
    assert episodes == [[], *[[(7, 7), (7, 7)]] * 3]


@pytest.mark.parametrize(
    ("vectorization", "toy", "rest", "first", "later"),
    [
        ("sync", "TellingToy", {"obs"}, [[0, 1, 1]], [[1, 0, 1]]),
        (
            "async",
            "TellingGoalToy",
            {"achieved", "desired"},
            [[1, 1], [0, 1, 0]],
            [[1, 0], [0, 0, 1]],
        ),
    ],
)
def test_masks_in_infos_and_parts_of_final_observations_are_observed(
    vectorization, toy, rest, first, later
):
    def mask(obs):
        masks = jax.tree.leaves(obs["action_mask"])
        found = [part.tolist() for part in masks]
        assert all(of_one == of_other for of_one, of_other in found)
        return [of_one for of_one, _ in found]

    with closing(make_host(f"{TOYS}{toy}-v0", 2, 0, vectorization=vectorization)) as envs:
        assert set(envs.spec.observation_space) == {"action_mask", *rest}
        begun = envs.reset()
        outputs = [envs.step(np.zeros((2, *envs.spec.action_space.shape), int)) for _ in range(7)]
    assert mask(begun) == mask(outputs[6].obs) == first
    assert all(mask(out.obs) == later for out in outputs[:6])
    assert outputs[6].truncated.all()
    of_ends = mask(outputs[6].final_obs)
    assert all(set(part) == {1} for part in of_ends), "where nobody acts"
    part, sign = ("obs", 1) if "obs" in rest else ("desired", -1)
    assert begun[part][:, 1].tolist() == outputs[6].obs[part][:, 1].tolist() == [0.0, 0.0]
    final = outputs[6].final_obs[part]
    assert final[:, 1].tolist() == [7.0 * sign] * 2


@pytest.mark.parametrize("toy", ["Toy", "ReusingToys"])
def test_evaluations_remember_exactly_one_episode(toy):
    """The memory is the number of steps since it was emptied, held against the number that is
    observed.
    """
    seen_and_counted = []

    def act(seen, memory, keys):
        memory = np.where(seen.first, 0, memory)
        pairs = zip(seen.obs[:, -1], memory, strict=True)
        seen_and_counted.extend(pairs)
        return np.zeros(2, int), memory + 1

    with closing(
        make_host(f"{TOYS}{toy}-v0", 2, 0, vectorization="sync" if toy == "Toy" else "vector")
    ) as envs:
        episodes = run_host_episodes(
            Worker("test", envs=envs),
            envs,
            Player(lambda count: np.zeros(count, int), act),
            7,
        )
    # As many of each environment, or one more; those of one environment are the same
    if toy == "ReusingToys":
        assert episodes.ret.tolist() == episodes.length.tolist() == [3, 3, 3, 3, 5, 5, 5]
    acting = [pair for pair in seen_and_counted if pair[0] != 100]
    assert len(acting) > 15
    assert all(seen == counted for seen, counted in acting)


def test_actors_copy_reused_arrays_and_count_no_step_that_only_resets():
    parts = collect(actor_on(TOYS + "ReusingToys-v0", vectorization="vector"), 2)
    lengths = [part.episodes for part in parts]
    assert lengths == [[(3, 3), (5, 5)], [(3, 3), (3, 3), (5, 5)]]
    rollout = parts[0].rollout
    assert rollout.obs[:, 0, 0].tolist() == [0, 1, 2, 100, 0, 1, 2]
    assert rollout.terminated[:, 0].tolist() == [False, False, True, False, False, False]
    valid = rollout.valid[:, 0].tolist()
    assert valid == [True, True, True, False, True, True]


def test_a_worker_beyond_its_limit_is_stuck():
    args = small_args(learner_timeout=1, reset_timeout=10, step_timeout=20)
    worker = Worker("actor 3")

    def busy(phase: str, seconds: float) -> str | None:
        worker.activity = Activity(phase, time.monotonic() - seconds)
        return worker.stuck(args)

    for phase, flag, limit in (
        ("reset", "reset", 10),
        ("env_step", "step", 20),
        ("act", "learner", 1),
    ):
        assert busy(phase, limit + GRACE - 1) is None
        assert busy(phase, limit + GRACE + 1) == f"--{flag}-timeout {limit}"
        assert str(worker) == f"actor 3: {phase} for {limit + GRACE + 1:.1f} s"
    assert busy("wait_put", GRACE + 2) is None


def test_a_worker_that_has_waited_for_long_is_not_stuck_in_what_comes_next(monkeypatch):
    """Whoever watches may look between any two attributes that the worker stores."""
    args = small_args(learner_timeout=1, step_timeout=1)
    worker = Worker("actor 0")
    looks = []

    def store(worker, name, value):
        object.__setattr__(worker, name, value)
        looks.append(worker.stuck(args))

    monkeypatch.setattr(Worker, "__setattr__", store)
    with worker.doing("wait_put"):
        later = time.monotonic() + 1e3
        monkeypatch.setattr(time, "monotonic", lambda: later)
    with worker.doing("env_step"):
        assert len(looks) >= 3
        assert not any(looks)


# --------------------------------------------------------------------------------------------------
# faults


@pytest.mark.parametrize(
    ("given", "field", "taken"),
    [
        ({"reward": [2.5]}, "reward", 2.5),
        ({"reward": True}, "reward", 1.0),
        ({"terminated": [1], "truncated": 0.0}, "terminated", True),
        ({"truncated": [True]}, "truncated", True),
        ({"obs": [3, 4]}, "obs", [3.0, 4.0]),
    ],
)
def test_what_an_environment_gives_is_taken_as_numbers_where_it_is_such(given, field, taken):
    _, outputs = steps(
        TOYS + "OddToy-v0",
        1,
        vectorization="sync",
        env_params=json.dumps(given),
    )
    found = outputs[0].final_obs if field == "obs" else getattr(outputs[0], field)
    assert found.tolist() == [taken] * 2
    assert found.dtype == (bool if isinstance(taken, bool) else np.float32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward": [1.0, 2.0]}, r"\(2,\)"),
        ({"reward": None}, "None"),
        ({"reward": "1.0"}, "'1.0'"),
        ({"terminated": None}, "terminated.*None"),
        ({"truncated": "False"}, "truncated.*'False'"),
        ({"truncated": 0.5}, "truncated.*0.5"),
        ({"obs": [1.0]}, r"\(1,\) instead of \(2,\)"),
        ({"obs": [[1.0], [1.0, 2.0]]}, "array"),
        ({"obs": None}, "None"),
        ({"info": None}, "dictionary"),
        ({"outputs": 4}, "4 instead of the 5"),
        ({"old_reset": True}, "reset .*2 values"),
        ({"raise_at": 1}, "host_toys.py, line"),
    ],
    ids=str,
)
def test_what_an_environment_gives_and_nobody_can_use_is_refused_before_the_run_begins(
    given, message
):
    toy = "Toy" if "raise_at" in given else "OddToy"
    with pytest.raises(UsageError, match=message):
        inspect_env(small_args(env=f"{TOYS}{toy}-v0", env_params=json.dumps(given)))


@pytest.mark.parametrize(
    "reward",
    [
        np.ma.masked,
        np.ma.array([1.5], mask=[True]),
        memoryview(b"a"),
        b"a",
        np.timedelta64(5, "s"),
        1j,
    ],
    ids=lambda reward: type(reward).__name__,
)
def test_a_reward_that_only_looks_like_a_number_is_refused(reward):
    with pytest.raises(FailedEnvError):
        _number(reward, "the reward")


def test_an_observation_that_leaves_numbers_out_is_refused():
    space = gymnasium.spaces.Box(-1, 1, (2,))
    found = _element(space, np.ma.array([0.5, 1.0]), "obs")
    assert found.tolist() == [0.5, 1.0]
    with pytest.raises(FailedEnvError, match="out"):
        hidden = np.ma.array([0.5, 1.0], mask=[True, False])
        _element(space, hidden, "obs")


def test_bytes_that_an_environment_gives_as_other_numbers_are_kept_or_refused():
    space = gymnasium.spaces.Box(0, 255, (2,), np.uint8)
    kept = _element(space, np.array([3.0, 255.0]), "obs")
    assert kept.dtype == np.uint8
    assert kept.tolist() == [3, 255]
    for wrong in (
        [0.5, 1.0],
        [0, 256],
        [-1, 0],
        [np.nan, 0],
    ):
        with pytest.raises(FailedEnvError, match="uint8"):
            _element(space, np.array(wrong), "obs")
    for wrong in (3, -1):
        with pytest.raises(FailedEnvError, match="space"):
            _element(gymnasium.spaces.Discrete(3), wrong, "obs")


@pytest.mark.parametrize(
    "obs",
    [
        [[0.0, 0.0]] * 2,
        np.zeros((2, 2), complex),
        np.zeros((2, 2), "datetime64[s]"),
        np.array([["a", "b"]] * 2),
        np.zeros((2, 2), object),
        np.ma.array(np.zeros((2, 2)), mask=True),
    ],
    ids=range(6),
)
def test_observations_of_a_vector_environment_are_an_array_of_numbers(obs):
    stepper = object.__new__(Stepper)
    stepper._length = np.zeros(2, int)
    stepper._worker = SimpleNamespace(name="Odd-v0")
    with pytest.raises(FailedEnvError, match="not an array of numbers"):
        stepper._checked_part(jax.ShapeDtypeStruct((2,), np.float32), obs)


@pytest.mark.parametrize(
    "last",
    [np.zeros((1, 2)), np.zeros(1), [300, 0], [-1, 0], [np.nan, 0], [0.5, 0], ["a", "b"], [1j, 0]],
    ids=str,
)
def test_a_last_observation_of_a_vector_environment_is_not_cast_or_broadcast(last):
    envs = object.__new__(SuiteEnv)
    envs._env_id = "Odd-v0"
    like = np.zeros((3, 2), np.uint8)
    assert envs._fitting([255, 0], like).tolist() == [255, 0]
    with pytest.raises(FailedEnvError, match="final_obs"):
        envs._fitting(last, like)


def test_rewards_and_ends_of_a_vector_environment_are_one_of_each():
    rewards = of_each(np.ones((2, 1)), 2, "rewards")
    assert rewards.shape == (2,)
    flags = true_of_each([0, 1], 2, "terminated")
    assert flags.tolist() == [False, True]
    for values, what in (
        (np.ones(3), of_each),
        (None, of_each),
        ([0.5, 1], true_of_each),
    ):
        with pytest.raises(FailedEnvError):
            what(values, 2, "x")


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_of_infos_only_numbers_are_gathered(vectorization):
    """Each with its own value, whatever type it has in the first environment."""
    _, outputs = steps(TOYS + "RaggedToy-v0", 8, vectorization=vectorization)
    assert sorted(outputs[0].numbers("number")) == [0.5, 1.0]
    assert sorted(outputs[6].numbers("number")) == [0.5, 1.0], "at the end of an episode"
    assert not len(outputs[0].numbers("huge"))
    assert not len(outputs[0].numbers("path"))
    final = outputs[6].final_obs
    assert final[:, 1].tolist() == [7.0, 7.0]


def test_an_environment_that_hangs_at_the_first_look_is_given_up(tmp_path, monkeypatch):
    stuck = Worker.stuck
    hangs = (tmp_path / "once").exists
    monkeypatch.setattr(Worker, "stuck", lambda worker, limits: hangs() and stuck(worker, limits))
    monkeypatch.setattr(pmaprl.actors.threads, "GRACE", 0.0)
    args = small_args(env_params=trouble(tmp_path, hang_in_close=1), reset_timeout=0.1)
    with pytest.raises(TrainingError, match="--reset-timeout 0.1"):
        inspect_env(args)


REPLACING = (
    lambda: os.execv("/bin/true", ["true"]),
    lambda: os.execve("/bin/true", ["true"], {}),
    lambda: os.execl("/bin/true", "true"),
    lambda: os.execlpe("true", "true", {}),
    lambda: os.execvp("true", ["true"]),
)


def test_an_environment_cannot_end_the_program():
    with pytest.raises(UsageError, match=r"os._exit\(7\)"):
        inspect_env(small_args(env_params='{"exit_at": 1}'))
    for phase in ("make", "reset", "env_step", "close"):
        with pytest.raises(FailedEnvError, match="3"), Worker("actor 0").doing(phase):
            os._exit(3)
        for replace in REPLACING:
            words = pytest.raises(FailedEnvError, match="os.execve?.*true")
            with words, Worker("actor 0").doing(phase):
                replace()
    code = (
        "import os, pmaprl.actors.threads as t; w = t.Worker('a')\nwith w.doing('make'): "
        "pass\nos._exit(5)"
    )
    assert run_python("-c", code, cwd=ROOT).returncode == 5
    code = code.replace("os._exit(5)", "os.execlp('sh', 'sh', '-c', 'exit 6')")
    assert run_python("-c", code, cwd=ROOT).returncode == 6


@pytest.mark.parametrize(
    ("cause", "tracebacks"),
    [
        (FailedEnvError("too slow"), 0),
        (KeyError("mine"), 1),
        (None, 0),
    ],
)
def test_a_restart_says_in_one_line_what_is_no_fault_of_somebodys_code(cause, tracebacks):
    warnings = []
    error = UsageError("environment X cannot be made: why")
    error.__cause__ = cause
    batches = SimpleNamespace(
        _failures=itertools.count(1),
        _args=SimpleNamespace(max_restarts=1),
        _warn=warnings.append,
    )
    actor = SimpleNamespace(name="actor 0", restarts=0)
    Batches._allow_restart(batches, actor, error)
    assert warnings[0].count("\n") == tracebacks
    assert ("mine" in warnings[0]) == bool(tracebacks)
    with pytest.raises(ActorsFailed, match="actor 0 failed, after 1 restarts .*: environment X"):
        Batches._allow_restart(batches, actor, error)


def test_an_error_in_a_process_comes_once_with_its_traceback_there(capfd, recwarn):
    with closing(make_host(TOY, 2, 0, '{"raise_at": 2}')) as envs:
        envs.reset()
        envs.step(np.zeros(2, int))
        with pytest.raises(RuntimeError, match="told to fail") as raised:
            envs.step(np.zeros(2, int))
    assert "host_toys.py" in str(raised.value.__cause__)
    assert "told to fail" not in capfd.readouterr().err
    assert not [warning for warning in recwarn if "told to fail" in str(warning.message)]


@pytest.mark.parametrize(
    ("what", "vectorization", "words"),
    [
        ({"hang_at": 20}, "async", "--step-timeout"),
        ({"nan_at": 20}, "sync", "observation of environment 0"),
        pytest.param(
            {"nan_reward_at": 20},
            "sync",
            "reward of environment 0",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_actor_that_fails_begins_anew(what, vectorization, words, tmp_path, capfd):
    small = {"envs_per_actor": 2, "actor_threads": 1, "total_timesteps": 10 * 16}
    small |= {"step_timeout": 1.5} if "hang_at" in what else {}
    params = trouble(tmp_path, **what)
    train(
        tmp_path / "run",
        vectorization=vectorization,
        env_params=params,
        eval_episodes=2,
        **small,
    )
    errors = capfd.readouterr().err
    assert words in errors
    assert "1 of 10" in errors
    assert rows(tmp_path / "run")[-1]["actors/restarts"] == 1


def test_actors_that_fail_too_often_end_the_run_with_its_work_saved(tmp_path, capfd):
    with pytest.raises(ActorsFailed, match="after 3 restarts .*--max-restarts"):
        train(
            tmp_path / "run",
            env_params='{"raise_at": 20}',
            actor_threads=1,
            max_restarts=3,
        )
    result = result_of(tmp_path / "run")
    assert capfd.readouterr().err.count("of 3)") == 3
    assert result["status"] == "failed"
    assert checkpoint_steps(tmp_path / "run") == [result["env_steps"]]


def test_a_learner_without_rollouts_says_what_every_actor_does(tmp_path):
    with pytest.raises(ActorsFailed, match=r"--learner-timeout 1\).*actor 0: .*actor 1: "):
        train(tmp_path / "run", env_params='{"sleep": 0.3}', learner_timeout=1.0)


def test_an_evaluation_that_fails_is_played_once_more_and_does_not_stop_the_training(
    tmp_path, monkeypatch, capfd
):
    failures = iter((SystemExit("no way"), RuntimeError("no way")) * 10)

    def fail(*_, **__):
        raise next(failures)

    monkeypatch.setattr(pmaprl.actors.host_evaluation, "run_host_episodes", fail)
    with pytest.raises(TrainingError, match="step 1,280 failed twice: RuntimeError: no way"):
        train(
            tmp_path / "run",
            eval_interval=128,
            total_timesteps=10 * 128,
        )
    assert "step 128 failed twice" in capfd.readouterr().err and not list(failures), (
        "each of ten evaluations"
    )
    assert checkpoint_steps(tmp_path / "run") == [10 * 128]
    assert result_of(tmp_path / "run")["status"] == "failed"


def test_an_evaluation_is_repeated_exactly_with_a_seed_for_every_episode(tmp_path, monkeypatch):
    monkeypatch.setattr(pmaprl.actors.host_evaluation, "MOST_ENVS", 2)
    args = small_args(eval_episodes=3, env_params=trouble(tmp_path, raise_at=3))
    seeds = []
    warnings = []
    algorithm = only_acts(lambda learner, seen, key: jnp.zeros(2, int))
    evaluation = HostEvaluation(args, algorithm, warnings.append)
    make = evaluation._make_envs
    monkeypatch.setattr(evaluation, "_make_envs", lambda seed: seeds.append(seed) or make(seed))
    failed, fine = (evaluation._play_or_replay(None, Worker("the evaluation")) for _ in range(2))
    assert same_bits(failed, fine)
    assert len(fine.ret) == 3
    assert seeds == [SEED, SEED, SEED + 2], "the second one has the environments of the first"
    evaluation.stop()
    assert warnings == [
        "the evaluation failed and is played once more: RuntimeError: the toy was told to fail"
    ]


@pytest.mark.parametrize(("toy", "made"), [("Toy", 1), ("StubbornToy", 3), ("ReusingToys", 3)])
def test_evaluations_keep_environments_that_begin_anew_with_a_seed_and_close_them(
    toy, made, monkeypatch
):
    """Others are made anew, and begin as they did."""
    vectorization = "vector" if toy == "ReusingToys" else "sync"
    args = small_args(env=f"{TOYS}{toy}-v0", eval_episodes=2, vectorization=vectorization)
    starts = []
    new = []
    closed = []
    algorithm = only_acts(lambda learner, seen, key: jnp.zeros(2, int))
    evaluation = HostEvaluation(args, algorithm, pytest.fail)
    make = evaluation._make_envs

    def watched(seed):
        envs = make(seed)
        close = envs.close
        reset = envs.reset
        monkeypatch.setattr(envs, "close", lambda: closed.append(seed) or close())
        monkeypatch.setattr(envs, "reset", lambda: starts.append(reset()) or starts[-1])
        new.append(seed)
        return envs

    monkeypatch.setattr(evaluation, "_make_envs", watched)
    first, *others = (evaluation._play_or_replay(None, Worker("the evaluation")) for _ in range(3))
    assert all(same_bits(first, other) for other in others)
    assert len(new) == made
    assert same_bits(starts[0], starts[-1])
    evaluation.stop()
    assert len(closed) == made


def test_evaluations_have_parameters_of_their_own(tmp_path):
    result = train(tmp_path / "run", env_params='{"limit": 7}', eval_env_params='{"limit": 3}')
    assert result.evaluation["eval/length_mean"] == [3.0]
    assert rows(tmp_path / "run")[-1]["episode/length"] == 7
    args = play.Args(run=str(tmp_path / "run"), env=TOY, episodes=2)
    episodes = play.play(args)
    assert episodes.length.tolist() == [
        3,
        3,
    ]


@pytest.mark.slow
def test_a_thread_that_hangs_ends_the_run_with_its_work_saved(tmp_path):
    flags = (
        "--vectorization sync --step-timeout 0.5 --num-steps 4 --envs-per-actor 2 "
        "--hidden-sizes 4 --quiet"
    )
    words = [*flags.split(), "--env", TOY, "--env-params", '{"hang_at": 30}', "--run-dir", "run"]
    process = start_script(
        *words,
        cwd=tmp_path,
        script=SCRIPT,
        PYTHONPATH=str(ROOT / "tests"),
    )
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "--step-timeout 0.5" in output
    assert "Traceback" not in output
    assert any((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -9),
    ],
)
def test_signals_leave_no_process_behind(number, code, tmp_path):
    """Not even one that hangs without listening to anybody. A terminal sends SIGINT to all of the
    program's group.
    """
    flags = (
        "--num-steps 4 --envs-per-actor 2 --hidden-sizes 4 --total-timesteps 1e8 "
        "--log-interval 64 --run-dir run"
    )
    params = trouble(
        tmp_path,
        sleep=0.01,
        spin_at=30,
        simulator=str(tmp_path / "simulator"),
    )
    words = *flags.split(), "--eval-interval", 64, "--env", TOY, "--env-params", params
    with tempfile.TemporaryDirectory() as temporary:  # a short name
        path = {"PYTHONPATH": str(ROOT / "tests"), "TMPDIR": temporary}
        process = start_script(
            *words,
            cwd=tmp_path,
            script=SCRIPT,
            **path,
        )
        read_until(process, "step ")
        wait_until((tmp_path / "once").exists)
        below = children(process.pid)
        assert len(below) >= 8  # two actors with two environments each, which have simulators
        assert os.listdir(temporary)
        others = below[: None if number == signal.SIGINT else 0]
        for pid in (process.pid, *others):
            os.kill(pid, number)
        process.communicate(timeout=300)
        assert process.returncode == code
        wait_until(lambda: not any(map(runs, below)))
        wait_until(lambda: not os.listdir(temporary))
    if number != signal.SIGKILL:
        assert any((tmp_path / "run" / "checkpoints").iterdir())


SLOW_TO_MAKE = """
import multiprocessing, subprocess, time
import gymnasium
from pmaprl.suites.tools.processes import Processes

class Slow(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        if multiprocessing.parent_process():
            open(f"simulator{subprocess.Popen(['sleep', '1e6']).pid}", "w")
            time.sleep(1e6)
"""


def test_a_kill_leaves_nothing_of_environments_that_are_being_made(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_TO_MAKE)
    code = "import slow; slow.Processes(slow.Slow, 2, None, None)"
    with tempfile.TemporaryDirectory() as temporary:  # a short name
        paths = {"PYTHONPATH": f"{ROOT / 'common'}{os.pathsep}{tmp_path}", "TMPDIR": temporary}
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=os.environ | paths,
        )
        wait_until(lambda: len(list(tmp_path.glob("simulator*"))) == 2)
        assert os.listdir(temporary)
        process.kill()
        process.wait()
        simulators = [
            int(path.name.removeprefix("simulator")) for path in tmp_path.glob("simulator*")
        ]
        wait_until(lambda: not any(map(runs, simulators)))
        wait_until(lambda: not os.listdir(temporary))


@pytest.mark.parametrize(
    ("env_id", "parameter", "value"),
    [
        ("CartPole-v1", "num_threads", -1),
        ("CartPole-v1", "max_episode_steps", -1),
        ("CartPole-v1", "batch_size", 1),
        ("CartPole-v1", "unheard_of", 1),
        ("Pong-v5", "stack_num", -1),
        ("Pong-v5", "stack_num", 0),
        ("Pong-v5", "stack_num", True),
        ("Pong-v5", "img_height", 0),
        ("Pong-v5", "img_width", 10**9),
        ("Pong-v5", "frame_skip", 0),
        ("Pong-v5", "noop_max", 0),
        ("Pong-v5", "difficulty", -2),
        ("Pong-v5", "repeat_action_probability", 1.5),
        ("Pong-v5", "task", "../../evil"),
        ("Pong-v5", "base_path", "/tmp"),
        ("HalfCheetah-v4", "xml_file", "../half_cheetah.xml"),
        ("HalfCheetah-v4", "ctrl_cost_weight", float("nan")),
    ],
)
def test_what_would_end_the_process_in_envpool_is_refused(env_id, parameter, value):
    with pytest.raises(UsageError, match=parameter):
        make_host(
            f"envpool:{env_id}",
            2,
            0,
            json.dumps({parameter: value}),
        )


@pytest.mark.slow
def test_a_warning_of_mujoco_is_said_once_for_all_environments():
    pytest.importorskip("mujoco")
    code = (
        "from pmaprl.envs.registry import make_host\n"
        "if __name__ == '__main__':\n"
        "    for vectorization in ('async', 'sync'):\n"
        "        envs = make_host('gymnasium:HalfCheetah-v5', 2, 0, vectorization=vectorization)\n"
        "        envs.reset()\n"
        "        envs.close()\n"
    )
    done = succeed(run_python("-c", code))
    # Versions of MuJoCo after 4 may not warn of it any more
    assert done.stderr.count("settotalmass") <= 1


def test_numbers_in_their_range_reach_envpool():
    params = json.dumps({"stack_num": 2.0, "img_height": 40, "noop_max": 1})
    with closing(make_host("envpool:Pong-v5", 1, 0, params)) as envs:
        assert envs.reset().shape == (1, 40, 84, 2)


@pytest.mark.parametrize(
    ("low", "high", "dtype", "wanted"),
    [
        (0, 2**31 - 1, np.int64, np.int32),
        (0, 2**31, np.int64, np.float32),
        (-(2**31) - 1, 0, np.int64, np.float32),
        (-(2**63), 2**63 - 1, np.int64, np.float32),
        (0, 2**64 - 1, np.uint64, np.float32),
        (0, 5, np.uint64, np.int32),
        (0, 2**32 - 1, np.uint32, np.uint32),
        (-1, 1, np.float64, np.float32),
    ],
)
def test_observations_of_64_bits_get_a_type_of_32_that_holds_their_bounds(low, high, dtype, wanted):
    box = gymnasium.spaces.Box(low, high, (1,), dtype)
    space = gymnasium.spaces.Dict({"part": box})
    spec = Conversion("E", space, gymnasium.spaces.Discrete(2)).spec
    assert spec.obs_dtype == {"part": wanted}
    assert EnvSpec.from_json(spec.to_json()).obs_dtype == spec.obs_dtype


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.int64([5, 2**31]), np.int32),
        (np.uint64([2**64 - 1]), np.int32),
        (np.int64([256]), np.uint8),
    ]
    + [(np.float64([1e39]), np.float32), (np.float32([0.5]), np.int32), (np.int64([2]), bool)],
)
def test_a_number_that_a_type_does_not_hold_is_named(value, dtype):
    with pytest.raises(OverflowError, match=re.escape(str(value[-1]))):
        cast(value, dtype)
    same = np.clip(value, 0, 1).astype(int)
    assert cast(same, dtype).tolist() == same.tolist()


def test_an_observation_outside_of_its_bounds_does_not_wrap():
    spec = Conversion(
        "E",
        gymnasium.spaces.Box(0, 9, (1,), np.int64),
        gymnasium.spaces.Discrete(2),
    ).spec
    envs = SimpleNamespace(
        spec=spec,
        num_envs=1,
        reset=lambda: np.int64([[5_000_000_000]]),
    )
    with pytest.raises(FailedEnvError, match="5000000000"):
        Stepper(Worker("actor 0", envs=envs), envs)
