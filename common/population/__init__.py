"""What members of a population do to each other, and how they compare.

Imports `device`, whose programs it becomes a part of, `envs`, whose games members play, and `cli`.
"""
