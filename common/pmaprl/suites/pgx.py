"""pgx's games: `pgx:connect_four`. Where there are several players, the others move at random
unless told otherwise.
"""

import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from pmaprl.envs.environment import LONGEST_HORIZON, Env, Step
from pmaprl.envs.masks import MASK
from pmaprl.envs.spaces import Discrete, box, sample
from pmaprl.envs.suite_tools import changed_params, import_package

ALL_LEGAL = "minatar"  # games in which every action always is: they need no mask
HEIGHT = 300  # pixels of a picture, and of an inch in one that is given in points
DPI = 96


def ids() -> list[str]:
    return list(import_package("pgx").available_envs())


class State(NamedTuple):
    game: Any  # pgx's own state
    seat: jax.Array  # [] which of the players we are
    time: jax.Array  # [] our moves so far


class SuiteEnv(Env):
    """One of pgx's games, on a seat that is drawn for each of them. A step is our move and those of
    the others.
    """

    _opponent: Callable | None = None

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        # Some games may go on without end
        known = {"max_steps": LONGEST_HORIZON, "show_mask": True}
        params = known | changed_params(name, known, env_params)
        inner = import_package("pgx").make(env_id)
        self.is_game = inner.num_players > 1
        # Else the policy learns by losing
        self._masks = params["show_mask"] and not env_id.startswith(ALL_LEGAL)
        seen = box(inner.observation_shape)
        actions = Discrete(inner.num_actions)
        space = {MASK: box((actions.n,), 0.0, 1.0), "obs": seen} if self._masks else seen
        super().__init__(name, inner, space, actions, params["max_steps"])

    def begin(self, key: jax.Array) -> tuple[Any, State]:
        seat_key, first_key, key = jax.random.split(key, 3)
        seat = jax.random.randint(seat_key, (), 0, self.inner.num_players)

        def begun(key):
            game_key, others_key = jax.random.split(key)
            return self._others_move(others_key, self.inner.init(game_key), seat)[0]

        def another(carry):
            key, game_key = jax.random.split(carry[0])
            return key, begun(game_key)

        game = begun(first_key)
        if self.is_game:  # the others may have ended it before our first move
            _, game = jax.lax.while_loop(lambda carry: carry[1].terminated, another, (key, game))
        return self._observed(game), State(game, seat, jnp.int32(0))

    def advance(self, key: jax.Array, state: State, action: jax.Array) -> Step:
        move_key, others_key = jax.random.split(key)
        game = self.inner.step(state.game, action, move_key)
        earned = game.rewards[state.seat]
        game, more = self._others_move(others_key, game, state.seat)
        time = state.time + 1
        outcome = earned + more, game.terminated, time >= self.declared_steps
        return Step(self._observed(game), State(game, state.seat, time), *outcome)

    def against(self, opponent: Callable[[jax.Array, Any], jax.Array]) -> Env:
        other = copy.copy(self)
        other._opponent = opponent
        return other

    def frame(self, state: State) -> np.ndarray:
        import matplotlib  # slow; its fonts are always there
        import resvg_py

        fonts = {
            "font_dirs": [f"{matplotlib.get_data_path()}/fonts/ttf"],
            "skip_system_fonts": True,
        }
        families = {f"{kind}_family": "DejaVu Sans" for kind in ("font", "serif", "sans_serif")}
        svg = state.game.to_svg(color_theme="light")
        picture = resvg_py.svg_to_bytes(svg, height=HEIGHT, dpi=DPI, **fonts, **families)
        return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))

    def _others_move(self, key: jax.Array, game: Any, seat: jax.Array) -> tuple[Any, jax.Array]:
        """The game when it is our turn again, or over, and what we earned meanwhile."""
        if not self.is_game:
            return game, jnp.float32(0)

        def move(carry):
            key, game, earned = carry
            key, action_key, step_key = jax.random.split(key, 3)
            if self._opponent:
                action = self._opponent(action_key, self._observed(game))
            else:
                action = sample(action_key, self.action_space, game.legal_action_mask)
            game = self.inner.step(game, action, step_key)
            return key, game, earned + game.rewards[seat]

        def theirs(carry):
            _, game, _ = carry
            return (game.current_player != seat) & ~game.terminated

        _, game, earned = jax.lax.while_loop(theirs, move, (key, game, jnp.float32(0)))
        return game, earned

    def _observed(self, game: Any) -> Any:
        return (
            {MASK: game.legal_action_mask, "obs": game.observation}
            if self._masks
            else game.observation
        )
