"""What runs inside the compiled program, or brings programs and state onto the devices.

Devices, keys and minibatches that do not depend on their number, the loop of updates, episodes, replay, evaluation,
compilation: plumbing that nobody edits to change an algorithm. Imports from `envs`, `nets` and `cli`.
"""
