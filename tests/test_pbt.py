"""Population-based training: the rules of an exchange, and whole runs."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers import (
    collectives_beside_each_other,
    compiled_updates,
    metric_rows,
    ppo,
    relative_difference,
    sac,
    small_args,
    small_sac_args,
)

from pmaprl.cli.population_flags import PbtArgs, Rules
from pmaprl.device.episodes import WINDOW, Episodes, RecentEpisodes
from pmaprl.device.interface import RunState
from pmaprl.device.population import SOURCE, evolve, exchange, objective_of
from pmaprl.device.state import TrainState
from pmaprl.drawing.figures import lineage
from pmaprl.envs.registry import make

SIZE = 10
RULES = Rules(
    WINDOW,
    {"learning_rate": "factor", "gamma": "complement", "adam_b2": "complement", "tau": "share"},
)
GIVEN = {
    "learning_rate": 1e-3,
    "gamma": 0.99,
    "adam_b2": 0.999,
    "tau": 0.9,
}


@pytest.fixture(scope="module", autouse=True)
def no_gap():
    """In whole runs a better member is taken over however little better it is."""
    plain = PbtArgs.rules.fget
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PbtArgs, "rules", property(lambda args: plain(args)._replace(gap=0.0)))
        yield


class Learner(struct.PyTreeNode):
    params: jax.Array
    opt_state: jax.Array


class Actors(struct.PyTreeNode):
    tracker: Episodes


def population(returns, seed=0) -> tuple[Learner, RunState]:
    size = len(returns)
    column = jnp.array(returns, jnp.float32)[:, None]
    ret = jnp.broadcast_to(column, (size, WINDOW))
    own = jnp.arange(size, dtype=jnp.float32)
    keys = jax.random.split(jax.random.key(seed), size)
    run = RunState(
        key=keys,
        updates=jnp.full(size, 7),
        member_values={
            name: jnp.full(size, value) * (1 - own / (10 * size)) for name, value in GIVEN.items()
        },
        recent=RecentEpisodes(ret, ret, jnp.full(size, WINDOW)),
        opponent_pool=200 + own,
    )
    return Learner(params=own[:, None] + jnp.zeros(3), opt_state=100 + own), run


def exchanged(learner, run, given=GIVEN, **rules):
    return exchange(learner, run, given, RULES._replace(**rules))


def breaking(learner, broken):
    rows = jnp.array(broken, int)
    return learner.replace(params=learner.params.at[rows, 1].set(jnp.nan))


def taken(returns, broken=(), **rules) -> list[int]:
    """Find whose weights each has after an exchange; those of some are broken before."""
    learner, run = population(returns)
    record = exchanged(breaking(learner, broken), run, fraction=0.25, **rules)[2]
    return record[SOURCE].tolist()


RETURNS = [5.0, 90, 10, 80, 20, 70, 30, 60, 40, 50]  # the best are 1, 3 and 5; the worst 0, 2 and 4


def test_the_worst_take_over_the_best():
    learner, before = population(RETURNS)
    learned, after, record = exchanged(
        learner,
        before,
        {"learning_rate": 1e-3},
        mutation_rate=1.0,
        reset_rate=0.0,
    )
    source = record[SOURCE].tolist()
    assert source[0] == 0, "the control"
    assert {source[2], source[4]} <= {1, 3, 5}
    others = [source[place] for place in (1, 3, 5, 6, 7, 8, 9)]
    assert others == [1, 3, 5, 6, 7, 8, 9]
    assert (learned.params == learner.params[record[SOURCE]]).all()
    assert (learned.opt_state == learner.opt_state[record[SOURCE]]).all()
    of_sources = before.member_values["gamma"][record[SOURCE]]
    assert (after.member_values["gamma"] == of_sources).all(), (
        "what does not evolve comes with them"
    )
    assert (
        after.member_values["learning_rate"]
        != before.member_values["learning_rate"][record[SOURCE]]
    ).sum() == SIZE - 4
    for name in ("key", "updates", "opponent_pool"):
        assert (getattr(after, name) == getattr(before, name)).all(), "these stay a member's own"
    assert (after.recent.ret == before.recent.ret).all()
    counts = [0 if place in (2, 4) else WINDOW for place in range(SIZE)]
    assert after.recent.count.tolist() == counts, "what other weights have earned does not count"


def test_running_episodes_of_one_that_took_over_do_not_count():
    args = small_args(
        population=SIZE,
        pbt=True,
        pbt_interval=128,
        pbt_evolve=("gamma",),
    )
    running = Episodes(jnp.full((SIZE, 2), 3.0), jnp.full((SIZE, 2), 5.0))
    learner, run = population(RETURNS)
    state = TrainState(learner, Actors(running), run)

    def evolve_at(*now):
        return evolve(args, *now)

    after, metrics = jax.jit(evolve_at)(jnp.int32(6), state)
    taken = metrics["pbt/source"] != jnp.arange(SIZE)
    assert taken.any()
    is_emptied = jnp.isneginf(after.actors.tracker.length)
    assert is_emptied.all(axis=1).tolist() == taken.tolist()
    assert (after.actors.tracker.length[~taken] == 5).all()
    calm, _ = jax.jit(lambda *now: evolve(args, *now))(jnp.int32(7), state)
    assert (calm.actors.tracker.length == 5).all(), "no exchange was due"


def test_the_objective_is_of_the_newest_episodes():
    learner, before = population([10.0, 20, 30, 40])
    hundreds = before.recent.ret.at[0, :3].set(100)
    ret = hundreds.at[1, 3].set(500)  # the newest come first
    recent = before.recent.replace(ret=ret, count=jnp.array([WINDOW, WINDOW, 2, 0]))
    before = before.replace(recent=recent)
    objectives = objective_of(learner, before, 3)
    assert objectives.tolist() == [100, 20, 30, -np.inf]


@pytest.mark.parametrize(
    ("best", "worst", "rules", "takes"),
    [(90.0, 89.0, {}, False), (90.0, 70.0, {}, True), (90.0, 80.0, {"gap": 0.2}, False)]
    + [(-100.0, -105.0, {}, False), (-100.0, -120.0, {}, True)],
)
def test_only_a_clearly_better_one_is_taken_also_of_costs(best, worst, rules, takes):
    sources = taken([best, best, best, worst], **rules)
    assert (sources[3] != 3) == takes


def test_whoever_is_broken_takes_over_one_who_is_not_and_is_nobodys_source():
    sources = taken([90.0, 10, 20, 30], broken=[0], gap=10.0)
    assert sources == [0, 1, 2, 3], "the control stays as it is"
    sources = taken([10.0, 90, 20, 30], broken=[1], gap=10.0)
    assert sources == [0, 3, 2, 3], "whatever the gap is"
    learner, before = population([10.0, 20, 30, 40, 50, 60])
    learned, after, record = exchanged(
        breaking(learner, [2, 3, 4, 5]),
        before,
        mutation_rate=1.0,
        reset_rate=0.0,
    )
    first, *others = record[SOURCE][1:].tolist()
    assert record[SOURCE][0] == 0
    assert first == 1
    assert set(others) <= {0, 1}
    assert jnp.isfinite(learned.params).all()
    assert (
        after.member_values["learning_rate"]
        != before.member_values["learning_rate"][record[SOURCE]]
    )[2:].all()


def test_all_but_the_best_and_the_control_change():
    learner, before = population(RETURNS)
    _, after, record = exchanged(
        learner,
        before,
        mutation_rate=1.0,
        reset_rate=0.0,
        gap=10.0,
    )
    assert record[SOURCE].tolist() == list(range(SIZE))
    fixed = [0, 1, 3, 5]
    others = [2, 4, 6, 7, 8, 9]
    for name, values in after.member_values.items():
        ratio = np.array(values / before.member_values[name])
        assert (ratio[fixed] == 1).all()
        assert (ratio[others] != 1).all()
    for name, origin, low, high in (
        ("learning_rate", 0, 1.1, 1.5),
        ("gamma", 1, 1.01, 1.2),
        ("adam_b2", 1, 1.01, 1.2),
    ):
        ratio = ((after.member_values[name] - origin) / (before.member_values[name] - origin))[
            jnp.array(others)
        ]
        change = np.maximum(ratio, 1 / ratio)
        assert (change > low - 1e-3).all()
        assert (change < high + 1e-3).all()
    assert (after.member_values["tau"] <= 1).all(), "a share"


@pytest.mark.parametrize(
    ("name", "value", "factor", "wanted"),
    [
        ("learning_rate", 2.0, 1.5, 3.0),
        ("tau", 0.9, 1.5, 1.0),
        ("gamma", 0.9, 1.2, 0.88),
        ("gamma", 0.1, 1.2, 0.0),
        ("adam_b2", 1 - 1.1e-6, 1 / 1.2, 1 - 1e-6),  # with 1 Adam would divide by 0
        ("alpha", 1.5e-8, 0.5, 1e-8),
        ("policy_lr", 3e38, 1.5, 2.0**128 - 2.0**104),  # the largest number of float32
    ],
)
def test_first_changes_are_as_those_of_exchanges(name, value, factor, wanted):
    """No flag leaves what it may be."""
    args = small_sac_args(population=2, pbt=True)
    rules = RULES._replace(limits=args.rules.limits)
    moved = rules.moved(name, value, factor)
    assert moved == pytest.approx(wanted, rel=1e-7, abs=1e-9)
    moved = rules.moved(name, jnp.array([value]), factor, jnp.clip)
    assert moved == pytest.approx(
        wanted,
        rel=1e-6,
        abs=1e-7,
    )


def test_members_may_aim_at_the_entropy_of_the_uniform_policy_at_most():
    for env, low, high in (("CartPole-v1", -np.inf, 1.0), ("Pendulum-v1", -np.log(2), np.inf)):
        algorithm = sac.make_algorithm(small_sac_args(env=env), make(env).spec)
        limits = algorithm.limits["target_entropy_scale"]
        assert limits == pytest.approx((low, high))


@pytest.mark.slow
def test_the_entropy_that_members_aim_at_is_one_that_policies_have(tmp_path, monkeypatch):
    """From the start, with a recipe's default or one near the limit, whatever is changed."""
    plain = PbtArgs.rules.fget
    often = {"mutation_rate": 1.0, "reset_rate": 0.0, "gap": 0.0}
    changed = property(lambda args: plain(args)._replace(**often))
    monkeypatch.setattr(PbtArgs, "rules", changed)
    flags = {
        "population": 8,
        "pbt": True,
        "pbt_evolve": ("target_entropy_scale",),
        "pbt_interval": 16,
    }
    flags |= {
        "env": "helpers:Blink",
        "target_entropy_scale": 0.9,
        "total_timesteps": 40 * 16,
        "log_interval": 16,
    }
    args = small_sac_args(
        **flags,
        hidden_sizes=(4,),
        run_dir=str(tmp_path),
    )
    assert max(args.members.member_values["target_entropy_scale"]) > 1, "or this shows nothing"
    sac.train(args)
    scales = np.array(
        [row["hyper/target_entropy_scale"] for row in metric_rows(tmp_path) if "pbt/source" in row]
    )
    assert len(set(scales.ravel())) > 20
    assert scales.max() == 1.0


