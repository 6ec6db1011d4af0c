"""Connect four against a player who drops into random columns: a small game in which not every action is legal."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.envs.environment import Env, Transition
from common.envs.masks import ILLEGAL, MASK
from common.envs.spaces import Box, Dict, Discrete

ROWS, COLUMNS, IN_A_ROW = 6, 7, 4
LINES = ((0, 1), (1, 0), (1, 1), (1, -1))  # directions, as rows and columns


class State(NamedTuple):
    board: jax.Array  # [6, 7] int8: 1 where we are, -1 where the other one is, the lowest row last


class ConnectFour(Env):
    """1 for four in a row, -1 where the other one has them, 0 for a full board. Half of the games the other one begins.

    Observes both players' discs [6, 7, 2], and the columns that are not full as `action_mask`. A disc in a full column
    loses the game.
    """

    def __init__(self, name: str, show_mask: bool = True):
        """Without `show_mask` the policy has to learn by losing what is illegal."""
        self.show_mask = show_mask
        discs, columns = (Box(np.zeros(shape), np.ones(shape), shape) for shape in ((ROWS, COLUMNS, 2), (COLUMNS,)))
        space = Dict({MASK: columns, "discs": discs}) if show_mask else discs
        super().__init__(name, None, space, Discrete(COLUMNS), max_steps=ROWS * COLUMNS)

    def begin(self, key: jax.Array) -> tuple[Any, State]:
        first_key, move_key = jax.random.split(key)
        empty = jnp.zeros((ROWS, COLUMNS), jnp.int8)
        begun = drop(empty, random_column(move_key, empty), -1)
        board = jnp.where(jax.random.bernoulli(first_key), begun, empty)
        return self.observe(board), State(board)

    def advance(self, key: jax.Array, state: State, action: jax.Array) -> Transition:
        illegal = ~free(state.board)[action]
        ours = drop(state.board, action, 1)
        won = has_four(ours == 1)
        theirs = drop(ours, random_column(key, ours), -1)
        board = jnp.where(won | illegal, ours, theirs)
        lost = has_four(board == -1) | illegal
        reward = jnp.where(lost, -1.0, jnp.where(won, 1.0, 0.0))
        over = won | lost | ~jnp.any(free(board))
        return Transition(self.observe(board), State(board), reward, over, jnp.bool_(False))

    def observe(self, board: jax.Array) -> Any:
        discs = jnp.stack([board == 1, board == -1], axis=-1).astype(jnp.float32)
        return {MASK: free(board), "discs": discs} if self.show_mask else discs


def free(board: jax.Array) -> jax.Array:
    """Columns that are not full, [7]."""
    return board[0] == 0


def drop(board: jax.Array, column: jax.Array, player: int) -> jax.Array:
    """The board with one more disc; the same where the column is full."""
    height = jnp.sum(board[:, column] != 0)
    return jnp.where(height < ROWS, board.at[ROWS - 1 - height, column].set(player), board)


def random_column(key: jax.Array, board: jax.Array) -> jax.Array:
    """One that is not full, if there is one."""
    return jax.random.categorical(key, jnp.where(free(board), 0.0, ILLEGAL))


def has_four(discs: jax.Array) -> jax.Array:
    """Whether four of the `discs` [6, 7] stand in a row, a column or a diagonal."""
    reach, found = IN_A_ROW - 1, jnp.bool_(False)
    for down, right in LINES:
        height, width = ROWS - reach * down, COLUMNS - reach * abs(right)
        left = reach if right < 0 else 0
        starts = [(step * down, left + step * right) for step in range(IN_A_ROW)]
        found |= jnp.any(jnp.stack([discs[row : row + height, col : col + width] for row, col in starts]).all(axis=0))
    return found
