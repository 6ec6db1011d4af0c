"""An environment in JAX, and the same environment with pictures of its own.

python algos/ppo_pmap.py --env my_envs:Walk
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces


@struct.dataclass
class State(environment.EnvState):
    place: jax.Array


class Walk(environment.Environment):
    default_params = environment.EnvParams(max_steps_in_episode=20)  # its time limit

    def reset_env(self, key, params):
        state = State(time=0, place=jax.random.uniform(key))
        return state.place[None], state

    def step_env(self, key, state, action, params):
        state = State(time=state.time + 1, place=state.place + 0.1 * (2 * action - 1))
        reward, terminated = state.place, jnp.abs(state.place) > 2
        return state.place[None], state, reward, terminated, {}

    def observation_space(self, params):
        return spaces.Box(-2.1, 2.1, (1,))

    def action_space(self, params):
        return spaces.Discrete(2)


class Drawn(Walk):
    obs_names = ("place",)  # names of the numbers, for GIFs without pictures

    def frame(self, state, params):
        picture = np.full((60, 230, 3), 255, np.uint8)
        middle = 115 + round(50 * float(state.place))
        picture[20:40, middle - 10 : middle + 10] = 0, 114, 178
        return picture
