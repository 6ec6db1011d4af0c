"""Action distributions as small records, and the policy's head, which returns one.

`Categoricals` covers Discrete and MultiDiscrete actions, `Normal` or `SquashedNormal` a Box,
`Joint` several parts. Randomness comes in as an array that `action_noise` draws beforehand, since a
rollout draws the noise of all steps in one pass.
"""

import math
import operator
from collections.abc import Iterable
from functools import reduce
from typing import Any, NamedTuple, NoReturn

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from pmaprl.device.keys import categorical_noise
from pmaprl.envs import spaces
from pmaprl.envs.masks import MASK, action_scale, legal_actions, to_units, with_a_choice
from pmaprl.envs.spaces import (
    ILLEGAL,
    Box,
    Discrete,
    MultiDiscrete,
    Space,
    encode,
    leaves,
    masks_of_parts,
)

LOG_2PI = math.log(2 * math.pi)


def without_illegal(logits: Array, legal: Array | None) -> Array:
    """Set logits, or Q values, [..., n] of choices that are not `legal` to the lowest number."""
    return logits if legal is None else jnp.where(legal, logits, ILLEGAL)


def legal_choices(obs: Any, num_actions: int) -> Array | None:
    """Legal actions at `obs`, [..., n] bool: all where none is legal; None without a mask."""
    legal = legal_actions(obs)
    return None if legal is None else with_a_choice(legal, (num_actions,))


class Categoricals(struct.PyTreeNode):
    """Independent categorical components over the last axis.

    One component is the plain Discrete case.

    Attributes:
        logits: [..., sum(nvec)] unnormalized log-probabilities of the choices.
        nvec: number of choices of each component.
        scalar: True if actions are [...] (Discrete), not [..., len(nvec)].
        legal: [..., sum(nvec)] bool. The other choices have probability zero. None: all are legal.
        counted: [..., len(nvec)] bool, True for components that sums are over (see `restrict_to`).
            None: all.
    """

    logits: Array
    nvec: tuple[int, ...] = struct.field(pytree_node=False)
    scalar: bool = struct.field(pytree_node=False)
    legal: Array | None = None
    counted: Array | None = None

    def only(self, legal: Array | None) -> "Categoricals":
        """Rule out choices that are not `legal` [..., sum(nvec)].

        A component without a legal choice keeps all of its choices.
        """
        if legal is None:
            return self
        legal = with_a_choice(legal, self.nvec)
        return self.replace(logits=without_illegal(self.logits, legal), legal=legal)

    def restrict_to(self, counted: Array | None) -> "Categoricals":
        """Restrict log-probabilities, entropies and divergences to some components of actions.

        Another policy has chosen the other components, so they add no gradient.

        Args:
            counted: [..., A] bool, True for components that count. None: all.
        """
        return self if counted is None else self.replace(counted=counted)

    def sample(self, noise: Array) -> Array:
        """Sample by the inverse CDF.

        Args:
            noise: [..., len(nvec)] uniform numbers in (0, 1), one for each component.

        Returns:
            Actions [...] or [..., len(nvec)].
        """
        cdfs = [jnp.cumsum(jax.nn.softmax(part), axis=-1) for part in self._parts(self.logits)]
        picks = []
        if self.legal is None:
            for index, cdf in enumerate(cdfs):
                is_below = cdf[..., :-1] <= noise[..., index : index + 1]
                picks.append(jnp.sum(is_below, axis=-1))
            return self._join(picks)
        for index, (cdf, legal) in enumerate(zip(cdfs, self._parts(self.legal), strict=True)):
            # Rounding may let a cdf rise a little at an illegal choice, and end below the noise
            is_candidate = legal & (cdf > noise[..., index : index + 1])
            last = legal.shape[-1] - 1 - jnp.argmax(legal[..., ::-1], axis=-1)
            is_found = jnp.any(is_candidate, axis=-1)
            picks.append(jnp.where(is_found, jnp.argmax(is_candidate, axis=-1), last))
        return self._join(picks)

    def sample_with_key(self, key: Array) -> Array:
        """Sample with noise that is drawn from `key`."""
        shape = (*self.logits.shape[:-1], len(self.nvec))
        return self.sample(categorical_noise(key, shape))

    def mode(self) -> Array:
        """Most likely action."""
        return self._join([jnp.argmax(part, axis=-1) for part in self._parts(self.logits)])

    def log_prob(self, action: Array) -> Array:
        """Log-probability [...] of an action, summed over components."""
        action = action[..., None] if self.scalar else action
        terms = []
        for index, log_p in enumerate(self._log_probs()):
            one_hot = jax.nn.one_hot(action[..., index], self.nvec[index])
            terms.append(jnp.sum(one_hot * log_p, axis=-1))
        return self._sum(terms)

    def entropy(self) -> Array:
        """Entropy [...] in nats, summed over components."""
        terms = [-jnp.sum(jnp.exp(log_p) * log_p, axis=-1) for log_p in self._log_probs()]
        return self._sum(terms)

    def kl(self, other: "Categoricals") -> Array:
        """KL(self || other) [...] in nats.

        The sum is over the components in `other.counted`, or else in `self.counted`.
        """
        counted = self.counted if other.counted is None else other.counted
        terms = []
        for log_p, log_q in zip(self._log_probs(), other._log_probs(), strict=True):
            terms.append(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))
        return self.restrict_to(counted)._sum(terms)

    def symmetric_kl_to_uniform(self) -> Array:
        """Half of KL(p || u) + KL(u || p) [...], summed over components.

        u is uniform over the legal choices.
        """
        legal = jnp.ones(self.logits.shape, bool) if self.legal is None else self.legal
        terms = []
        for log_p, part in zip(self._log_probs(), self._parts(legal), strict=True):
            n = jnp.maximum(jnp.sum(part, axis=-1, keepdims=True), 1)
            differences = (jnp.exp(log_p) - 1 / n) * (log_p + jnp.log(n))
            terms.append(0.5 * jnp.sum(differences, axis=-1, where=part))
        return self._sum(terms)

    def _parts(self, x: Array) -> list[Array]:
        return jnp.split(x, np.cumsum(self.nvec)[:-1], axis=-1)

    def _log_probs(self) -> list[Array]:
        return [jax.nn.log_softmax(part) for part in self._parts(self.logits)]

    def _sum(self, terms: Iterable[Array]) -> Array:
        """Sum the terms [...] of the components, or of those that are counted."""
        if self.counted is None:
            return _added(terms)
        return _added(jnp.where(self.counted[..., index], x, 0.0) for index, x in enumerate(terms))

    def _join(self, picks: list[Array]) -> Array:
        action = picks[0] if self.scalar else jnp.stack(picks, axis=-1)
        return action.astype(jnp.int32)


