"""The shared modules: episode statistics, repeated updates, checkpoints, devices, evaluation."""

import errno
import functools
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import ppo_pmap as ppo
import pytest
import sac_pmap as sac
from helpers import (
    AXIS,
    make_env,
    metric_rows,
    over_devices,
    relative_difference,
    same_bits,
    small_args,
    small_sac_args,
    train,
)
from numpy.testing import assert_allclose, assert_array_equal

from pmaprl.cli.errors import TrainingError, UsageError
from pmaprl.cli.files import replacing
from pmaprl.device.contract import OnPolicy
from pmaprl.device.drivers import driver_of
from pmaprl.device.episodes import WINDOW, count_episodes, new_recent, new_tracker, recent_metrics
from pmaprl.device.evaluation import Episodes, episode_keys, run_episodes
from pmaprl.device.optim import update_if
from pmaprl.device.programs import repeat_updates
from pmaprl.device.statistics import (
    MetricSums,
    across_devices,
    over_steps,
    reduce_over_devices,
)
from pmaprl.envs.environment import DEFAULT_HORIZON, Step
from pmaprl.envs.spaces import Box
from pmaprl.machine.devices import choose_devices, choose_roles
from pmaprl.nets.recurrent import RecurrentTorso
from pmaprl.nets.torso import Convolution, Torso, batch_last
from pmaprl.runs.checkpoints import Arrays, Checkpoints, sha256
from pmaprl.runs.clock import Clock
from pmaprl.runs.evaluator import MOST_PENDING, Evaluations
from pmaprl.runs.metrics import jsonable
from pmaprl.runs.results import EvaluationResult
from pmaprl.runs.saving import InitialState, Saver

T = 6
N = 8


def finished_episodes(reward: np.ndarray, done: np.ndarray) -> np.ndarray:
    """(return, length) in the order of step, then env, of rollouts [updates * T, N]; env 0 begins
    amid an episode.
    """
    found = []
    ret = np.zeros(N)
    is_first = np.arange(N) == 0
    length = np.where(is_first, -np.inf, 0)
    for reward_t, done_t in zip(reward, done, strict=True):
        ret = ret + reward_t
        length = length + 1
        ended = np.flatnonzero(done_t & (length > 0))
        found += [(ret[n], length[n]) for n in ended]
        ret = np.where(done_t, 0, ret)
        length = np.where(done_t, 0, length)
    return np.array(found).reshape(-1, 2)


KINDS = ("", "_sum", "_max", "_min", "_last")


