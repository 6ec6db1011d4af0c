"""Published parameters: numbered versions that a learner hands to actors, whole and never changed afterwards."""

import threading
from typing import Any, NamedTuple

import jax

KEPT = 3  # versions: one in use, and two that the learner may have under way


class Slot(NamedTuple):
    """One version of the parameters on one device."""

    version: int  # updates behind it
    params: Any


class ParameterSlots:
    """The newest versions, on the device of every reader. Safe for any number of threads."""

    def __init__(self, devices: list[jax.Device]):
        self._devices = list(dict.fromkeys(devices))
        self._slots: dict[int, dict[jax.Device, Any]] = {}
        self._changed = threading.Condition()

    def publish(self, version: int, params: Any) -> None:
        """Copy `params`, arrays that no update may donate, to every reader's device.

        They may still be under computation: readers get them once they are there.
        """
        local = jax.tree.map(lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, params)
        placed = {device: jax.device_put(local, device) for device in self._devices}
        with self._changed:
            self._slots[version] = placed
            for old in sorted(self._slots)[:-KEPT]:
                del self._slots[old]
            self._changed.notify_all()

    def latest(self, device: jax.Device) -> Slot:
        """The newest version that is computed. The first version has to be published by then."""
        with self._changed:
            newest_first = sorted(self._slots.items(), reverse=True)
        for version, placed in newest_first[:-1]:
            if all(x.is_ready() for x in jax.tree.leaves(placed[device])):
                return Slot(version, placed[device])
        version, placed = newest_first[-1]
        return Slot(version, placed[device])

    def settle(self, version: int) -> None:
        """Block until the newest of the versions up to this one is computed, so that `latest` returns no older one."""
        with self._changed:
            placed = self._slots[max(known for known in self._slots if known <= version)]
        jax.block_until_ready(list(placed.values()))  # as a dictionary it would have to be sorted by device

    def wait_for(self, version: int, device: jax.Device, timeout: float) -> Slot | None:
        """Exactly this version, computed; None where it is not published within `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: version in self._slots, timeout):
                return None
            params = self._slots[version][device]
        return Slot(version, jax.block_until_ready(params))
