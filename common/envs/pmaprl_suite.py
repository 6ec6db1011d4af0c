"""Environments of this kit: `pmaprl:PartialCartPole-v1`, without velocities, and the game `pmaprl:Reversi-v0`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.envs import gymnax_suite
from common.envs.environment import Env, Transition, Wrapper
from common.envs.masks import MASK, sample_legal
from common.envs.spaces import Box, Dict, Discrete, box
from common.envs.suite_tools import PARTIAL, WITHOUT_VELOCITIES, changed_params, check_known


def ids() -> list[str]:
    return [*(PARTIAL + whole for whole in WITHOUT_VELOCITIES), "Reversi-v0"]


def make(name: str, env_id: str, env_params: dict[str, Any]) -> Env:
    check_known(name, env_id, ids())
    if env_id == "Reversi-v0":
        return Reversi(name, **changed_params(name, {"show_mask": True}, env_params))
    whole = env_id.removeprefix(PARTIAL)
    return PartialEnv(name, gymnax_suite.make(whole, whole, env_params), WITHOUT_VELOCITIES[whole])


class PartialEnv(Wrapper):
    """Another environment of which only some numbers are observed."""

    def __init__(self, name: str, whole: Env, seen: tuple[int, ...]):
        self._seen, space = np.array(seen), whole.observation_space
        super().__init__(name, whole, Box(space.low[self._seen], space.high[self._seen], (len(seen),)))

    def begin(self, key: jax.Array) -> tuple[Any, Any]:
        obs, state = self.wrapped.begin(key)
        return obs[self._seen], state

    def advance(self, key: jax.Array, state: Any, action: jax.Array) -> Transition:
        reached = self.wrapped.advance(key, state, action)
        return reached._replace(obs=reached.obs[self._seen])


BOARD_SIZE = 6
PASS = BOARD_SIZE * BOARD_SIZE  # an action: no square
MOVES = Discrete(PASS + 1)
DIRECTIONS = tuple((down, right) for down in (-1, 0, 1) for right in (-1, 0, 1) if down or right)


class State(NamedTuple):
    board: jax.Array  # [6, 6] int8: 1 where we are, -1 where the other one is


class Reversi(Env):
    """1 for more discs than the other one in the end, -1 for fewer. Half of the games the other one begins.

    Observes both players' discs [6, 6, 2], and the legal moves as `action_mask` [37]: the squares, and to pass, which
    is legal where no square is. An illegal move loses the game.
    """

    def __init__(self, name: str, show_mask: bool = True):
        """Without `show_mask` the policy has to learn by losing what is illegal."""
        self.show_mask = show_mask
        discs, moves = (box(shape, 0.0, 1.0) for shape in ((BOARD_SIZE, BOARD_SIZE, 2), (PASS + 1,)))
        space = Dict({MASK: moves, "discs": discs}) if show_mask else discs
        super().__init__(name, None, space, MOVES, max_steps=BOARD_SIZE * BOARD_SIZE)

    def begin(self, key: jax.Array) -> tuple[Any, State]:
        first_key, move_key = jax.random.split(key)
        board = jnp.zeros((BOARD_SIZE, BOARD_SIZE), jnp.int8)
        board = board.at[2, 3].set(1).at[3, 2].set(1).at[2, 2].set(-1).at[3, 3].set(-1)
        begun = -after(sample_legal(move_key, MOVES, legal_moves(-board)), -board)
        board = jnp.where(jax.random.bernoulli(first_key), begun, board)
        return self.observe(board), State(board)

    def advance(self, key: jax.Array, state: State, action: jax.Array) -> Transition:
        illegal = ~legal_moves(state.board)[action]
        board = after(action, state.board)
        board = -after(sample_legal(key, MOVES, legal_moves(-board)), -board)
        over = legal_moves(board)[PASS] & legal_moves(-board)[PASS]
        reward = jnp.where(illegal, -1.0, jnp.where(over, jnp.sign(jnp.sum(board.astype(jnp.float32))), 0.0))
        return Transition(self.observe(board), State(board), reward, over | illegal, jnp.bool_(False))

    def observe(self, board: jax.Array) -> Any:
        discs = jnp.stack([board == 1, board == -1], axis=-1).astype(jnp.float32)
        return {MASK: legal_moves(board), "discs": discs} if self.show_mask else discs


def legal_moves(board: jax.Array) -> jax.Array:
    """What the player whose discs are 1 may do, [37]."""
    ours, theirs = board == 1, board == -1
    ends = [moved(enclosed(ours, theirs, direction), direction) for direction in DIRECTIONS]
    squares = jnp.any(jnp.stack(ends), axis=0) & (board == 0)
    return jnp.append(squares.ravel(), ~jnp.any(squares))


def after(action: jax.Array, board: jax.Array) -> jax.Array:
    """The board after a legal move of the player whose discs are 1."""
    square = (jnp.arange(PASS) == action).reshape(BOARD_SIZE, BOARD_SIZE)
    turned = square
    for direction in DIRECTIONS:
        between = enclosed(square, board == -1, direction)
        turned |= between & jnp.any(moved(between, direction) & (board == 1))
    return jnp.where(turned, jnp.int8(1), board)


def enclosed(start: jax.Array, theirs: jax.Array, direction: tuple[int, int]) -> jax.Array:
    """Those of `theirs` that follow on a square of `start` in one direction without a gap, all [6, 6] bool."""
    line = moved(start, direction) & theirs
    for _ in range(BOARD_SIZE - 3):
        line |= moved(line, direction) & theirs
    return line


def moved(squares: jax.Array, direction: tuple[int, int]) -> jax.Array:
    """All squares [6, 6] one further in a direction; what leaves the board is gone."""
    down, right = direction
    return jnp.pad(squares, 1)[1 - down : 1 - down + BOARD_SIZE, 1 - right : 1 - right + BOARD_SIZE]
