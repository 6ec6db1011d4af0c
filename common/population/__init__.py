"""What members of a population do to each other.

Imports `device`, whose programs it becomes a part of, and `cli`.
"""
