"""What evaluations change of the environments that a run trains on, where they step on the host."""

import json

from common.cli.env_params import read_params

ATARI_AIDS = ("reward_clip", "reward_clipping", "episodic_life")  # envpool's names and ALE's, all of which can be off


def evaluation_params(env: str, vectorization: str, env_params: str, eval_env_params: str) -> str:
    """The arguments of a suite's `make` in evaluations of `env`, which is trained on with `env_params`.

    What makes learning Atari easier is off: scores are those of whole games, with rewards as they are. What
    `eval_env_params` says comes before that. All are JSON objects. Raises UsageError where one is not.
    """
    trained = read_params(env_params)
    aids = {aid for aid in ATARI_AIDS if aid in trained}
    if vectorization == "vector" and "ALE/" in env:
        aids.add("reward_clipping")  # which is on where nothing is said
    params = trained | dict.fromkeys(sorted(aids), False) | read_params(eval_env_params, flag="--eval-env-params")
    return env_params if params == trained else json.dumps(params)