class Normal(struct.PyTreeNode):
    """Independent normal distributions of the dimensions of a flattened Box action.

    They are not squashed: the environment clips actions to its bounds. Parameters and densities are
    in units of the bounds, actions are in the environment's units.

    Attributes:
        mean: [..., A] means, within -1 .. 1 if actions are within their bounds.
        log_std: [..., A] logarithms of the standard deviations.
        counted: [..., A] bool, True for dimensions that sums are over (see `restrict_to`). None:
            all.
        scale: [A] units of the environment's actions (see `action_scale`).
        offset: [A] centres of the environment's actions.
    """

    mean: Array
    log_std: Array
    counted: Array | None = None
    scale: tuple[float, ...] = struct.field(pytree_node=False, default=(1.0,))
    offset: tuple[float, ...] = struct.field(pytree_node=False, default=(0.0,))

    def restrict_to(self, counted: Array | None) -> "Normal":
        """Restrict log-probabilities, entropies and divergences to some components of actions.

        Another policy has chosen the other components, so they add no gradient.

        Args:
            counted: [..., A] bool, True for components that count. None: all.
        """
        return self if counted is None else self.replace(counted=counted)

    def sample(self, noise: Array) -> Array:
        """Sample actions [..., A] by standard normal `noise` [..., A]."""
        std = jnp.exp(self.log_std)
        return self._action(self.mean + std * noise)

    def sample_with_key(self, key: Array) -> Array:
        """Sample with noise that is drawn from `key`."""
        return self.sample(jax.random.normal(key, self.mean.shape))

    def mode(self) -> Array:
        """Most likely action."""
        return self._action(self.mean)

    def log_prob(self, action: Array) -> Array:
        """Log-density [...] of an action before clipping."""
        units = to_units(action, self.scale, self.offset)
        z = (units - self.mean) * jnp.exp(-self.log_std)
        terms = z**2 + 2 * self.log_std + LOG_2PI
        return -0.5 * jnp.sum(terms, axis=-1, where=self.counted)

    def entropy(self) -> Array:
        """Differential entropy [...] in nats."""
        terms = self.log_std + 0.5 * (1 + LOG_2PI)
        return jnp.sum(terms, axis=-1, where=self.counted)

    def kl(self, other: "Normal") -> Array:
        """KL(self || other) [...] in nats.

        The sum is over the dimensions in `other.counted`, or else in `self.counted`.
        """
        counted = self.counted if other.counted is None else other.counted
        log_variance_ratio = 2 * (self.log_std - other.log_std)
        z = (self.mean - other.mean) * jnp.exp(-other.log_std)
        terms = jnp.expm1(log_variance_ratio) - log_variance_ratio + z**2
        return 0.5 * jnp.sum(terms, axis=-1, where=counted)

    def symmetric_kl_to_uniform(self) -> NoReturn:
        """Refuse: no density is uniform over all numbers."""
        raise NotImplementedError("a Normal has no divergence to a uniform policy")

    def _action(self, x: Array) -> Array:
        return x * jnp.array(self.scale) + jnp.array(self.offset)


