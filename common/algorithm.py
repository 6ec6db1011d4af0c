"""What an algorithm's file is written with, beside its flags; `common/training.py` runs it."""

from common import nets
from common.device import optim
from common.device.agents import Seen, at_start
from common.device.interface import Flags, Now, OffPolicy, OnPolicy, Rollout, Transition
from common.device.rollout import in_segments, side_by_side
from common.envs.spaces import Discrete, EnvSpec, Space, flat_size
from common.training import run_algorithm
