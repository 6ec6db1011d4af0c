"""Classic control without velocities: the numbers of observations that are left, in gymnax and in gymnasium alike."""

SEEN = {"CartPole-v1": (0, 2), "Pendulum-v1": (0, 1)}
PREFIX = "Partial"  # of the ids of the environments that show no more
