"""Numbers of observations: their names, and those without velocities.

Processes of environments import this, so it imports nothing slow.
"""

# Indices of the numbers that are observed without velocities, by the id of an environment
WITHOUT_VELOCITIES = {"CartPole-v1": (0, 2), "Pendulum-v1": (0, 1)}

_CAR = "position", "velocity"

_LANDER = "x", "y", "x velocity", "y velocity", "angle", "angular velocity", "left leg", "right leg"

_ACROBOT = (
    "cos(angle 1)",
    "sin(angle 1)",
    "cos(angle 2)",
    "sin(angle 2)",
    "velocity 1",
    "velocity 2",
)

_SEAQUEST = (
    "submarine",
    "its back",
    "own bullet",
    "trail",
    "enemy bullet",
    "enemy fish",
    "enemy submarine",
)

_FREEWAY = "chicken", "car", "speed 1", "speed 2", "speed 3", "speed 4", "speed 5"

OBS_NAMES = {
    "CartPole-v0": ("cart position", "cart velocity", "pole angle", "pole velocity"),
    "CartPole-v1": ("cart position", "cart velocity", "pole angle", "pole velocity"),
    "Pendulum-v1": ("cos(angle)", "sin(angle)", "angular velocity"),
    "MountainCar-v0": _CAR,
    "MountainCarContinuous-v0": _CAR,
    "Acrobot-v1": _ACROBOT,
    "LunarLander-v3": _LANDER,
    "LunarLanderContinuous-v3": _LANDER,
    "Asterix-MinAtar": ("player", "enemy", "trail", "gold"),
    "Breakout-MinAtar": ("paddle", "ball", "trail", "brick"),
    "Freeway-MinAtar": _FREEWAY,
    "Seaquest-MinAtar": (*_SEAQUEST, "oxygen", "divers aboard", "diver"),
    "SpaceInvaders-MinAtar": (
        "cannon",
        "alien",
        "moving left",
        "moving right",
        "own bullet",
        "enemy bullet",
    ),
}
"""Names of an observation's numbers, or of a map's channels, by the id of an environment."""

PARTIAL = "Partial"  # beginning of the ids of environments without velocities
