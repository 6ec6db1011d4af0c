"""What an algorithm's file builds its networks from: encoders, layers, heads, distributions, normalisers."""

from common.envs.masks import largest_entropy, legal_actions
from common.envs.privileged import without_privileged
from common.envs.requirements import check_squashable
from common.envs.unit_actions import empty_action, to_env
from common.nets.distributions import Categoricals, Distribution, SquashedNormal, encode_action, part_of
from common.nets.heads import PolicyHead
from common.nets.normalizers import (
    RunningStats,
    denormalize,
    normalize,
    obs_stats,
    popart,
    running_stats,
    update_stats,
)
from common.nets.recurrent import Inputs, Recurrent, RecurrentTorso, initial_memory
from common.nets.torso import MLP, Features, Torso
