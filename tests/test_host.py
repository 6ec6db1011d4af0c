"""Environments on the host, actors, queues and parameter slots, and what happens when they fail."""

import itertools
import json
import os
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import appo_pmap as appo
import gymnasium
import host_toys
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_helpers import ROOT, checkpoint_steps, read_until, run_python, start_script
from helpers import result_of, same_bits
from host_helpers import TOY, TOYS
from test_appo import rows, small_args, train

import common.actors.host_evaluation
import common.actors.watchdog
import common.cli.command
from common import play
from common.actors.actor import Actor, inspect_env
from common.actors.host_evaluation import HostEvaluation, run_host_episodes
from common.actors.pool import ActorsFailed
from common.actors.queues import Collected, ParameterSlots, RolloutQueue, Slot
from common.actors.watchdog import GRACE, Activity, Worker
from common.cli.env_flags import read_params
from common.cli.errors import FailedEnvError, TrainingError, UnusableEnvError, UsageError
from common.device.agents import Player
from common.envs import spaces
from common.envs.host import Conversion, HostStep, evaluation_params
from common.envs.processes import Processes
from common.envs.registry import make_host
from common.envs.spaces import EnvSpec

SCRIPT = ROOT / "algos" / "appo_pmap.py"


def steps(name: str, count: int, **more: Any) -> tuple[Any, list[Any]]:
    """The first observations, and what `count` steps with action 0 or zeros return."""
    envs = make_host(name, num_envs=2, seed=3, **more)
    action = np.zeros((2, *envs.spec.action_space.shape), np.int32)
    first = envs.reset()
    outputs = [envs.step(action) for _ in range(count)]
    envs.close()
    return first, outputs


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
    """Whether there is such a process, one that has ended and that nobody has asked about left aside."""
    with suppress(OSError):
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    return False


# -------------------------------------------------------------------------------------------------------- environments


@pytest.mark.parametrize(("vectorization", "terminates"), [("async", False), ("sync", True)])
def test_a_reset_within_the_step_leaves_the_final_observation(vectorization, terminates):
    params = json.dumps({"terminates": terminates})
    first, outputs = steps(TOYS + "Toy-v0", 8, vectorization=vectorization, env_params=params)
    episode = first[:, 0]
    for number, out in enumerate(outputs, 1):
        assert out.valid.all()
        assert (out.truncated == (number == 7 and not terminates)).all()
        assert (out.terminated == (number == 7 and terminates)).all()
        np.testing.assert_array_equal(
            out.final_obs, np.stack([episode + (number > 7), [number - 7 * (number > 7)] * 2], 1)
        )
        np.testing.assert_array_equal(out.obs[:, 1], [number % 7] * 2)
    np.testing.assert_array_equal(outputs[6].obs[:, 0], episode + 1)
    assert len(set(episode)) == 2


@pytest.mark.parametrize("name", ["envpool:CartPole-v1", "gymnasium:CartPole-v1"])
def test_a_reset_in_a_step_of_its_own_is_not_valid(name):
    first, outputs = steps(name, 12, env_params='{"max_episode_steps": 5}', vectorization="vector")
    if "envpool" in name:  # other seeds are other episodes; numbers in infos are those of valid steps
        again, other = (make_host(name, 2, seed).reset() for seed in (3, 1))
        assert np.array_equal(first, again) and not np.isclose(first, other).any()
        assert [len(out.numbers("elapsed_step")) for out in outputs[:7]] == [2, 2, 2, 2, 2, 0, 2]
    assert all(out.final_obs is None for out in outputs)
    np.testing.assert_array_equal([out.truncated.all() for out in outputs], [i % 6 == 4 for i in range(12)])
    np.testing.assert_array_equal([out.valid.all() for out in outputs], [i % 6 != 5 for i in range(12)])
    assert (outputs[5].reward == 0).all()
    assert (np.abs(outputs[5].obs) <= 0.05).all()  # where CartPole begins
    assert (np.abs(outputs[4].obs) > 0.05).any()  # the true next observation
    assert (np.abs(first) <= 0.05).all()


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_numbers_in_infos_are_of_the_episode_that_the_step_was_in(vectorization):
    _, outputs = steps(TOYS + "ChattyToy-v0", 8, vectorization=vectorization)
    found = {name: [out.numbers(name).tolist() for out in outputs] for name in ("time", "even", "end", "all", "text")}
    assert found["time"] == [[step, step] for step in (1, 2, 3, 4, 5, 6, 7, 1)]
    assert found["even"] == [[step % 2 == 0] * 2 for step in (1, 2, 3, 4, 5, 6, 7, 1)]
    assert found["end"] == [[]] * 6 + [[70, 70], []]
    assert found["all"] == found["text"] == [[]] * 8


