"""The lab's clock: a thread that moves instances and groups on."""

from __future__ import annotations

import threading
import traceback

from tests.lab.aws import instances, scaling
from tests.lab.aws.stale import History
from tests.lab.aws.world import World

_EVERY_S = 0.03


class Pump:
    """Runs until stopped; what broke it is in `broken`."""

    def __init__(self, world: World, history: History) -> None:
        self.broken: list[str] = []
        self._world = world
        self._history = history
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for the step under way."""
        self._stop.set()
        self._world.kick.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stop.is_set():
            self._world.kick.wait(_EVERY_S)
            self._world.kick.clear()
            try:
                instances.step(self._world)
                with self._world.lock:
                    scaling.step(self._world)
                    self._history.keep()
            except Exception:  # noqa: BLE001 - the lab says at its end what broke it
                self.broken.append(traceback.format_exc())
                if len(self.broken) > 20:
                    return
