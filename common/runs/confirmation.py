"""What `best` takes was chosen by its return in some episodes: at the end of a run it plays others, and those count."""

from collections.abc import Callable
from typing import Any

from common.cli.errors import TrainingError, UsageError
from common.runs.evaluation import Evaluations
from common.runs.reports import Score
from common.runs.saver import Saver


def confirm_best(
    saver: Saver,
    evaluations: Evaluations,
    state_of: Callable[[int], Any],
    stopped: Callable[[], bool],
    warn: Callable[[str], None],
) -> Score | None:
    """Evaluate once more what `best` chooses, for the mean over seeds and for each agent; stores what comes of it.

    `state_of` loads the state of a step. None where there was no choice, or no evaluation before the run is `stopped`;
    one that fails costs a warning.
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
            warn(f"checkpoint {step}, the best one, could not be evaluated once more: {error}")
    best = found.get(steps[0]) if steps else None
    return Score(steps[0], best) if best else None
