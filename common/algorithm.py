"""What an algorithm's file is written with, beside its flags. The driver, which runs it, is `common/training.py`."""

from common import nets
from common.device import optim
from common.device.algorithm import Now, OffPolicy, OnPolicy, Rollout, Transition
from common.device.memory import Seen, at_start
from common.device.sampling import in_segments, side_by_side
from common.envs.spaces import Discrete, Space, flat_size
from common.envs.spec import EnvSpec
from common.training import run_algorithm
