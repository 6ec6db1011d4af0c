"""Environments on the host: actors that step them in threads beside a learner, and evaluations beside both.

Independent of the algorithm, which says how to act and how to learn, and of the run. What a run asks for, as its
evaluation and its `actors`, are `host_evaluation.HostEvaluation` and `batches.Batches`.

May import `device`, `envs` and `cli`.
"""
