"""The machinery of the kit: what commands and algorithms have in common."""

from common.cli.startup import end_at_interrupts, is_command_of

if is_command_of("common"):
    end_at_interrupts()  # before anything slow is imported
