"""One run: what is due when, its directory, metrics and checkpoints, its evaluations, console and signals.

`run.Run` puts the parts together; every other module is one part and knows nothing of the run as a whole. What the end
of a run draws is given to it, and so are the actors and the evaluation that work beside it on the host.

May import `device`, `envs`, `nets` and `cli`.
"""
