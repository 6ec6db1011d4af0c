"""pgx's games of several players: whose turn it is, opponents by a policy, and self-play."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ppo, relative_difference, run_updates, small_args
from numpy.testing import assert_allclose, assert_array_equal

from pmaprl.cli.errors import UsageError
from pmaprl.device.rollout import step_envs
from pmaprl.device.state import to_host
from pmaprl.envs.masks import legal_actions
from pmaprl.envs.registry import make
from pmaprl.envs.spaces import sample
from pmaprl.play import Args as PlayArgs
from pmaprl.play import play
from pmaprl.policy import load_policy
from pmaprl.runs.checkpoints import read

pytestmark = pytest.mark.slow
SIZES = {
    "num_envs": 4,
    "num_steps": 8,
    "num_minibatches": 2,
    "update_epochs": 1,
    "hidden_sizes": (4,),
}


def test_the_other_player_of_pgx_moves_until_it_is_our_turn():
    """Both kinds of stones stand on the board, in turn, from our side; the result of a game is -1,
    0 or 1.
    """
    env = make("pgx:connect_four")
    count = 200
    step = jax.jit(lambda *inputs: step_envs(env, *inputs))
    reset = jax.jit(jax.vmap(env.reset))
    obs, state = reset(jax.random.split(jax.random.key(0), count))
    assert 0.3 < np.mean(state.seat) < 0.7, "seats are drawn"
    boards = np.array(obs["obs"])
    begun = boards.sum(axis=(1, 2))  # [N, ours and theirs]
    starts = set(map(tuple, begun.tolist()))
    assert starts == {(0, 0), (0, 1)}, "half of the games the other one begins"
    results = []
    for time in range(25):
        keys = jax.random.split(jax.random.key(time), count)

        def legal_action(key, obs):
            return sample(key, env.action_space, legal_actions(obs))

        actions = jax.vmap(legal_action)(
            keys,
            obs,
        )
        out = step(keys, state, actions)
        before, after = (np.array(x["obs"]).sum(axis=(1, 2)) for x in (obs, out.final_obs))
        goes_on = ~np.array(out.terminated)
        moves = (after - before)[goes_on]
        assert_array_equal(moves, [[1, 1]] * goes_on.sum())
        turn = np.array(out.state.game.current_player)
        assert (turn == np.array(out.state.seat)).all(), "our turn"
        assert (np.array(out.reward)[goes_on] == 0).all()
        results += np.array(out.reward)[~goes_on].tolist()
        obs = out.obs
        state = out.state
    assert set(results) == {-1, 1} or set(results) == {-1, 0, 1}
    assert abs(np.mean(results)) < 0.15, "both move at random"


def test_others_act_by_the_policy_that_is_given():
    def first_legal(key, obs):
        return jnp.argmax(obs["action_mask"])

    env = make("pgx:tic_tac_toe").against(first_legal)
    starts = jax.random.split(jax.random.key(0), 20)
    obs, state = jax.vmap(env.reset)(starts)
    boards = np.array(obs["obs"]).reshape(20, 9, 2)
    ours, theirs = np.moveaxis(boards, -1, 0)
    second = theirs.any(axis=1)
    assert 3 < second.sum() < 17
    assert (theirs[second].argmax(axis=1) == 0).all()
    assert not ours.any()
    keys = jax.random.split(jax.random.key(1), 20)
    out = jax.vmap(env.step)(keys, state, jnp.full(20, 8))
    boards = np.array(out.obs["obs"]).reshape(20, 9, 2)
    theirs = boards[..., 1]
    wanted = np.stack([np.ones(20), second], axis=1)
    assert_array_equal(theirs[:, :2], wanted)


def test_past_policies_are_kept_and_are_the_same_on_any_number_of_devices():
    flags = {
        "total_timesteps": 640,
        "opponent": "self",
        "opponent_interval": 2,
        "normalize_obs": True,
    }
    args = small_args(**SIZES | {"num_envs": 8}, **flags)
    env = make("pgx:tic_tac_toe")
    alone, together = (to_host(run_updates(args, env, count, 5)[0]) for count in (1, 2))
    assert relative_difference(alone.learner.params, together.learner.params) < 1e-4
    # [P, ...], taken before updates 0, 2 and 4
    parameters = np.array(jax.tree.leaves(alone.run.opponent_pool[0])[1])
    kept = parameters[0]
    kinds = [len(np.unique(kept[some], axis=0)) for some in ([0, 3, 7], [0, 1], [1, 2], [0, 2])]
    assert kinds == [
        1,
        2,
        2,
        2,
    ]
    newest = jax.tree.map(lambda x: x[:, 2], alone.run.opponent_pool[0])
    assert relative_difference(newest, alone.learner.params.actor) > 1e-4, "an update came after it"


def test_runs_in_play_with_itself_are_evaluated_loaded_resumed_and_begun_from(
    tmp_path, capsys, shared_programs
):
    flags = {
        "env": "pgx:tic_tac_toe",
        "opponent": "self",
        "reset_pool": 3,
        "num_seeds": 2,
        "lr_schedule": "constant",
    }
    flags |= SIZES | {"eval_episodes": 50, "quiet": False}

    def train(folder, **more):
        args = small_args(**flags, run_dir=str(tmp_path / folder), **more)
        return ppo.train(args)

    whole = train("a", total_timesteps=96)
    names = ("win_rate", "return_mean", "return_std")
    rate, mean, spread = (np.array(whole.evaluation[f"eval/{name}"]) for name in names)
    # Of wins w and losses l: w + l
    assert_allclose(2 * rate, mean + spread**2 + mean**2, atol=1e-5)
    assert (rate > 0).all()
    assert (rate < 1).all()
    assert "% won" in capsys.readouterr().out
    assert "% won" in (play(PlayArgs(str(tmp_path / "a"), episodes=20)), capsys.readouterr().out)[1]
    policy = load_policy(tmp_path / "a")
    obs, _ = make("pgx:tic_tac_toe").reset(jax.random.key(0))
    row = jax.tree.map(lambda x: x[None], obs)
    assert obs["action_mask"][int(policy(row)[0])]
    part = train("b", total_timesteps=96, stop_after=32)
    rest = ppo.train(ppo.Args.from_run(part.run_dir))
    assert rest.state_sha256 == whole.state_sha256
    with pytest.raises(UsageError, match="--opponent"):
        longer = ppo.Args.from_run(part.run_dir, opponent="random", total_timesteps=128)
        ppo.train(longer)
    begun = train(
        "c",
        total_timesteps=32,
        init_from=str(whole.run_dir),
    )
    stored = read(begun.run_dir / "checkpoints" / "32")
    # [S, P, ...]
    prefix = "run/opponent_pool/0/"
    opponent_pool = [x for name, x in sorted(stored.items()) if name.startswith(prefix)]
    actors = jax.tree.leaves(whole.params.actor)
    assert opponent_pool and all(
        (x == actor[:, None]).all() for x, actor in zip(opponent_pool, actors, strict=True)
    ), "who begins there"
