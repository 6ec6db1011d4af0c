"""Runs side by side: what `compare` and `plot` read, group and align."""
