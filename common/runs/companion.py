"""What may work beside a run on the host, such as actors, and what a run wants to know of it."""

from typing import Any, Protocol


class Companion(Protocol):
    def counters(self) -> dict[str, int]:
        """Numbers that checkpoints keep beside the state, so that a resumed run counts on."""

    def figures(self) -> dict[str, Any]:
        """More for `result.json`, and for the line of --benchmark."""

    def remarks(self) -> list[str]:
        """More lines for the end of the console's output."""


class Nobody:
    """The companion of a run that has none."""

    def counters(self) -> dict[str, int]:
        return {}

    def figures(self) -> dict[str, Any]:
        return {}

    def remarks(self) -> list[str]:
        return []