def test_changes_are_as_frequent_as_asked_and_go_both_ways():
    learner, before = population(RETURNS * 60)
    _, after, _ = exchanged(learner, before, fraction=1 / 600, gap=1e9)
    ratios = np.array(after.member_values["learning_rate"] / before.member_values["learning_rate"])
    changed = ratios[ratios != 1]
    assert changed.size / ratios.size == pytest.approx(0.15, abs=0.04)
    assert np.mean(changed > 1) == pytest.approx(0.5, abs=0.15)


def test_descent_goes_back_through_all_exchanges():
    # 2 took over 1, then 1 took over 2, then 1 took over 0
    table = [[0, 1, 1], [0, 2, 2], [0, 0, 2]]
    sources = np.array(table)
    lines = [lineage(sources, member).tolist() for member in (1, 2)]
    assert lines == [[0, 0, 0, 1], [1, 2, 2, 2]]


def test_members_begin_changed_but_for_the_control():
    sweep = {
        "population": 5,
        "pbt": True,
        "sweep": ("learning_rate=log:1e-5:1e-1",),
        "seed": 3,
    }
    for more, evolving in (
        ({}, {"learning_rate": 1e-3}),
        ({"pbt_evolve": ("ent-coef",)}, {"ent_coef": 0.01}),
    ):
        args = small_args(**sweep, **more)
        assert args.evolving == evolving
        rates = args.members.member_values["learning_rate"]
        assert rates[0] == 1e-3 and len(set(rates)) == 5, "of the control nothing is drawn"
    member_values = small_args(population=5, pbt=True).members.member_values
    names = "gamma gae_lambda adam_b1 adam_b2 learning_rate max_grad_norm clip_eps vf_coef ent_coef"
    assert set(member_values) == set(names.split())
    assert all(len(set(values)) == 5 and min(values) > 0 for values in member_values.values())
    assert max(member_values["gamma"]) < 1
    assert member_values["gamma"][0] == 0.99
    assert not {"tau", "alpha"} & set(
        small_sac_args(recipe="crossq", population=5, pbt=True).evolving
    )