@pytest.mark.parametrize("devices", [1, 4])
def test_episode_statistics_equal_numpy(devices):
    """Statistics of each rollout, and of the last 100 episodes, over devices and updates; more and
    fewer than 100 at once.
    """
    random = np.random.default_rng(0)
    updates = 12
    rewards = random.normal(size=(updates * T, N))
    reward = rewards.astype(np.float32)
    chances = np.repeat([0, 0.1, 0.3, 0.6, 1.0, 0.05] * 2, T)
    done = random.random((updates * T, N)) < chances[:, None]
    info = np.where(
        random.random(reward.shape) < 0.2,
        random.normal(size=reward.shape) - 5,
        np.nan,
    ).astype(np.float32)
    info[: 2 * T] = np.nan  # in two whole updates, and in the last step of a device
    info[-1, N // 2 :] = np.inf

    @jax.jit
    def count(tracker, recent, steps):

        def split(x):
            return x.reshape(T, devices, -1)

        steps = jax.tree.map(split, steps)
        count = jax.vmap(
            count_episodes,
            in_axes=(0, None, 1),
            axis_name=AXIS,
        )
        return count(tracker, recent, steps)

    def joined(*x):
        return jnp.concatenate(x)

    tracker = jax.tree.map(joined, new_tracker(1, True), new_tracker(N - 1))

    def sharded(x):
        return x.reshape(devices, -1)

    tracker = jax.tree.map(sharded, tracker)
    recent = new_recent()
    so_far = None
    whole = []
    for update in range(updates):
        rows = slice(update * T, (update + 1) * T)
        until = slice((update + 1) * T)
        steps = Step(
            obs=None,
            state=None,
            reward=reward[rows],
            terminated=done[rows],
            truncated=np.zeros_like(done[rows]),
            info=None,
            final_obs=None,
        )
        tracker, *replicas = count(
            tracker,
            recent,
            steps._replace(info={f"x{kind}": info[rows] for kind in KINDS}),
        )
        leaves = jax.tree.leaves(replicas)
        assert all(same_bits(x[0], x[i]) for x in leaves for i in range(devices))
        recent, new = jax.tree.map(lambda x: x[0], replicas)
        so_far = so_far + new if update else new
        metrics = recent_metrics(recent) | new.metrics()
        logged = [so_far.metrics()[f"env/x{kind}"] for kind in KINDS]
        seen = [row[np.isfinite(row)] for row in info[until] if np.isfinite(row).any()]
        flat = np.concatenate([*seen, []])
        numbers = (
            [flat.mean(), flat.sum(), flat.max(), flat.min(), seen[-1].mean()]
            if seen
            else [np.nan] * 5
        )
        assert_allclose(logged, numbers, rtol=1e-5)

        before = len(whole)
        whole = finished_episodes(reward[until], done[until])
        window = whole[-WINDOW:]
        fresh = whole[before:]
        assert recent.count == len(window)
        assert new.count["episode/return"] == len(fresh)
        if not len(whole):
            assert np.isnan(metrics["episode/return_last100"])
            assert np.isnan(metrics["episode/return"])
            continue
        assert_allclose(
            recent.ret[: len(window)],
            window[::-1, 0],
            rtol=1e-4,
            atol=1e-5,
        )
        means = zip(("return", "length"), window.mean(axis=0), strict=True)
        expected = {f"{name}_last100": x for name, x in means}
        columns = zip(("return", "length"), fresh.T, strict=True)
        for name, x in columns:
            expected |= (
                {name: x.mean(), f"{name}_min": x.min(), f"{name}_max": x.max()} if len(x) else {}
            )
        for name, number in expected.items():
            assert_allclose(
                metrics[f"episode/{name}"],
                number,
                rtol=1e-4,
                atol=1e-5,
                err_msg=name,
            )
    assert len(whole) > 2 * WINDOW


def test_reported_returns_are_raw_over_exactly_eval_episodes_whole_episodes(tmp_path):
    """Episodes of 7 steps, whatever the learner makes of them; five are evaluated, although two
    devices play three.
    """
    env = make_env("RewardIsEpisode")
    flags = {
        "num_steps": 10,
        "num_envs": 4,
        "num_minibatches": 2,
        "eval_episodes": 5,
        "num_devices": 2,
    }
    flags |= {
        "normalize_obs": True,
        "total_timesteps": 400,
        "log_interval": 80,
        "hidden_sizes": (8,),
    }
    result = train(small_args(**flags, run_dir=str(tmp_path / "run")), env)
    rows = metric_rows(result.run_dir)
    assert len(rows) == 5
    for row in rows:
        lengths = {row[f"episode/length{end}"] for end in ("", "_min", "_max", "_last100")}
        assert lengths == {7}
        rests = [row[f"episode/return{end}"] % 7 for end in ("_min", "_max")]
        assert rests == [0, 0]
        assert (
            7 * 3000
            > row["episode/return_max"]
            > row["episode/return"]
            > row["episode/return_min"]
            >= 0
        )
    assert sum(row["episode/count"] for row in rows) == 4 * (100 // 7)
    returns, _ = episodes(env, constant(0), 5)
    assert len(set(returns)) == 5
    wanted = {
        f"return_{name}": getattr(np, name)(returns) for name in ("mean", "std", "min", "max")
    }
    for name, number in (wanted | {"length_mean": 7}).items():
        assert result.evaluation[f"eval/{name}"] == pytest.approx([number])


def counting_update(state):
    """Metric `value` is the number of the update; `late` is infinite from the fourth update on,
    `early` NaN in one.
    """
    value = state.astype(jnp.float32)
    late = jnp.where(state >= 3, jnp.inf, 0.0)
    early = jnp.where(state == 1, jnp.nan, 0.0)
    episodes = MetricSums.of({"episode/return": value, "episode/return_max": value})
    metrics = {f"value{kind}": -value for kind in KINDS} | {
        "value": value,
        "late": late,
        "early": early,
    }
    odd = {"odd": value, "odd_max": -value, "odd_last": -value}
    tally = MetricSums.of(metrics)
    for due, rare in ((state % 2 == 1, odd), (False, {"never": value, "never_max": value})):

        def keep(state, rare=rare):
            return (state, rare)

        tally |= MetricSums.of(update_if(jnp.bool_(due), keep, state)[1])
    return state + 1, tally, episodes


def test_repeat_puts_metrics_together_and_finds_the_first_broken_update_of_each_seed():
    states = jnp.array([0, 10, 2])

    @jax.jit
    def repeated(states, count):
        states, columns = jax.vmap(lambda state: repeat_updates(counting_update, state, count))(
            states
        )
        return states, columns.packed()

    state, packed = repeated(states, jnp.int32(6))
    metrics, broken, counts, _ = packed.fetch(6)
    assert_array_equal(state, states + 6)
    assert_allclose(metrics["value"], [2.5, 12.5, 4.5])
    assert_allclose(metrics["episode/return"], [2.5, 12.5, 4.5])
    wanted = {
        "value_sum": [-15, -75, -27],
        "value_max": [0, -10, -2],
        "episode/return_max": [5, 15, 7],
    }
    wanted |= {
        "value_min": [-5, -15, -7],
        "odd": [3, 13, 5],
        "odd_max": [-1, -11, -3],
        "episode/count": [6] * 3,
    }
    wanted |= dict.fromkeys(("value_last", "odd_last"), wanted["value_min"])
    assert {name: metrics[name].tolist() for name in wanted} == wanted
    assert np.isnan([metrics["never"], metrics["never_max"]]).all()
    found = [counts[name].tolist() for name in ("value", "odd", "never")]
    assert found == [
        [6] * 3,
        [3] * 3,
        [0] * 3,
    ]
    broken = {name: broken[name].tolist() for name in ("value", "late", "early")}
    assert broken == {"value": [-1, -1, -1], "late": [3, 0, 1], "early": [1, -1, -1]}
    state, packed = repeated(states, jnp.int32(0))
    assert_array_equal(state, states)
    assert np.isnan(packed.fetch(0).metrics["value"]).all()
    assert packed.fetch(0).broken == {}


def test_several_calls_of_a_row_are_put_together_as_one_call_would_do_it():
    """Also where a metric has no report in one of them, or in none, and by the index of the first
    broken update.
    """
    states = jnp.array([0, 10, 2])

    @jax.jit
    def repeated(states, count):
        states, columns = jax.vmap(lambda state: repeat_updates(counting_update, state, count))(
            states
        )
        return states, columns.with_metrics({"newest": states}).packed()

    _, packed = repeated(states, jnp.int32(7))
    whole = packed.fetch(7)
    for sizes in ((1, 6), (3, 4), (2, 1, 4)):
        after = states
        parts = []
        for size in sizes:
            after, packed = repeated(after, jnp.int32(size))
            parts.append(packed.fetch(size))
        together = functools.reduce(lambda older, newer: older.followed_by(newer), parts)
        assert together.updates == whole.updates
        assert together.metrics.keys() == whole.metrics.keys()
        pairs = zip(whole[:3], together[:3], strict=True)
        for wanted, found in pairs:

            def compare(x, y):
                return assert_allclose(x, y, rtol=1e-6)

            jax.tree.map(compare, wanted, found)


def test_metrics_are_those_of_the_samples_of_all_devices_and_of_all_steps_that_count():
    def of_share(x):
        values = {"x": x.mean(), "x_sum": x.sum(), "x_max": x.max(), "x_min": x.min()}
        return across_devices(
            x.mean(),
            values,
        )

    grads, metrics = over_devices(of_share, 4, np.arange(8.0) - 5)
    wanted = {"x": -1.5, "x_sum": -12, "x_max": 2, "x_min": -5}
    assert grads.tolist() == [-1.5] * 4
    found = {name: x.tolist() for name, x in metrics.items()}
    assert found == {name: [x] * 4 for name, x in wanted.items()}

    def merge(x):
        return reduce_over_devices(
            jax.tree.map(lambda x: x[0], x),
        )

    again = over_devices(
        merge,
        4,
        metrics,
    )
    assert same_bits(again, metrics), "what is the same everywhere stays so"

    def own_metrics(x):
        return reduce_over_devices(
            {"x": x[0], "x_max": x[0]},
        )

    own = over_devices(
        own_metrics,
        4,
        np.arange(4.0),
    )
    assert [x.tolist() for x in own.values()] == [[1.5] * 4, [3.0] * 4]

    names = ("x", "x_sum", "x_max", "x_min", "x_last")
    steps = dict.fromkeys(names, np.arange(8.0) - 5)
    assert over_steps(steps) == wanted | {"x_last": 2}
    assert over_steps(steps, np.arange(8) < 3) == {
        "x": -4,
        "x_sum": -12,
        "x_max": -3,
        "x_min": -5,
        "x_last": -3,
    }


def test_counts_stay_exact_in_metrics_and_what_is_not_finite_is_null():
    assert jsonable(np.int32(123_456_789)) == 123_456_789
    numbers = np.array([np.nan, 2.5, np.inf])
    assert jsonable(numbers) == [None, 2.5, None]


def test_training_time_is_without_evaluation_and_saving(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    clock = Clock()

    def pass_time(seconds, doing=None):
        nonlocal now
        with clock.timed(doing) if doing else nullcontext():
            now += seconds

    pass_time(10, "compile")
    clock.begin()
    for seconds, doing in ((3, "eval"), (5, "checkpoint")):
        pass_time(2)
        pass_time(seconds, doing)
        assert clock.lap() == 2
    assert clock.trained == 4
    assert clock.since_begin == 12
    assert clock.wall == 22


def arrays(step: int = 0) -> Arrays:
    w = np.arange(6, dtype=np.float32).reshape(2, 3) + step
    learner = {
        "w": w,
        "updates": np.asarray(step, np.int32),
    }
    key = np.array([[1, 2]], np.uint32)
    envs = {"key": key, "nothing": np.zeros((0, 3), np.float32)}
    return {f"learner/{name}": x for name, x in learner.items()} | {
        f"envs/{name}": x for name, x in envs.items()
    }


def saved(directory, steps, evaluations=None, **policy) -> Checkpoints:
    checkpoints = Checkpoints(directory, **policy)
    values = evaluations or [None] * len(steps)
    for step, evaluation in zip(steps, values, strict=True):
        returns = evaluation and [evaluation - 1, evaluation + 1]
        checkpoints.save(step, arrays(step), returns)
    checkpoints.wait()
    return checkpoints


def test_sha256_sees_every_name_type_shape_and_bit():
    a = np.arange(4, dtype=np.int32)
    b = np.ones(2, np.float32)
    variants = [
        {"a": a, "b": b},
        {"a": a, "c": b},
        {"a": a},
        {"a": a.astype(np.uint32), "b": b},
    ]
    rounded = np.nextafter(b, np.float32(2))
    variants += [{"a": a.reshape(2, 2), "b": b}, {"a": a, "b": rounded}]
    assert len({sha256(variant) for variant in variants}) == len(variants)
    assert sha256({"b": b, "a": a}) == sha256(variants[0])


def test_a_checkpoint_that_does_not_fit_or_cannot_be_read_is_told_from_a_damaged_one(
    tmp_path, monkeypatch
):
    checkpoints = saved(tmp_path / "c", [1, 2], [9.0, 1.0])
    some = {"learner/w": arrays(2)["learner/w"]}
    loaded = checkpoints.load(some, ("learner/w",))
    assert loaded[1].keys() == some.keys()
    monkeypatch.setattr("orbax.checkpoint.v1.load", lambda *_: pytest.fail("it was read"))
    changes = (
        {"w": np.zeros((2, 4), np.float32)},
        {"w": np.zeros((2, 3), np.int32)},
        {"new": np.zeros(2)},
    )
    for ((name, array),) in (change.items() for change in changes):
        with pytest.raises(UsageError, match=f"learner/{name} is "):
            checkpoints.load(arrays() | {f"learner/{name}": array})
    with pytest.raises(UsageError, match="envs/key is "):
        checkpoints.load(some)

    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("orbax.checkpoint.v1.load", fail)
    with pytest.raises(TrainingError, match="checkpoint 2 "):
        checkpoints.load(arrays(2))


def test_a_checkpoint_that_loads_but_is_not_what_was_saved_is_skipped(tmp_path, monkeypatch):
    saved(tmp_path / "c", [10])
    wrong = {"sha256/learner": np.zeros((1, 32), np.uint8)}
    with monkeypatch.context() as patch:
        patch.setattr("pmaprl.runs.checkpoints.checksums", lambda arrays: wrong)
        saved(tmp_path / "c", [20])
    step, _, damaged = Checkpoints(tmp_path / "c").load(arrays())
    assert step == 10
    assert len(damaged) == 1


def test_keeping_the_best_checkpoint(tmp_path):
    evaluations = [1.0, 9.0, None, 3.0, 2.0]
    checkpoints = saved(
        tmp_path / "best",
        range(1, 6),
        evaluations,
        keep=1,
        keep_best=True,
    )
    assert checkpoints.steps() == [2, 5]
    assert checkpoints.best() == (2, [8.0, 10.0])
    best = Checkpoints(tmp_path / "best", keep=1, keep_best=True).best()
    assert best == checkpoints.best()
    newest = saved(tmp_path / "newest", range(1, 6), evaluations, keep=1)
    assert newest.steps() == [5]
    added = saved(tmp_path / "added", [1], keep=2, keep_best=True)
    assert added.best() == (0, [])
    added.add_evaluation(1, [8.0, 10.0])
    assert saved(
        tmp_path / "added",
        [2, 3, 4],
        [5.0, 6.0, 7.0],
        keep=2,
        keep_best=True,
    ).steps() == [1, 3, 4]


def test_a_step_saved_again_at_once(tmp_path):
    # The first save is under way when the second begins
    big = {"learner/params/w": np.ones(1_000_000)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, big, [1.0])
    checkpoints.save(10, big, [2.0])
    checkpoints.wait()
    assert checkpoints.load(big)[0] == 10
    assert checkpoints.best() == (10, [2.0])


def test_the_evaluation_of_a_checkpoint_that_is_being_deleted_is_left_out(tmp_path):
    checkpoints = saved(tmp_path, [1], keep=1)
    checkpoints.save(2, arrays(2), None)  # once that is done, the first one goes
    for step in (1, 2):
        checkpoints.add_evaluation(step, [5.0])
    assert checkpoints.evaluations() == {2: [5.0]}


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


def test_devices_divide_the_environments_and_pay_off():
    for request in (
        (4, 16, 4),
        (8, 16, 2),
        (1, 3, 3),
        (8, 8, 1),
    ):
        assert len(choose_devices(*request)) == request[0]
    assert len(choose_devices(0, 4, envs_per_cpu_device=8)) == 1  # too few for a second one
    for request in (
        (3, 16),
        (8, 16, 4),
        (16, 32),
    ):  # JAX has eight
        with pytest.raises(UsageError, match=f"--num-devices {request[0]}"):
            choose_devices(*request)
    learners = [jax.devices()[0], jax.devices()[2]]
    assert choose_roles((1,), (0, 2)) == ([jax.devices()[1]], learners)
    assert choose_roles((), ()) == ([jax.devices()[0]],) * 2
    with pytest.raises(UsageError, match="no device 8"):
        choose_roles((8,), ())


def constant(action):
    return lambda obs: jnp.full(len(obs), action, jnp.int32)


def episodes(env, policy, count, devices=1):
    played = over_devices(lambda: run_episodes(env, policy, count // devices), devices)
    return np.asarray(played.ret).ravel(), np.asarray(played.length).ravel()


def test_episodes_depend_on_their_global_index_alone():
    on_one, on_four = (
        episodes(make_env("CartPole-v1"), constant(1), 8, devices) for devices in (1, 4)
    )
    assert_array_equal(on_one, on_four)
    assert 8 <= min(on_one[1]) < max(on_one[1]) <= 11  # always pushing right drops the pole soon


def test_an_episode_counts_once_although_its_environment_goes_on():
    """Episodes of 3 to 5 steps run side by side until the longest is over."""
    returns, lengths = episodes(make_env("Endings"), constant(0), 32)
    assert set(lengths) == {3, 4, 5}
    # Beside 0.5 * step, each step earns id % 7
    of_id = (returns - 0.25 * lengths * (lengths + 1)) / lengths
    assert set(of_id) <= set(range(7))


def test_a_step_draws_nothing_that_the_reset_has_drawn():
    reset_key, *others = episode_keys(jax.random.key(0))
    keys = jax.random.split(reset_key, 8)
    drawn = jax.vmap(lambda key: jax.random.split(key, 8))(keys)
    of_steps = [jax.random.fold_in(key, step) for key in others for step in range(8)]
    drawn = [
        reset_key,
        *jax.random.split(reset_key, 8),
        *drawn.ravel(),
    ]
    assert not {str(jax.random.key_data(key)) for key in drawn} & {
        str(jax.random.key_data(key)) for key in of_steps
    }


def test_an_environment_without_a_time_limit_is_capped():
    returns, lengths = episodes(make_env("Endless"), constant(0), 1)
    assert lengths.tolist() == [DEFAULT_HORIZON]
    assert returns.tolist() == [2.5 * DEFAULT_HORIZON]


class Beside:
    """Evaluations beside the training, in turn, each over at the first look while there is
    something in `over`.
    """

    def __init__(self):
        self.begun = []
        self.played = []
        self.over = []

    def begin(self, step, state):
        self.begun.append(step)

    def poll(self):
        if not self.over:
            return None
        self.played.append(self.begun[len(self.played)])
        return Episodes(*np.ones((2, 1, 2)))

    def stop(self):
        pass


def test_every_due_evaluation_is_played_and_the_training_waits_for_them():
    """Until it is stopped, when it says how many were left."""
    beside = Beside()
    stops = []
    warnings = []
    setup = SimpleNamespace(
        args=small_args(),
        clock=Clock(),
        console=SimpleNamespace(warn=warnings.append, say=lambda text: None),
        interruption=SimpleNamespace(signal_of_any_process=lambda: bool(stops) and stops.pop(0)()),
        is_game=False,
        total=1_000,
        end=1_000,
    )
    saver = Saver(None, small_args(), InitialState())
    recorder = SimpleNamespace(add_evaluation=lambda step, metrics, moment: None)
    evaluations = Evaluations(setup, saver, recorder, EvaluationResult(0, {}), beside)
    for step in range(1, MOST_PENDING + 1):
        evaluations.begin(step, None)
        evaluations.poll()
    assert len(beside.begun) == MOST_PENDING
    assert beside.played == []
    assert warnings == []
    stops += [lambda: False, lambda: False, lambda: beside.over.append(1) or True]
    evaluations.begin(MOST_PENDING + 1, None)
    assert len(beside.begun) == MOST_PENDING
    assert beside.played == []
    assert len(warnings) == 1
    evaluations.begin(MOST_PENDING + 2, None)
    assert len(beside.begun) == MOST_PENDING + 1
    assert beside.played == [1]
    stops += [lambda: False] * 4 + [lambda: True] * 9
    evaluations.finish()
    left = len(beside.begun) - len(beside.played)
    evaluations.stop()
    assert len(beside.played) > 1
    assert f"{left} due" in warnings[-1]
    assert len(warnings) == 2


@pytest.mark.parametrize(
    ("pending", "saved", "told"),
    [
        ((100,), 100, "1 due evaluation was not played: --resume plays it"),
        ((40, 70, 100), 100, "3 due evaluations were not played: --resume plays the last one"),
        ((70, 80), 40, "2 due evaluations were not played: --resume plays them"),
        ((40,), 70, "1 due evaluation was not played"),
    ],
)
def test_an_evaluation_that_is_not_played_is_said_to_be_played_by_a_resume_where_it_is(
    pending, saved, told
):
    """That is so at the end of a run, and after the step from which a resumed run goes on."""
    warnings = []
    setup = SimpleNamespace(
        args=small_args(),
        clock=Clock(),
        console=SimpleNamespace(warn=warnings.append),
        total=100,
        end=100,
    )
    saver = Saver(None, small_args(), InitialState(step=saved))
    evaluations = Evaluations(setup, saver, None, EvaluationResult(0, {}), Beside())
    for step in pending:
        evaluations.begin(step, None)
    evaluations.stop()
    assert warnings == [told]


@pytest.mark.parametrize("size, stride, more", [(3, 2, (0, 0)), (8, 4, (3, 1))])
def test_convolutions_are_those_of_xla(size, stride, more):
    """An image is padded, where the last neighbourhood would leave pixels out."""
    image = jax.random.normal(jax.random.key(0), (2, 9, 11, 5))
    kernel = jax.random.normal(jax.random.key(1), (size, size, 5, 7))
    bias = jnp.arange(7.0)
    params = {"params": {"kernel": kernel.reshape(-1, 7), "bias": bias}}
    x = Convolution(7, size, stride).apply(params, batch_last(image))
    places = ("NHWC", "HWIO", "NHWC")
    padding = [(0, rows_or_columns) for rows_or_columns in more]
    wanted = (
        jax.lax.conv_general_dilated(
            image,
            kernel,
            (stride, stride),
            padding,
            dimension_numbers=places,
        )
        + bias
    )
    found = jnp.moveaxis(x, (-1, 0), (0, -1))
    assert relative_difference(found, wanted) < 1e-5


@pytest.mark.parametrize("encoder", ["small", "nature", "impala", "flat"])
def test_each_image_has_its_own_features_and_none_has_none(encoder):
    """Features of no image are asked for in an evaluation of no episodes, beside the one that is
    drawn.
    """
    images = jax.random.normal(jax.random.key(0), (2, 3, 10, 10, 4))
    image_box = Box(np.zeros((10, 10, 4)), np.ones((10, 10, 4)), (10, 10, 4))
    torso = Torso(
        image_box,
        (5, 6),
        "relu",
        None,
        encoder,
    )
    params = jax.jit(torso.init)(jax.random.key(0), images)

    @jax.jit
    def features_of(images):

        def total(x):
            return torso.apply(params, x).sum()

        seen = jax.grad(total)(images)
        outputs = (torso.apply(params, x) for x in (images, images[1, 2], images[:0]))
        return (*outputs, seen)

    features, alone, none, seen = features_of(images)
    assert features.shape == (2, 3, 6)
    assert none.shape == (0, 3, 6)
    assert relative_difference(features[1, 2], alone) < 1e-5
    is_seen = jnp.any(seen != 0, axis=(0, 1, 4))
    assert jnp.all(is_seen), "every pixel counts"
    # Which has no layer before the hidden ones
    assert ("Features_0" in params["params"]) == (encoder != "flat")


VECTOR = Box(np.zeros(3), np.ones(3), (3,))
FLAGS = SimpleNamespace(
    hidden_sizes=(5, 6),
    activation="tanh",
    dtype=None,
    layer_norm=True,
    gamma=0.9,
    rnn="gru",
)
OVERRIDES = {
    "hidden_sizes": (32,),
    "activation": "relu",
    "layer_norm": False,
    "name": "own",
}


@pytest.mark.parametrize("kind", [Torso, RecurrentTorso])
def test_a_torso_is_as_the_flags_say_but_for_overrides(kind):
    made = [kind.of(FLAGS, VECTOR), kind.of(FLAGS, VECTOR, **OVERRIDES)]
    plain, other = [getattr(one, "torso", one) for one in made]
    assert plain == Torso(VECTOR, (5, 6), "tanh", layer_norm=True)
    assert other == Torso(VECTOR, (32,), "relu", name="own")


@pytest.mark.parametrize("kind", [Torso, RecurrentTorso])
@pytest.mark.parametrize("wrong", ["hidden_size", "parent", "gamma"])
def test_an_override_that_is_no_field_of_a_torso_is_refused_with_those_that_there_are(kind, wrong):
    with pytest.raises(TypeError, match=f"(?s){wrong}.*hidden_sizes.*activation.*encoder"):
        kind.of(FLAGS, VECTOR, **{wrong: None})


def test_a_torso_without_hidden_layers_gives_its_features():
    torso = Torso.of(FLAGS, VECTOR, hidden_sizes=())
    out = torso.init_with_output(jax.random.key(0), jnp.ones((2, 4, 3)))[0]
    assert out.shape == (2, 4, 3)


def test_statistics_saved_by_an_older_version_go_on_with_zeros_for_what_it_did_not_save(tmp_path):
    names = "count", "mean", "m2"
    old = {f"learner/obs_stats/{name}": np.ones((1, 3), np.float32) for name in names}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, old, None)
    checkpoints.wait()
    new = {
        f"learner/obs_stats/{name}": np.ones((1, 3), np.float32)
        for name in ("mean_rest", "m2_rest")
    }
    loaded = checkpoints.load(old | new)[1]
    assert loaded.keys() == (old | new).keys()
    assert all(loaded[name].tolist() == np.zeros((1, 3)).tolist() for name in new)
    with pytest.raises(UsageError, match="mean_other"):
        checkpoints.load(old | {"learner/obs_stats/mean_other": np.zeros((1, 3))})


class OddMetric:
    """Algorithm with a metric that is no number."""

    def update(self, *inputs):
        learner, metrics = super().update(*inputs)
        return learner, metrics | {
            "my/odd": jnp.zeros(3),
        }


class OddPPO(OddMetric, ppo.PPO):
    pass


class OddSAC(OddMetric, sac.SAC):
    pass


@pytest.mark.parametrize(
    ("odd", "args"),
    [
        (OddPPO, small_args()),
        (OddSAC, small_sac_args()),
    ],
)
def test_a_metric_that_is_no_number_is_refused_by_name(odd, args):
    env = make_env("Toy")
    driver = driver_of(
        odd(args, env.spec),
        args,
        env,
    )
    alone = partial(
        jax.vmap,
        axis_size=1,
        axis_name=AXIS,
    )
    state = jax.eval_shape(
        alone(driver.init),
        np.zeros(1, np.int32),
    )
    with pytest.raises(UsageError, match="'my/odd'.*3"):
        jax.eval_shape(alone(driver.update), state)


def test_an_algorithm_without_a_method_of_its_contract_is_refused_by_name():
    class Lacking(OnPolicy):
        def init(self, key, hparams):
            return ()

        def update(self, learner, rollout, context):
            return learner, {}

    with pytest.raises(UsageError, match="Lacking has no act and no explore.*OnPolicy"):
        Lacking(None, None)
