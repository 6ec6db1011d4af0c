"""What `best` takes was chosen by its return in some episodes: at the end of a run it plays others, and those count."""

from collections.abc import Callable
from typing import Any

from common.cli.errors import TrainingError, UsageError
from common.device import cluster
from common.runs.evaluation import Evaluations
from common.runs.reports import Score
from common.runs.saver import Saver


def confirm_best(
    saver: Saver,
    evaluations: Evaluations,
    state_of: Callable[[int], Any],
    stopped: Callable[[], bool],
    warn: Callable[[str], None],
) -> list[Score]:
    """Evaluate once more what `best` chooses, for all agents together first, then for each; stores what comes of it.

    `state_of` loads the state of a step. Empty where there was no choice; without evaluation where the run is `stopped`
    before, or where one fails, which costs a warning: where it fails in one of several processes, it does so in all.
    """
    steps, found = saver.choices(), {}
    for step in steps:
        if stopped():
            break
        try:
            found[step] = evaluations.in_other_episodes(step, state_of(step), stopped)
            if found[step]:
                saver.confirm(step, found[step]["eval/return_mean"])
        except (TrainingError, UsageError, RuntimeError, MemoryError) as error:  # there may be no room for two learners
            if cluster.has_lost(error):
                raise
            warn(f"checkpoint {step}, the best one, could not be evaluated once more: {error}")
    return [Score(step, found.get(step) or {}) for step in steps]
