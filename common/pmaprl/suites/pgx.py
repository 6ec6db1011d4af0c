"""pgx's games: `pgx:connect_four`.

In games of several players the others move at random, unless `against` replaces them.
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
from pmaprl.envs.foreign_code import import_package
from pmaprl.envs.masks import MASK
from pmaprl.envs.spaces import Discrete, box, sample
from pmaprl.envs.suite_params import changed_params

ALL_LEGAL = "minatar"  # beginning of the names of games without illegal actions, nor masks
HEIGHT = 300  # height of a picture in pixels
DPI = 96  # pixels per inch of pictures whose size is in points


def ids() -> list[str]:
    return list(import_package("pgx").available_envs())


class State(NamedTuple):
    """State of a game, and our part in it."""

    game: Any  # pgx's own state
    seat: jax.Array  # [] index of our player
    time: jax.Array  # [] number of our moves so far


class SuiteEnv(Env):
    """One of pgx's games, on a seat that is drawn for each episode.

    A step is our move and the moves of the other players.
    """

    _opponent: Callable | None = None

    def __init__(self, name: str, env_id: str, env_params: dict[str, Any]):
        # The limit is for games that may go on without end
        known = {"max_steps": LONGEST_HORIZON, "show_mask": True}
        params = known | changed_params(name, known, env_params)
        inner = import_package("pgx").make(env_id)
        self.is_game = inner.num_players > 1
        # Without a mask an illegal move loses, and the policy learns by that
        self._masks = params["show_mask"] and not env_id.startswith(ALL_LEGAL)
        observations = box(inner.observation_shape)
        actions = Discrete(inner.num_actions)
        if self._masks:
            observations = {MASK: box((actions.n,), 0.0, 1.0), "obs": observations}
        super().__init__(name, inner, observations, actions, params["max_steps"])

    def begin(self, key: jax.Array) -> tuple[Any, State]:
        seat_key, first_key, key = jax.random.split(key, 3)
        seat = jax.random.randint(seat_key, (), 0, self.inner.num_players)

        def new_game(key):
            game_key, others_key = jax.random.split(key)
            game, _ = self._others_move(others_key, self.inner.init(game_key), seat)
            return game

        def is_over(carry):
            _, game = carry
            return game.terminated

        def another(carry):
            key, _ = carry
            key, game_key = jax.random.split(key)
            return key, new_game(game_key)

        game = new_game(first_key)
        if self.is_game:  # the others may have ended it before our first move
            _, game = jax.lax.while_loop(is_over, another, (key, game))
        return self._observed(game), State(game, seat, jnp.int32(0))

    def advance(self, key: jax.Array, state: State, action: jax.Array) -> Step:
        move_key, others_key = jax.random.split(key)
        game = self.inner.step(state.game, action, move_key)
        reward = game.rewards[state.seat]
        game, later_reward = self._others_move(others_key, game, state.seat)
        time = state.time + 1
        return Step(
            obs=self._observed(game),
            state=State(game, state.seat, time),
            reward=reward + later_reward,
            terminated=game.terminated,
            truncated=time >= self.declared_steps,
        )

    def against(self, opponent: Callable[[jax.Array, Any], jax.Array]) -> Env:
        other = copy.copy(self)
        other._opponent = opponent
        return other

    def frame(self, state: State) -> np.ndarray:
        import matplotlib  # slow to import; its fonts are installed everywhere
        import resvg_py

        svg = state.game.to_svg(color_theme="light")
        picture = resvg_py.svg_to_bytes(
            svg,
            height=HEIGHT,
            dpi=DPI,
            font_dirs=[f"{matplotlib.get_data_path()}/fonts/ttf"],
            skip_system_fonts=True,
            font_family="DejaVu Sans",
            serif_family="DejaVu Sans",
            sans_serif_family="DejaVu Sans",
        )
        return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB"))

    def _others_move(self, key: jax.Array, game: Any, seat: jax.Array) -> tuple[Any, jax.Array]:
        """Let the others move.

        Returns:
            The game when it is our turn again, or over, and our reward [] meanwhile.
        """
        if not self.is_game:
            return game, jnp.float32(0)

        def move(carry):
            key, game, reward = carry
            key, action_key, step_key = jax.random.split(key, 3)
            if self._opponent:
                action = self._opponent(action_key, self._observed(game))
            else:
                action = sample(action_key, self.action_space, game.legal_action_mask)
            game = self.inner.step(game, action, step_key)
            return key, game, reward + game.rewards[seat]

        def is_their_turn(carry):
            _, game, _ = carry
            return (game.current_player != seat) & ~game.terminated

        _, game, reward = jax.lax.while_loop(is_their_turn, move, (key, game, jnp.float32(0)))
        return game, reward

    def _observed(self, game: Any) -> Any:
        if not self._masks:
            return game.observation
        return {MASK: game.legal_action_mask, "obs": game.observation}