class Joint(struct.PyTreeNode):
    """Independent distributions of the parts of an action.

    `parts` is a tree like the action. Log-probabilities, entropies and divergences are sums over
    the parts.
    """

    parts: Any

    def restrict_to(self, counted: Array | None) -> "Joint":
        """Stay as it is: all parts count. Raises ValueError for a `counted` other than None."""
        if counted is not None:
            raise ValueError("no environment with teams has actions of several parts")
        return self

    def sample(self, noise: Any) -> Any:
        """Sample by the noise of each part."""
        return self._map("sample", noise)

    def sample_with_key(self, key: Array) -> Any:
        """Sample with noise that is drawn from `key`."""
        parts, structure = jax.tree.flatten(self.parts, is_leaf=_is_part)
        keys = [key] if len(parts) == 1 else list(jax.random.split(key, len(parts)))
        return self._map("sample_with_key", jax.tree.unflatten(structure, keys))

    def mode(self) -> Any:
        """Most likely action."""
        return self._map("mode")

    def log_prob(self, action: Any) -> Array:
        """Log-probability [...] of an action."""
        return self._sum("log_prob", action)

    def entropy(self) -> Array:
        """Entropy [...] in nats."""
        return self._sum("entropy")

    def kl(self, other: "Joint") -> Array:
        """KL(self || other) [...] in nats."""
        return self._sum("kl", other.parts)

    def symmetric_kl_to_uniform(self) -> Array:
        """Half of KL(p || u) + KL(u || p) [...], where u is uniform over the legal choices."""
        return self._sum("symmetric_kl_to_uniform")

    def _map(self, method: str, *trees: Any) -> Any:
        def call(part: Any, *arguments: Any) -> Any:
            return getattr(part, method)(*arguments)

        return jax.tree.map(call, self.parts, *trees, is_leaf=_is_part)

    def _sum(self, method: str, *trees: Any) -> Array:
        return _added(jax.tree.leaves(self._map(method, *trees)))


def _added(terms: Iterable[Array]) -> Array:
    """Add arrays of the same shape, one at least."""
    return reduce(operator.add, terms)


def _is_part(x: Any) -> bool:
    return isinstance(x, (Categoricals, Normal))


class SquashedNormal(NamedTuple):
    """Tanh of independent normal distributions.

    Actions are flat, [..., A], and within -1 .. 1.
    """

    mean: Array  # [..., A] means before the tanh
    log_std: Array  # [..., A] logarithms of the standard deviations before the tanh

    @classmethod
    def of(
        cls,
        outputs: Array,
        low: float,
        squash: bool,
        high: float = 2.0,
    ) -> "SquashedNormal":
        """Make the distribution from a network's outputs.

        Args:
            outputs: [..., 2 * A] means, then log_std.
            low: lower bound of log_std.
            squash: whether a tanh keeps log_std within the bounds; else it is clipped.
            high: upper bound of log_std.
        """
        mean, log_std = jnp.split(outputs, 2, axis=-1)
        if squash:
            log_std = low + 0.5 * (high - low) * (jnp.tanh(log_std) + 1)
        else:
            log_std = jnp.clip(log_std, low, high)
        return cls(mean=mean, log_std=log_std)

    def sample(self, noise: Array) -> Array:
        """Sample actions [..., A] by standard normal `noise` [..., A]."""
        action, _ = self.sample_with_log_prob(noise)
        return action

    def sample_with_log_prob(self, noise: Array) -> tuple[Array, Array]:
        """Sample actions, with their log-probabilities.

        The change of variables is taken at the unsquashed u (Haarnoja et al. 2018, appendix C), as
        1 - tanh(u)^2 = 4 exp(-2u) / (1 + exp(-2u))^2: exact where tanh(u) rounds to 1.

        Args:
            noise: [..., A] standard normal.

        Returns:
            Actions [..., A], and log-densities [...] within -1 .. 1.
        """
        u = self.mean + jnp.exp(self.log_std) * noise
        normal = -0.5 * (noise**2 + LOG_2PI) - self.log_std
        slope = 2 * (math.log(2) - u - jax.nn.softplus(-2 * u))
        return jnp.tanh(u), jnp.sum(normal - slope, axis=-1)

    def sample_with_key(self, key: Array) -> Array:
        """Sample with noise that is drawn from `key`."""
        return self.sample(jax.random.normal(key, self.mean.shape))

    def mode(self) -> Array:
        """Tanh of the mean, which plays as the best known action."""
        return jnp.tanh(self.mean)


