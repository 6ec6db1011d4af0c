"""What an algorithm's file builds its networks from: encoders, layers, heads, distributions, normalisers."""

from common.envs.environment import check_discrete, check_squashable
from common.envs.masks import empty_action, largest_entropy, legal_actions, to_env, without_privileged
from common.nets.distributions import (
    Categoricals,
    Distribution,
    PolicyHead,
    QHead,
    SquashedNormal,
    encode_action,
    epsilon_greedy,
    only_components,
)
from common.nets.normalizers import RunningStats, denormalize, normalize, obs_stats, popart, running_stats, update_stats
from common.nets.recurrent import Inputs, Recurrent, RecurrentTorso, initial_memory
from common.nets.returns import Returns, caution_of_support
from common.nets.torso import MLP, Ensemble, Features, Torso, apply_to_both
