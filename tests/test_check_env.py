"""`common/pmaprl/check_env.py`: what it says of environments that are right, and of some that are
not.
"""

import sysconfig

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import make_env

from pmaprl import check_env
from pmaprl.cli.errors import TrainingError, UsageError
from pmaprl.envs import spaces
from pmaprl.envs.foreign_code import place_in_code
from pmaprl.envs.masks import check_parts
from pmaprl.suites.tools.processes import InItsProcess

BROKEN = """
import jax
import numpy as np
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces

@struct.dataclass
class State(environment.EnvState):
    x: jax.Array

class Walk(environment.Environment):
    default_params = environment.EnvParams(max_steps_in_episode=4)

    def reset_env(self, key, params):
        return jnp.zeros(1), State(time=0, x=jnp.zeros(1))

    def step_env(self, key, state, action, params):
        x = self.next_x(state, action)
        return x, State(time=state.time + 1, x=x), x[0], False, {}

    def next_x(self, state, action):
        return state.x / 0.0

    def observation_space(self, params):
        return spaces.Box(-1, 1, (1,))

    def action_space(self, params):
        return spaces.Discrete(2)

class Drawn(Walk):
    def next_x(self, state, action):
        return state.x + action

    def frame(self, state, params):
        return np.zeros((6, 9, 3), np.uint8)

class Undrawn(Drawn):
    def frame(self, state, params):
        return state.nothing

class Branching(Walk):
    def next_x(self, state, action):
        return state.x + 1 if action > 0 else state.x

class Misshapen(Drawn):
    def observation_space(self, params):
        return spaces.Box(-1, 1, (25,))
"""


