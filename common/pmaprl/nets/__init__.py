"""Parts that an algorithm's file builds its networks from.

They are encoders, layers, heads, distributions and normalizers.
"""

from pmaprl.envs.environment import SquashableSpace, check_discrete, check_squashable
from pmaprl.envs.masks import (
    empty_action,
    largest_entropy,
    legal_actions,
    to_env,
)
from pmaprl.nets.distributions import (
    Categoricals,
    Distribution,
    PolicyHead,
    QHead,
    SquashedNormal,
    encode_action,
    epsilon_greedy,
)
from pmaprl.nets.normalizers import Normalizer, popart
from pmaprl.nets.recurrent import Inputs, Recurrent, RecurrentTorso, initial_memory
from pmaprl.nets.returns import ValueDistribution, caution_of_support
from pmaprl.nets.torso import MLP, Ensemble, Features, Torso, joint_forward