def test_actions_are_shaped_clipped_and_cast():
    whole = Conversion("whole", gymnasium.spaces.Discrete(2), gymnasium.spaces.Box(0, 5, (1,), np.int32))
    actions = whole.actions(np.array([[-0.2], [0.4], [0.6], [4.8], [9.0]], np.float32))
    assert actions.dtype == np.int32 and actions.ravel().tolist() == [0, 0, 1, 5, 5], "the nearest ones"
    for name, action, reward in (
        (TOYS + "BoxToy-v0", np.float32([[-9, 9, 0.5, 0.25]] * 2), [-2 + 1 + 0.75] * 2),
        (TOYS + "MultiToy-v0", np.array([[1, 2], [0, 1]]), [21, 10]),
        ("envpool:Pendulum-v1", np.full((2, 1), 7, np.float32), None),
    ):
        with closing(make_host(name, 2, 0, vectorization="sync")) as envs:
            first, out = envs.reset(), envs.step(action)
        assert out.obs.shape == first.shape
        assert reward is None or out.reward.tolist() == pytest.approx(reward)


def test_atari_frames_have_their_channels_last():
    envpool = pytest.importorskip("envpool")
    envs = make_host("envpool:Pong-v5", 1, 5)
    raw = envpool.make("Pong-v5", env_type="gymnasium", num_envs=1, seed=5)
    np.testing.assert_array_equal(envs.reset()[0], np.moveaxis(raw.reset()[0][0], 0, -1))
    for action in (2, 3, 2, 2):
        obs = envs.step(np.array([action])).obs
        np.testing.assert_array_equal(obs[0], np.moveaxis(raw.step(np.array([action]))[0][0], 0, -1))
    assert obs.shape == (1, 84, 84, 4)
    assert obs.dtype == envs.spec.obs_dtype == np.uint8
    assert envs.spec.observation_space.shape == (84, 84, 4)


class NeverBegins:
    """A maker that hangs while another process reads it."""

    __call__ = host_toys.Toy

    def __reduce__(self):
        return time.sleep, (1e6,)


def test_processes_that_hang_or_never_begin_raise_and_end():
    envs = make_host(TOYS + "Toy-v0", 2, 0, '{"hang_at": 2}', "async", 60, 2.0)
    envs.reset()
    envs.step(np.zeros(2, int))
    processes = list(envs._inner.processes)
    with pytest.raises(FailedEnvError, match="--step-timeout"):
        envs.step(np.zeros(2, int))
    envs.close()
    assert not any(process.is_alive() for process in processes)
    with pytest.raises(FailedEnvError, match="--reset-timeout"):
        Processes(NeverBegins(), 1, reset_timeout=0.1, step_timeout=None)


@pytest.mark.parametrize("end", ["close", "kill"])
def test_what_an_environment_has_started_ends_with_it(end, tmp_path):
    """Also once it has raised an error that cannot be sent to another process."""
    trouble = {} if end == "kill" else {"raise_odd_at": 1}
    params = json.dumps({"simulator": str(tmp_path / "simulator"), **trouble})
    envs = make_host(TOYS + "Toy-v0", 1, 0, params, "async", step_timeout=60.0)
    envs.reset()
    simulator = int((tmp_path / "simulator").read_text())
    wait_until(lambda: runs(simulator))
    if trouble:
        with pytest.raises(RuntimeError, match="odd trouble"):
            envs.step(np.zeros(1, int))
    getattr(envs, end)()
    wait_until(lambda: not runs(simulator))
    envs.close()


