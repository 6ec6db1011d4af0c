"""`population.jsonl`: every exchange between members of a population, and what it changed."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from common.device.episodes import WINDOW
from common.runs.damage import EXCHANGES
from common.runs.metrics import jsonable, read, rewrite

RETURN = f"episode/return_last{WINDOW}"
BEFORE, AFTER = "pbt/before/", "hyper/"


class Lineage:
    """Writes a row for every exchange."""

    def __init__(self, run_dir: Path, resume_at: int):
        """Rows after step `resume_at` are dropped first: they are of a future that a resumed run has not had yet."""
        self._remarked = False
        self._path = run_dir / EXCHANGES
        rewrite(self._path, (row for row in read(self._path) if row["env_steps"] <= resume_at))

    def remark(self, step: int, metrics: dict[str, np.ndarray]) -> str:
        """What to say where episodes have ended and nobody can take over anybody all the same; once."""
        blind = np.any(metrics["pbt/due"]) and not np.isfinite(metrics["pbt/objective"]).any()
        if self._remarked or not blind or not np.isfinite(metrics[RETURN]).any():
            return ""
        self._remarked = True
        what = f"by step {step:,} the objective of no member is finite, and so nobody takes over another one's weights"
        return f"{what}: look at the environment's true_objective, or at its rewards"

    def note(self, step: int, metrics: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Write what the metrics of a chunk say of an exchange at its end, if there was one; returns the others."""
        if np.any(metrics["pbt/due"]):
            row = {"env_steps": step, "objective": jsonable(metrics["pbt/objective"]), "members": _changes(metrics)}
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
        return {name: x for name, x in metrics.items() if name != "pbt/due" and not name.startswith(BEFORE)}


def _changes(metrics: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """What became of those members to which something happened."""
    names = [name.removeprefix(AFTER) for name in metrics if name.startswith(AFTER)]
    rows = []
    for member, source in enumerate(np.ravel(metrics["pbt/source"]).tolist()):
        old, new = (
            {name: jsonable(np.ravel(metrics[f"{x}{name}"])[member]) for name in names} for x in (BEFORE, AFTER)
        )
        row = {"member": member}
        if source != member:
            theirs, own = (jsonable(np.ravel(metrics["pbt/objective"])[x]) for x in (source, member))
            row |= {"from": source, "why": "broken" if own is None else f"{own} against {theirs}"}
        changed = {name: [old[name], new[name]] for name in names if old[name] != new[name]}
        if changed or source != member:
            rows.append(row | {"changed": changed})
    return rows
