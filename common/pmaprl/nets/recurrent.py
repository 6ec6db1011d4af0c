"""Recurrent layers: what a network carries from step to step, emptied where an episode begins."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pmaprl.device.loops import unrolled_scan
from pmaprl.envs.spaces import Space
from pmaprl.nets.torso import Torso

Kind = Literal["none", "gru", "lstm"]


class Inputs(NamedTuple):
    """What a network with memory takes of each step, [T, N, ...]."""

    obs: jax.Array  # normalised
    first: jax.Array  # bool: an episode begins here
    # [T, N, A + 1] action and reward of the step before, zeros where there was none
    previous: jax.Array

    @classmethod
    def of(cls, seen: Any, action: jax.Array, obs: jax.Array) -> "Inputs":
        """From what was `seen` after an encoded `action` [..., A], with its observations as the
        network takes them.
        """
        previous = jnp.concatenate([action, seen.reward[..., None]], axis=-1)
        return cls(obs, seen.first, jnp.where(seen.first[..., None], 0.0, previous))


class Cell(NamedTuple):
    """A recurrent cell with state of `arrays` arrays [N, H], the first of which is its output."""

    # For each gate, whether its bias lengthens (1) or shortens (-1) what the cell remembers
    keep: tuple[int, ...]
    arrays: int
    # State, gates of the input [N, gates * H], gates of the output before [N, gates * H] -> state
    step: Callable


def gru(state: tuple, x: jax.Array, z: jax.Array) -> tuple:
    """Cho et al. 2014, with the reset gate behind the product, as in cuDNN."""
    (h,) = state
    (x_reset, x_update, x_new), (z_reset, z_update, z_new) = (
        jnp.split(x, 3, axis=-1),
        jnp.split(z, 3, axis=-1),
    )
    update = nn.sigmoid(x_update + z_update)
    new = jnp.tanh(x_new + nn.sigmoid(x_reset + z_reset) * z_new)
    return ((1 - update) * new + update * h,)


def lstm(state: tuple, x: jax.Array, z: jax.Array) -> tuple:
    """Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000."""
    _, c = state
    enter, forget, new, leave = jnp.split(x + z, 4, axis=-1)
    c = nn.sigmoid(forget) * c + nn.sigmoid(enter) * jnp.tanh(new)
    return nn.sigmoid(leave) * jnp.tanh(c), c


CELLS = {
    "gru": Cell(keep=(0, 1, 0), arrays=1, step=gru),
    "lstm": Cell(keep=(-1, 1, 0, 0), arrays=2, step=lstm),
}


class Recurrent(nn.Module):
    """Layers of recurrent cells over a sequence, from inputs [T, N, F] to outputs [T, N, size]."""

    kind: Kind
    size: int
    span: int  # the cells of a new network remember for up to so many steps, see `chrono_biases`
    dtype: Any = None  # of the arithmetic; parameters stay float32

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        """The outputs, and the memories [T, N, ...] after each step, from the memory [N, ...]
        before the first one.

        There are as many layers as in the memory: none where it is (). Where `first` [T, N] is
        true, an episode begins: nothing from before that step reaches it or a later one.
        """
        memories = []
        for layer, state in enumerate(memory):
            memories.append(self._layer(layer, x, first, state))
            x = memories[-1][0].astype(x.dtype)
        return x, tuple(memories)

    def _layer(self, layer: int, x: jax.Array, first: jax.Array, state: tuple) -> tuple:
        cell = CELLS[self.kind]
        width = len(cell.keep) * self.size
        kernel = self.param(f"recurrent_{layer}", orthogonal_gates, (self.size, width))
        bias = self.param(
            f"recurrent_bias_{layer}", partial(chrono_biases, cell.keep, self.span), (width,)
        )
        # The products with the inputs do not wait for one another: one for all steps
        x = nn.Dense(width, dtype=self.dtype, name=f"input_{layer}")(x)  # [T, N, gates * size]
        in_turn = scan_cells if jax.default_backend() == "cpu" else scan_cells_fused
        return in_turn(cell, kernel.astype(x.dtype), bias, x, first, state)


def scan_cells(
    cell: Cell, kernel: jax.Array, bias: jax.Array, x: jax.Array, first: jax.Array, state: tuple
) -> tuple:
    """States [T, N, H] of a cell after each step, from gates of the inputs [T, N, gates * H] and a
    `state` [N, H].
    """

    def step(state, inputs):
        x, first = inputs
        after = cell.step(
            emptied(state, first), x.astype(bias.dtype), gates_of(state, first, kernel, bias)
        )
        return after, after

    return unrolled_scan(step, state, (x, first), on_cpu=4)[1]


def emptied(state: tuple, first: jax.Array) -> tuple:
    return jax.tree.map(lambda s: jnp.where(first[..., None], 0.0, s), state)


def gates_of(state: tuple, first: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Gates of the output before, [..., gates * H].

    In full precision, for gates of cells that last are near 1, where half precision has few
    numbers.
    """
    return jnp.where(first[..., None], 0.0, state[0].astype(kernel.dtype) @ kernel) + bias


