"""Reinforcement learning in JAX: one file per algorithm, and the machinery that all of them
share.
"""

from pmaprl.cli.startup import end_at_interrupts, is_command_of

__version__ = "0.1.0"  # which pyproject.toml takes from here

if is_command_of("pmaprl"):
    end_at_interrupts()  # before anything slow is imported