@pytest.mark.slow
def test_runs_may_be_in_processes_of_other_programs(tmp_path):
    """In a thread, as actors are: where they start must not be taken for a process of an environment.

    Nor do processes of environments import the program, nor does the temporary folder of multiprocessing go.
    """
    program = tmp_path / "program.py"
    code = f"""
        import os, sys, threading
        from multiprocessing import get_context, util
        sys.path.insert(0, {str(ROOT)!r})
        print(__name__, flush=True)

        def run():
            from common.envs.registry import make_host
            envs = make_host("gymnasium:CartPole-v1", 2, 0)
            print(envs.reset().shape, flush=True)
            envs.close()

        def work():
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

        if __name__ == "__main__":
            run()
            folder = util.get_temp_dir()
            process = get_context("spawn").Process(target=work)
            process.start()
            process.join()
            print(os.path.isdir(folder))
        """
    program.write_text(textwrap.dedent(code))
    done = run_python(program)
    assert done.stdout.split("\n") == ["__main__", "(2, 4)", "__mp_main__", "(2, 4)", "True", ""], done.stderr


def test_evaluations_count_whole_games_unless_told_otherwise():
    for env, vectorization, flags, wanted in (
        ("envpool:Pong-v5", "async", ('{"reward_clip": true}', ""), {"reward_clip": False}),
        ("envpool:Pong-v5", "async", ('{"episodic_life": true}', '{"a": 1}'), {"episodic_life": False, "a": 1}),
        ("envpool:Pong-v5", "async", ("", '{"episodic_life": true}'), {"episodic_life": True}),
        ("gymnasium:ale_py:ALE/Pong-v5", "vector", ("", ""), {"reward_clipping": False}),
        ("gymnasium:ale_py:ALE/Pong-v5", "async", ("", ""), {}),
    ):
        assert read_params(evaluation_params(env, vectorization, *flags)) == wanted


def test_an_evaluation_plays_a_fixed_number_of_episodes_in_each_environment():
    limits = itertools.count(1)

    class Uneven(host_toys.Toy):
        def __init__(self):
            super().__init__(limit=next(limits))

        def _observe(self):
            return np.float32([0, self.time])

    gymnasium.register("Uneven-v0", Uneven, disable_env_checker=True)
    next(limits)
    envs = make_host("gymnasium:Uneven-v0", 3, 0, vectorization="sync")
    found = run_host_episodes(envs, lambda obs: np.ones(3, int), 7, Worker("the evaluation"))
    lengths = [env.unwrapped.limit for env in envs._inner.envs]
    assert found.length.tolist() == np.repeat(lengths, [3, 2, 2]).tolist()
    np.testing.assert_array_equal(found.ret, found.length)


# ---------------------------------------------------------------------------------------------------- slots and queues


def test_readers_see_whole_versions_only():
    """While others are published that are still being computed."""
    device, wrong, found = jax.devices()[0], [], set()
    slots, tree = ParameterSlots([device]), [jnp.zeros((100, 100)) for _ in range(4)]
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.tanh(x @ x) * 0 + x + 1, tree))
    slots.publish(0, tree)

    def read():
        last = 0
        while last < 39 and not wrong:
            version, params = slots.latest(device)
            if {float(x[i, i]) for x in params for i in (0, -1)} != {float(version)} or version < last:
                wrong.append(version)
            found.add(last := version)

    readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
    for reader in readers:
        reader.start()
    for version in range(1, 40):
        tree = advance(tree)
        slots.publish(version, tree)
    for reader in readers:
        reader.join(timeout=100)
    assert 39 in found and not wrong
    assert slots.wait_for(39, device, 0).version == 39
    assert slots.wait_for(40, device, 0.01) is None


def test_the_queue_loses_nothing():
    queue, stop = RolloutQueue(2), threading.Event()

    def produce(actor):
        for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
            queue.put(Collected(actor, number, [], []), stop.is_set)

    producers = [threading.Thread(target=produce, args=(actor,), daemon=True) for actor in range(3)]
    for producer in producers:
        producer.start()
    seen = {actor: [] for actor in range(3)}
    for turn in range(120):
        wanted = turn % 3 if turn < 60 else None
        collected = queue.take(wanted, 5.0)
        assert wanted in (None, collected.actor)
        seen[collected.actor].append(collected.rollout)
        if turn % 2:
            queue.train(2)
        counts = queue.counts
        assert counts.pop("produced") == sum(counts.values())
        assert counts["waiting"] <= 6
    wait_until(lambda: queue.counts["waiting"] == 6)
    stop.set()
    for producer in producers:
        producer.join()
    queue.discard()
    counts = queue.counts
    assert counts == {"produced": 129, "trained": 120, "discarded": 9, "waiting": 0, "held": 0}
    assert all(numbers == list(range(len(numbers))) for numbers in seen.values())
    later = RolloutQueue(2, {"produced": 9, "trained": 5, "discarded": 1})
    assert later.counts == {"produced": 9, "trained": 5, "discarded": 4, "waiting": 0, "held": 0}