@pytest.fixture
def broken_envs(tmp_path, monkeypatch):
    (tmp_path / "broken_envs.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)


def kinds(env, **flags):
    """The texts of findings by their kind."""
    found = check_env.check_env(check_env.Args(env=env, **{"steps": 30} | flags))
    return {
        kind: " ".join(x.text for x in found if x.kind == kind) for kind in ("ok", "note", "wrong")
    }


def test_nothing_is_wrong_with_an_environment_of_a_suite(capsys):
    found = kinds("CartPole-v1")
    assert not found["wrong"]
    assert "finite" in found["ok"]
    assert "same episodes" in found["ok"]
    assert "every reward is 1" in found["note"]
    assert "Box[4]" in capsys.readouterr().out


def test_a_frame_of_ones_own_is_checked(broken_envs, capsys):
    assert "picture" in kinds("broken_envs:Drawn")["ok"]
    with pytest.raises(TrainingError):
        kinds("broken_envs:Undrawn")
    printed = capsys.readouterr().out
    assert "frame shows no picture" in printed
    assert "broken_envs.py, line" in printed


def test_whole_numbers_and_large_ones_are_told(capsys):
    spec = make_env("CartPole-v1").spec
    space = {"codes": spaces.box((2,), 0, 5), "far": spaces.box((1,))}
    spec = spec._replace(
        observation_space=space,
        obs_dtype={"codes": np.dtype(np.int8), "far": np.dtype(np.float64)},
    )
    first = {"codes": np.zeros((1, 2), np.int8), "far": np.zeros((1, 1))}
    after = {"codes": np.int8([[[0, 5]], [[7, 5]]]), "far": np.array([[[1e39]], [[2e39]]])}
    zeros = np.zeros((2, 1))
    no = np.zeros((2, 1), bool)
    played = check_env.Played(
        first_obs=first,
        obs=after,
        reward=zeros,
        terminated=no,
        truncated=no,
        acting=~no,
        step_seconds=1.0,
        reset_seconds=1.0,
    )
    found = list(check_env._numbers(spec, played))
    (wrong,) = (x.text for x in found if x.kind == "wrong")
    assert "observations far are not finite after a step" in wrong
    assert any("codes leave their bounds: 0 to 7" in x.text for x in found)


HOST = """
import gymnasium
import numpy as np

class Wide(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 10, (2,), np.int64)
    action_space = gymnasium.spaces.Discrete(2)
    large = 2**40

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([self.np_random.integers(9), 1]), {}

    def step(self, action):
        return np.array([self.large, action]), 1.0 * action, bool(action), False, {}

class Fitting(Wide):
    large = 9

for kind in (Wide, Fitting):
    gymnasium.register(f"{kind.__name__}-v0", kind)
"""


def test_whole_numbers_that_actors_refuse_are_wrong_on_the_host(tmp_path, monkeypatch, capsys):
    (tmp_path / "wide_envs.py").write_text(HOST)
    monkeypatch.syspath_prepend(tmp_path)
    assert "reset-pool" not in kinds("gymnasium:wide_envs:Fitting-v0")["note"]
    with pytest.raises(TrainingError, match="1 of"):
        kinds("gymnasium:wide_envs:Wide-v0")
    assert str(2**40) in capsys.readouterr().out


def test_a_space_of_another_shape_than_the_observations_is_refused(broken_envs):
    with pytest.raises(UsageError, match=r"\(1,\).*\(25,\)"):
        kinds("broken_envs:Misshapen")


def test_a_choice_outside_of_its_space_is_wrong():
    spec = make_env("CartPole-v1").spec._replace(observation_space=check_env.spaces.Discrete(3))
    zeros = np.zeros((2, 1))
    played = check_env.Played(
        first_obs=np.array([[1], [3]]),
        obs=np.array([1]),
        reward=zeros,
        terminated=zeros,
        truncated=zeros,
        acting=zeros,
        step_seconds=0.0,
        reset_seconds=0.0,
    )
    assert [x.text for x in check_env._numbers(spec, played) if x.kind == "wrong"] == [
        "the observation of CartPole-v1 is 3, not in its space, Discrete(n=3)"
    ]


def test_parts_without_numbers_are_refused():
    spec = make_env("CartPole-v1").spec
    for space in (spaces.box((0,)), {"x": spaces.box((2, 0)), "y": spaces.box((1,))}):
        with pytest.raises(UsageError, match="no numbers"):
            check_parts(spec._replace(observation_space=space))


def test_numbers_that_are_not_finite_fail_the_check(broken_envs, capsys):
    with pytest.raises(TrainingError, match="2 of"):
        kinds("broken_envs:Walk")
    assert capsys.readouterr().out.count("wrong ") == 2


def test_an_error_while_jax_traces_says_where_in_the_user_s_code(broken_envs):
    line = 1 + BROKEN.splitlines().index("        return state.x + 1 if action > 0 else state.x")
    with pytest.raises(UsageError, match=rf"broken_envs.py, line {line}"):
        kinds("broken_envs:Branching")


def test_an_error_in_another_process_says_where_in_the_user_s_code():
    library = sysconfig.get_path("stdlib")
    trace = (
        f'  File "/home/me/envs.py", line 12, in step\n  File "{library}/json/x.py", '
        "line 3, in y\nKeyError"
    )
    error = KeyError("x")
    error.__cause__ = InItsProcess(trace)
    assert place_in_code(error) == " (/home/me/envs.py, line 12)"
    assert place_in_code(KeyError("x")) == ""


def test_states_without_a_legal_action_count_where_somebody_acts():
    obs = {"action_mask": jnp.array([[[0, 0]], [[1, 0]]])}
    spec = make_env("Catch-bsuite").spec._replace(action_space=check_env.spaces.Discrete(2))
    played = check_env.Played(
        first_obs=obs,
        obs=obs,
        reward=None,
        terminated=None,
        truncated=None,
        acting=jnp.array([[True], [True]]),
        step_seconds=0.0,
        reset_seconds=0.0,
    )
    (found,) = check_env._masks(spec, played)
    assert found.kind == "wrong"
    assert "1 times" in found.text
    (found,) = check_env._masks(spec, played._replace(acting=jnp.array([[False], [True]])))
    assert found.kind == "ok"