TINY = {
    "num_envs": 4,
    "num_steps": 8,
    "num_minibatches": 2,
    "update_epochs": 1,
    "hidden_sizes": (4,),
}
TINY |= {"env": "CartPole-v1", "total_timesteps": 12 * 32, "log_interval": 32, "eval_episodes": 8}
PBT = {
    "population": 4,
    "pbt": True,
    "pbt_interval": 64,
    "normalize_obs": True,
}
PBT |= {"sweep": ("learning_rate=log:1e-3:1e-1",)}


def train(folder, **flags):
    args = small_args(**TINY | PBT | {"run_dir": str(folder)} | flags)
    return ppo.train(args)


def exchanges(folder):
    """By step and member, whose weights were taken over."""
    rows = {
        row["env_steps"]: row["pbt/source"] for row in metric_rows(folder) if "pbt/source" in row
    }
    return {
        (step, place): x for step, row in rows.items() for place, x in enumerate(row) if place != x
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pbt") / "run"
    return train(folder), folder


def test_exchanges_are_rows_of_the_metrics(finished):
    _, folder = finished
    found = exchanges(folder)
    assert found
    assert {step % 64 for step, _ in found} == {0}
    assert 0 not in {member for _, member in found}
    rates = {row["env_steps"]: row["hyper/learning_rate"] for row in metric_rows(folder)}
    changed = {step for step in rates if step > 32 and rates[step] != rates[step - 32]}
    assert changed
    assert {step % 64 for step in changed} == {0}
    assert (folder / "population.png").stat().st_size > 5_000


@pytest.mark.slow
def test_members_of_different_devices_exchange_as_on_one_and_resume_exactly(
    finished, tmp_path, monkeypatch
):
    """And go on from each other's checkpoints: to the last bit on as many devices with members of
    their own.
    """
    result, folder = finished
    flags = {"sharding": "members", "num_devices": 2}
    updates = compiled_updates(monkeypatch)
    whole = train(tmp_path / "whole", **flags)
    assert not collectives_beside_each_other(updates[0])
    part = train(
        tmp_path / "part",
        checkpoint_interval=32,
        stop_after=160,
        **flags,
    )
    shutil.copytree(part.run_dir, tmp_path / "alone")
    rest = ppo.train(ppo.Args.from_run(part.run_dir))
    assert rest.state_sha256 == whole.state_sha256
    args = ppo.Args.from_run(tmp_path / "alone", sharding="pmap", num_devices=1)
    alone = ppo.train(args)
    assert relative_difference(result.params, whole.params) < 1e-4
    assert relative_difference(result.params, alone.params) < 1e-4
    assert exchanges(folder) == exchanges(tmp_path / "whole") == exchanges(tmp_path / "part")
    assert exchanges(folder) == exchanges(tmp_path / "alone")
    all_exchanges = exchanges(folder).items()
    crossing = [member for (_, member), source in all_exchanges if source // 2 != member // 2]
    assert crossing, "none came from the other device"