# -------------------------------------------------------------------------------------------------------------- actors


def actor_on(name: str, **more: Any) -> Actor:
    def act(params, memory, key, step, obs):
        return np.full(len(obs), params % 3, np.int32), {"step": np.full(len(obs), step)}, memory + 1

    return Actor(0, lambda seed: make_host(name, 2, seed, **more), None, act, 6, (0,), memory=np.zeros(2))


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
        np.testing.assert_array_equal(before.obs[-1], after.obs[0])
    whole = jax.tree.map(lambda *x: np.concatenate(x), *rollouts)  # obs [4 * (T + 1), ...]
    ended = whole.truncated
    next_obs = np.concatenate([rollout.obs[1:] for rollout in rollouts])
    np.testing.assert_array_equal(ended[:, 0], [step % 7 == 6 for step in range(24)])
    np.testing.assert_array_equal(whole.final_obs[~ended], next_obs[~ended])
    np.testing.assert_array_equal(whole.final_obs[ended][:, 1], [7.0] * 6)
    np.testing.assert_array_equal(next_obs[ended][:, 1], [0.0] * 6)
    np.testing.assert_array_equal(whole.version[:, 0], np.arange(24))
    np.testing.assert_array_equal(whole.extras["step"][:, 0], np.arange(24))
    np.testing.assert_array_equal(np.concatenate([rollout.memory[:, 0] for rollout in rollouts]), [0, 6, 5, 4])
    assert [part.returns for part in parts] == [[], [7.0, 7.0], [7.0, 7.0], [7.0, 7.0]]
    assert parts[1].lengths == [7, 7]


@pytest.mark.parametrize(
    ("vectorization", "toy", "rest"),
    [("sync", "TellingToy", {"obs"}), ("async", "TellingGoalToy", {"achieved", "desired"})],
)
def test_masks_in_infos_and_parts_of_final_observations_are_observed(vectorization, toy, rest):
    with closing(make_host(f"{TOYS}{toy}-v0", 2, 0, vectorization=vectorization)) as envs:
        assert set(envs.spec.observation_space.parts) == {"action_mask", *rest}
        begun = envs.reset()
        outputs = [envs.step(np.zeros(2, int)) for _ in range(7)]
    assert begun["action_mask"].tolist() == [[0, 1, 1]] * 2
    assert all(out.obs["action_mask"].tolist() == [[1, 0, 1]] * 2 for out in outputs[:6])
    assert outputs[6].truncated.all() and outputs[6].obs["action_mask"].tolist() == [[0, 1, 1]] * 2
    assert outputs[6].final_obs["action_mask"].tolist() == [[1, 1, 1]] * 2  # where nobody acts
    part, sign = ("obs", 1) if "obs" in rest else ("desired", -1)
    assert begun[part][:, 1].tolist() == outputs[6].obs[part][:, 1].tolist() == [0.0, 0.0]
    assert outputs[6].final_obs[part][:, 1].tolist() == [7.0 * sign] * 2


def test_masks_in_infos_may_have_parts_and_may_not_be_missing():
    with closing(make_host(f"{TOYS}TellingMultiToy-v0", 2, 0, vectorization="sync")) as envs:
        assert [part.shape for part in envs.spec.observation_space.parts["action_mask"].parts] == [(2,), (3,)]
        begun, after = envs.reset(), envs.step(np.zeros((2, 2), int)).obs
    masks = [[part.tolist() for part in obs["action_mask"]] for obs in (begun, after)]
    assert masks == [[[[1, 1]] * 2, [[0, 1, 0]] * 2], [[[1, 0]] * 2, [[0, 0, 1]] * 2]]
    with closing(make_host(f"{TOYS}TellingToy-v0", 1, 0, '{"tells_nothing_at": 1}', "sync")) as envs:
        envs.reset()
        with pytest.raises(UnusableEnvError, match="action_mask"):
            envs.step(np.zeros(1, int))


