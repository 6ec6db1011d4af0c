"""Names that an algorithm's file imports, beside those of `pmaprl.flags`.

`common/pmaprl/training.py` runs the algorithm.
"""

from pmaprl import nets
from pmaprl.device import optim
from pmaprl.device.contract import OffPolicy, OnPolicy, RecurrentOnPolicy
from pmaprl.device.interface import (
    GradientContext,
    HParams,
    PolicyInput,
    Rollout,
    Transition,
    UpdateContext,
)
from pmaprl.envs.spaces import Discrete, EnvSpec, Space, flat_size
from pmaprl.training import run_algorithm
