"""Reinforcement learning in JAX: one file per algorithm, and a kit that all of them share."""

from pmaprl.cli.startup import end_at_interrupts, is_command_of

__version__ = "0.1.0"  # pyproject.toml reads it

if is_command_of("pmaprl"):
    end_at_interrupts()  # before anything slow is imported