class ResetsInItsOwnStep:
    """Two environments whose episodes have 3 and 5 steps; they observe the number of the step, and 100 at the end."""

    spec = EnvSpec("steps", spaces.Box(np.zeros(1), np.full(1, 100.0), (1,)), np.dtype("float32"), spaces.Discrete(2))
    num_envs, resets_in_step = 2, False

    def reset(self):
        self.time, self.limit = np.zeros(2), np.array([3, 5])
        return self._observe()

    def step(self, action):
        valid = self.time < self.limit
        self.time = np.where(valid, self.time + 1, 0)
        over = (self.time == self.limit) | ~valid  # in a step that only resets it means nothing, as the reward
        return HostStep(self._observe(), np.ones(2, np.float32), over, np.zeros(2, bool), valid, None)

    def _observe(self):
        return np.where(self.time == self.limit, 100, self.time)[:, None].astype(np.float32)


@pytest.mark.parametrize("resets_in_step", [True, False])
def test_evaluations_remember_exactly_one_episode(resets_in_step):
    """The memory is the number of steps since it was emptied, held against the number that is observed."""
    seen_and_counted = []

    def act(seen, memory, keys):
        memory = np.where(seen.first, 0, memory)
        seen_and_counted.extend(zip(seen.obs[:, -1], memory, strict=True))
        return np.zeros(2, int), memory + 1

    toy = make_host(TOYS + "Toy-v0", 2, 0, vectorization="sync") if resets_in_step else ResetsInItsOwnStep()
    episodes = run_host_episodes(toy, Player(lambda count: np.zeros(count, int), act), 7, Worker("test"))
    if not resets_in_step:  # as many of each environment, or one more; those of one environment are the same
        assert episodes.ret.tolist() == episodes.length.tolist() == [3, 3, 3, 3, 5, 5, 5]
        assert len(set(episodes.fingerprint)) == 2
    acting = [pair for pair in seen_and_counted if pair[0] != 100]
    assert len(acting) > 15 and all(seen == counted for seen, counted in acting)


def test_arrays_that_an_environment_uses_again_are_copied():
    (part,) = collect(actor_on(TOYS + "ReusingToys-v0", vectorization="vector"), 1)
    np.testing.assert_array_equal(part.rollout.obs[:, 0, 0], np.arange(7))
    np.testing.assert_array_equal(part.rollout.truncated[:, 0], np.arange(1, 7) == 3)


def test_a_worker_beyond_its_limit_is_stuck():
    args, worker = small_args(learner_timeout=1, reset_timeout=10, step_timeout=20), Worker("actor 3")

    def busy(phase: str, seconds: float) -> str | None:
        worker.activity = Activity(phase, time.monotonic() - seconds)
        return worker.stuck(args)

    for phase, flag, limit in (("reset", "reset", 10), ("env_step", "step", 20), ("act", "learner", 1)):
        assert busy(phase, limit + GRACE - 1) is None
        assert busy(phase, limit + GRACE + 1) == f"--{flag}-timeout {limit}"
        assert str(worker) == f"actor 3: {phase} for {limit + GRACE + 1:.1f} s"
    assert busy("wait_put", GRACE + 2) is None


def test_a_worker_that_has_waited_for_long_is_not_stuck_in_what_comes_next(monkeypatch):
    """Whoever watches may look between any two attributes that the worker stores."""
    args, worker, looks = small_args(learner_timeout=1, step_timeout=1), Worker("actor 0"), []

    def store(worker, name, value):
        object.__setattr__(worker, name, value)
        looks.append(worker.stuck(args))

    monkeypatch.setattr(Worker, "__setattr__", store)
    with worker.doing("wait_put"):
        later = time.monotonic() + 1e3
        monkeypatch.setattr(time, "monotonic", lambda: later)
    with worker.doing("env_step"):
        pass
    assert len(looks) >= 4
    assert not any(looks)


