"""Environments by name, their interface, their spaces and masks."""