Distribution = Categoricals | Normal | Joint


def encode_action(action: Any, space: Space) -> Array:
    """Encode actions as the input of a network.

    Args:
        action: sampled actions [..., *action].
        space: the action space.

    Returns:
        [..., A] numbers: choices one-hot, Box actions in units of their bounds.
    """

    def encoded(leaf, x):
        if isinstance(leaf, Box):
            return to_units(x, *action_scale(leaf))
        # Actions of several components are flat here
        return encode(x, leaf if isinstance(leaf, Discrete) else MultiDiscrete(leaf.nvec))

    parts = [encoded(leaf, x) for _, leaf, x in leaves(space, action)]
    return jnp.concatenate(parts, axis=-1)


class QHead(nn.Module):
    """Head that predicts Q values [..., n] of Discrete actions from features [..., F].

    Actions that are illegal at `obs` get a value as low as possible.
    """

    num_actions: int

    @nn.compact
    def __call__(self, x: Array, obs: Any = None) -> Array:
        q = nn.Dense(self.num_actions)(x)
        return without_illegal(q, legal_choices(obs, self.num_actions))


def epsilon_greedy(
    q: Array,
    epsilon: float | Array,
    obs: Any = None,
) -> Categoricals:
    """Policy that is greedy, or random with probability `epsilon`.

    Args:
        q: [..., n] Q values.
        epsilon: probability of a random action.
        obs: observations [..., ...], whose mask says which actions are legal.

    Returns:
        The distribution over actions.
    """
    num_actions = q.shape[-1]
    legal = legal_choices(obs, num_actions)
    if legal is None:
        uniform = 1 / num_actions
    else:
        uniform = legal / jnp.maximum(jnp.sum(legal, axis=-1, keepdims=True), 1)
    best = jnp.argmax(without_illegal(q, legal), axis=-1)
    greedy = jax.nn.one_hot(best, num_actions)
    logits = jnp.log((1 - epsilon) * greedy + epsilon * uniform)
    return Categoricals(logits, (num_actions,), scalar=True).only(legal)


class PolicyHead(nn.Module):
    """Head that makes a distribution over actions from features [..., F].

    It is categorical for choices, over those that are legal at `obs`; normal for a Box; joint for
    several parts. A normal one is in units of the bounds (see `action_scale`), and its deviation
    does not depend on observations. Box actions are flat here; the environment shapes them. The
    gain of 0.01 makes actions about equally likely at first.
    """

    space: Space

    @nn.compact
    def __call__(self, x: Array, obs: Any = None) -> Distribution:
        legal = legal_actions(obs)
        if not isinstance(self.space, spaces.Leaf):
            return self._joint(x, legal)
        init = nn.initializers.orthogonal(0.01)
        if isinstance(self.space, Box):
            size = math.prod(self.space.shape)
            mean = nn.Dense(size, kernel_init=init)(x)
            log_std = self.param("log_std", nn.initializers.zeros, (size,))
            scale, offset = action_scale(self.space)
            return Normal(
                mean=mean,
                log_std=jnp.broadcast_to(log_std, mean.shape),
                scale=tuple(scale.tolist()),
                offset=tuple(offset.tolist()),
            )
        logits = nn.Dense(sum(self.space.nvec), kernel_init=init)(x)
        is_scalar = isinstance(self.space, Discrete)
        return Categoricals(logits, self.space.nvec, scalar=is_scalar).only(legal)

    def _joint(self, x: Array, legal: Any) -> Joint:
        """Make a head for each part of the action."""
        parts = []
        masks = masks_of_parts(legal, self.space)
        for (name, leaf), mask in zip(leaves(self.space), masks, strict=True):
            head = PolicyHead(leaf, name=f"part_{name.replace('/', '_')}")
            parts.append(head(x, None if mask is None else {MASK: mask}))
        return Joint(spaces.as_tree(parts, self.space))