# -------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("stdout", ["closed", "unread"])
def test_a_run_that_leaves_a_thread_behind_ends_at_once_whoever_reads(stdout, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    unread = os.fdopen(writer, "w")
    unread.write("nobody reads this")
    monkeypatch.setattr(sys, "stdout", unread if stdout == "unread" else None)
    monkeypatch.setattr(os, "_exit", lambda code: sys.exit(f"at once, with {code}"))
    released, worker = threading.Event(), Worker("actor 0")
    worker.run(released.wait)
    monkeypatch.setattr(common.cli.command, "exit_code", lambda train, args: 3)
    with pytest.raises(SystemExit, match="at once, with 3"):
        common.cli.command.main(None, None)
    released.set()
    assert worker.join(time.monotonic() + 60)
    with suppress(BrokenPipeError):
        unread.close()


def test_an_environment_that_hangs_at_the_first_look_is_given_up(tmp_path, monkeypatch):
    stuck, hangs = Worker.stuck, (tmp_path / "once").exists
    monkeypatch.setattr(Worker, "stuck", lambda worker, limits: hangs() and stuck(worker, limits))
    monkeypatch.setattr(common.actors.watchdog, "GRACE", 0.0)
    args = small_args(env_params=trouble(tmp_path, hang_in_close=1), reset_timeout=0.1)
    with pytest.raises(TrainingError, match="--reset-timeout 0.1"):
        inspect_env(args)


def trouble(folder: Path, **more: Any) -> str:
    return json.dumps({"once": str(folder / "once"), **more})


@pytest.mark.parametrize(
    ("what", "vectorization", "words"),
    [
        ({"exit_at": 20}, "async", "exit code 7"),
        ({"hang_at": 20}, "async", "--step-timeout"),
        ({"nan_at": 20}, "sync", "observation of environment 0"),
        pytest.param({"nan_reward_at": 20}, "sync", "reward of environment 0", marks=pytest.mark.slow),
        pytest.param({"hang_in_process": 1}, "async", "--reset-timeout", marks=pytest.mark.slow),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_actor_that_fails_begins_anew(what, vectorization, words, tmp_path, capfd):
    small = {"envs_per_actor": 2, "actor_threads": 1, "total_timesteps": 10 * 16}
    small |= {"reset_timeout": 5.0} if "hang_in_process" in what else {"step_timeout": 1.5} if "hang_at" in what else {}
    params = trouble(tmp_path, **what)
    train(tmp_path / "run", vectorization=vectorization, env_params=params, eval_episodes=2, **small)
    errors = capfd.readouterr().err
    assert words in errors
    assert "1 of 10" in errors
    assert result_of(tmp_path / "run")["status"] == "finished"
    assert rows(tmp_path / "run")[-1]["actors/restarts"] == 1


def test_a_restart_is_counted_in_the_checkpoint(tmp_path, capfd):
    params = trouble(tmp_path, raise_at=20)
    train(tmp_path / "run", env_params=params, stop_after=640)
    assert "the toy was told to fail" in capfd.readouterr().err
    appo.train(appo.Args.from_run(tmp_path / "run", env=TOY, quiet=True))
    assert rows(tmp_path / "run")[-1]["actors/restarts"] == 1


def test_actors_that_fail_too_often_end_the_run_with_its_work_saved(tmp_path, capfd):
    with pytest.raises(ActorsFailed, match="after 3 restarts .*--max-restarts"):
        train(tmp_path / "run", env_params='{"raise_at": 20}', actor_threads=1, max_restarts=3)
    assert capfd.readouterr().err.count("of 3)") == 3
    assert result_of(tmp_path / "run")["status"] == "failed"
    assert checkpoint_steps(tmp_path / "run") == [result_of(tmp_path / "run")["env_steps"]]


def test_a_learner_without_rollouts_says_what_every_actor_does(tmp_path):
    with pytest.raises(ActorsFailed, match=r"--learner-timeout 1\).*actor 0: .*actor 1: "):
        train(tmp_path / "run", env_params='{"sleep": 0.3}', learner_timeout=1.0)


def test_an_evaluation_that_fails_is_played_once_more_and_does_not_stop_the_training(tmp_path, monkeypatch, capfd):
    failures = iter((SystemExit("no way"), RuntimeError("no way")) * 10)

    def fail(*_):
        raise next(failures)

    monkeypatch.setattr(common.actors.host_evaluation, "run_host_episodes", fail)
    with pytest.raises(TrainingError, match="step 1,280 failed twice: RuntimeError: no way"):
        train(tmp_path / "run", eval_interval=128, total_timesteps=10 * 128)
    assert "step 128 failed twice" in capfd.readouterr().err
    assert not list(failures), "each of ten evaluations"
    assert checkpoint_steps(tmp_path / "run") == [10 * 128]
    assert result_of(tmp_path / "run")["status"] == "failed"


def test_an_evaluation_is_repeated_exactly_and_every_episode_begins_with_a_seed_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(common.actors.host_evaluation, "MOST_ENVS", 2)
    agent, seeds, warnings = SimpleNamespace(player=lambda learner: lambda obs: np.zeros(2, int)), [], []
    args = small_args(eval_episodes=3, env_params=trouble(tmp_path, raise_at=3))
    evaluation = HostEvaluation(args, agent, warnings.append)
    make = evaluation._make_envs
    monkeypatch.setattr(evaluation, "_make_envs", lambda seed: seeds.append(seed) or make(seed))
    failed, fine = (evaluation._play_or_replay(None, 10, Worker("the evaluation")) for _ in range(2))
    assert same_bits(failed, fine) and len(fine.ret) == len(set(fine.fingerprint)) == 3
    assert seeds == [10, 10, 12, 10, 12]
    assert warnings == ["the evaluation failed and is played once more: RuntimeError: the toy was told to fail"]


def test_evaluations_have_parameters_of_their_own(tmp_path):
    result = train(tmp_path / "run", env_params='{"limit": 7}', eval_env_params='{"limit": 3}')
    assert result.evaluation["eval/length_mean"] == [3.0]
    assert rows(tmp_path / "run")[-1]["episode/length"] == 7
    assert play.play(play.Args(run=str(tmp_path / "run"), env=TOY, episodes=2)).length.tolist() == [3, 3]


@pytest.mark.slow
def test_a_thread_that_hangs_ends_the_run_with_its_work_saved(tmp_path):
    flags = "--vectorization sync --step-timeout 0.5 --num-steps 4 --envs-per-actor 2 --hidden-sizes 4 --quiet"
    words = [*flags.split(), "--env", TOY, "--env-params", '{"hang_at": 30}', "--run-dir", "run"]
    process = start_script(*words, cwd=tmp_path, script=SCRIPT, PYTHONPATH=str(ROOT / "tests"))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "--step-timeout 0.5" in output
    assert "Traceback" not in output
    assert any((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_signals_leave_no_process_behind(number, code, tmp_path):
    """Not even one that hangs without listening to anybody. A terminal sends SIGINT to all of the program's group."""
    flags = "--num-steps 4 --envs-per-actor 2 --hidden-sizes 4 --total-timesteps 1e8 --log-interval 64 --run-dir run"
    params = trouble(tmp_path, sleep=0.01, spin_at=30, simulator=str(tmp_path / "simulator"))
    words = *flags.split(), "--eval-interval", 64, "--env", TOY, "--env-params", params
    with tempfile.TemporaryDirectory() as temporary:  # a short name
        path = {"PYTHONPATH": str(ROOT / "tests"), "TMPDIR": temporary}
        process = start_script(*words, cwd=tmp_path, script=SCRIPT, **path)
        read_until(process, "step ")
        wait_until((tmp_path / "once").exists)
        below = children(process.pid)
        assert len(below) >= 8  # two actors with two environments each, which have simulators
        assert os.listdir(temporary)
        for pid in (process.pid, *below[: None if number == signal.SIGINT else 0]):
            os.kill(pid, number)
        process.communicate(timeout=300)
        assert process.returncode == code
        wait_until(lambda: not any(map(runs, below)))
        wait_until(lambda: not os.listdir(temporary))
    if number != signal.SIGKILL:
        assert any((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("parameter", ["num_threads", "max_episode_steps"])
def test_numbers_that_end_the_process_in_envpool_are_refused(parameter):
    with pytest.raises(UsageError, match=parameter):
        make_host("envpool:CartPole-v1", 2, 0, json.dumps({parameter: -1}))


def test_what_only_resets_counts_in_no_return(monkeypatch):
    monkeypatch.setitem(globals(), "make_host", lambda *_: ResetsInItsOwnStep())
    parts = collect(actor_on("steps"), 2)
    assert [part.returns for part in parts] == [part.lengths for part in parts] == [[3, 5], [3, 3, 5]]
