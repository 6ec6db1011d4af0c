"""What an algorithm's file builds its networks from: encoders, layers, heads, distributions, normalisers.

Imports `envs` for the spaces, and `cli`.
"""
