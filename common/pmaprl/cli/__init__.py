"""Flags, checks, errors and whole files; imports nothing slow."""
