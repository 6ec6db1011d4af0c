"""Trained policies: what a user calls, and how good they are against each other."""