def _forward(
    cell: Cell, kernel: jax.Array, bias: jax.Array, x: jax.Array, first: jax.Array, state: tuple
):
    states = scan_cells(cell, kernel, bias, x, first, state)
    return states, (kernel, bias, x, first, state, states)


def _backward(cell: Cell, saved: tuple, grads: tuple) -> tuple:
    kernel, bias, x, first, state, states = saved
    before = jax.tree.map(lambda s, after: jnp.concatenate([s[None], after[:-1]]), state, states)
    before = emptied(before, first)
    gates, pull_gates = jax.vjp(partial(gates_of, before, first), kernel, bias)
    inputs = before, x.astype(bias.dtype), gates

    def step(later, inputs):
        grads, first, *inputs = inputs
        grads = jax.tree.map(jnp.add, grads, later)
        (h, *more), _, of_gates = jax.vjp(cell.step, *inputs)[1](grads)
        h += (of_gates.astype(kernel.dtype) @ kernel.T).astype(h.dtype)
        return emptied((h, *more), first), grads

    nothing = jax.tree.map(jnp.zeros_like, state)
    of_state, grads = unrolled_scan(step, nothing, (grads, first, *inputs), reverse=True, on_cpu=4)
    _, of_x, of_gates = jax.vjp(cell.step, *inputs)[1](grads)
    return (
        *pull_gates(of_gates),
        of_x.astype(x.dtype),
        np.zeros(first.shape, jax.dtypes.float0),
        of_state,
    )


scan_cells_fused = jax.custom_vjp(scan_cells, nondiff_argnums=(0,))
"""The same, whose gradient leaves in the loop over time only what waits for the step after, and
does the rest for all steps at once: half of the kernels, and a tenth slower on a CPU.
"""
scan_cells_fused.defvjp(_forward, _backward)


class RecurrentTorso(nn.Module):
    """Recurrent layers behind a `torso`: features [T, N, size], and the memories [T, N, ...] after
    each step.
    """

    torso: nn.Module
    args: Any

    @classmethod
    def of(cls, args: Any, space: Space, **overrides: Any) -> "RecurrentTorso":
        """Make what the flags describe; `overrides` are those of `Torso.of`."""
        return cls(Torso.of(args, space, **overrides), args)

    @nn.compact
    def __call__(self, inputs: Inputs, memory: Any) -> tuple[jax.Array, Any]:
        args = self.args
        x = self.torso(inputs.obs)
        x = jnp.concatenate([x, inputs.previous], axis=-1) if args.obs_prev_action_reward else x
        return Recurrent(args.rnn, args.rnn_size, args.rnn_span, args.dtype)(
            x, inputs.first, memory
        )


def initial_memory(kind: Kind, size: int, layers: int, count: int) -> tuple:
    """The memory of `count` environments whose episodes begin: for each layer its cell's arrays
    [count, size].
    """
    if kind == "none":
        return ()
    return ((jnp.zeros((count, size)),) * CELLS[kind].arrays,) * layers


def orthogonal_gates(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """An initializer of a kernel [size, gates * size], orthogonal for each gate alone."""
    size, width = shape
    keys = jax.random.split(key, width // size)
    return jnp.concatenate(
        [nn.initializers.orthogonal()(one, (size, size)) for one in keys], axis=1
    )


def chrono_biases(keep: tuple[int, ...], span: int, key: jax.Array, shape: tuple[int]) -> jax.Array:
    """An initializer of biases [gates * size] with which cells remember, each for a time of its
    own.

    After T steps of a cell about a third of its state is left (Tallec and Ollivier 2018), with T
    uniform between 2 and `span`, and 2 for all up to a span of 2. Were all times short, no gradient
    would reach back to what came in long ago. `keep` says what the bias of each gate does to the
    time.
    """
    times = jax.random.uniform(key, (shape[0] // len(keep),), minval=1.0, maxval=max(span - 1, 1))
    return jnp.concatenate([sign * jnp.log(times) for sign in keep])
