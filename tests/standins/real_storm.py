"""A storm over a real job on the embedded fleet: what befalls it is drawn from a seed, and it must end rightly.

Machines are noticed, taken and frozen, the command is killed and told to leave, the newest checkpoint is damaged.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path

from gpucloud.domain.checkpoint.manifest import commits
from gpucloud.domain.node.node import NodeState
from gpucloud.store import open_store
from gpucloud.store.checkpoints import listed
from tests.commandline import CommandLine, undisturbed_weights, until, weights

STEPS = 150
_GROUP = "gpucloud-small"
_LIMIT_S = 180.0
_LEAVING = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}


def undisturbed(folder: Path) -> str:
    """Return the hash of the weights that the job ends with when nothing befalls it."""
    return undisturbed_weights(folder, _job, _LIMIT_S)


class Storm:
    """One run of the job. `wrong` says what did not hold; `events` is what befell it so far, in words."""

    def __init__(self, line: CommandLine, seed: int) -> None:
        self.wrong: list[str] = []
        self.events: list[str] = []
        self._line = line
        self._chance = random.Random(f"storm {seed}")
        self._train = self._start()

    @property
    def attempts(self) -> int:
        """How many attempts the job has needed so far."""
        return len((self._line.state() or {}).get("attempts") or [])

    def rage(self, expected: str) -> None:
        """Let everything befall the job that its seed draws, then see how it ended."""
        drawn = self._chance.sample(_EVENTS, self._chance.randint(2, 4))
        moments = sorted(self._chance.sample(range(2, STEPS // 2), len(drawn)))
        try:
            for (name, event), step in zip(drawn, moments, strict=True):
                until(lambda step=step: self._over() or self._step() >= step, f"step {step}", _LIMIT_S)
                if self._over():
                    break
                event(self)
                self.events.append(f"{name} at step {step}")
            self._see_end(expected)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            self._check(False, f"{type(error).__name__}: {error}")

    def notice(self) -> None:
        """A machine is to be taken soon."""
        self._strike("a notice", partial(self._line.group.interrupt, notice=True))

    def kill(self) -> None:
        """A machine is taken at once."""
        self._strike("a death", partial(self._line.group.interrupt, notice=False))

    def freeze(self) -> None:
        """A machine stops doing anything at all, and is not gone."""
        self._strike("a freeze", self._line.group.freeze)

    def damage(self) -> None:
        """A bit of the newest checkpoint flips on disk, and a machine dies: the job must look for what is whole."""
        store = open_store(str(self._line.home / "store"))
        prefix = "jobs/small/checkpoints"
        until(lambda: self._over() or commits(listed(store, prefix)), "a checkpoint", _LIMIT_S)
        newest = commits(listed(store, prefix))[0]
        folder = self._line.home / "store" / prefix / "data" / f"{newest.generation:06d}" / f"{newest.step:09d}"
        path = self._chance.choice(sorted(folder.iterdir()))
        data = bytearray(path.read_bytes())
        data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
        path.write_bytes(data)
        self.kill()

    def leave(self, number: signal.Signals) -> None:
        """The command ends by a signal; after a while it is given again, unless the job has ended."""
        if number != signal.SIGKILL:  # a command that only just begins has no handlers yet
            until(lambda: self._over() or self._supervises(), f"it supervises before {number.name}", _LIMIT_S)
        self._train.send_signal(number)
        code = self._train.wait(timeout=_LIMIT_S)
        self._check(code in (_LEAVING[number], 0), f"{number.name}: the command ended with {code}: {self._said()}")
        time.sleep(self._chance.uniform(0.0, 4.0))
        ended = bool((self._line.state() or {}).get("exit_reason"))
        if code != 0:  # by its name, a job that has ended is not begun again
            self._train = self._line.start("train", "small", "--json") if ended else self._start()

    def _supervises(self) -> bool:
        owner = (self._line.state() or {}).get("owner") or {}
        return owner.get("pid") == self._train.pid

    def _start(self) -> subprocess.Popen[str]:
        return self._line.start("train", _job(self._line), "--json")

    def _strike(self, what: str, strike: Callable[[str, str], None]) -> None:
        until(lambda: self._over() or len(self._nodes()) >= 2, f"two machines before {what}", _LIMIT_S)
        nodes = self._nodes()
        if nodes:
            strike(_GROUP, self._chance.choice(nodes))

    def _see_end(self, expected: str) -> None:
        line = self._line
        code = self._train.wait(timeout=_LIMIT_S)
        self._check(code == 0, f"the command ended with {code}: {self._said()}")
        state = line.state()
        self._check(state["exit_reason"] == "succeeded", f"it ended: {state['exit_reason']}: {state['message']}")
        numbers = [attempt["number"] for attempt in state["attempts"]]
        self._check(numbers == list(range(1, len(numbers) + 1)), f"attempts {numbers}")
        self._check(weights(line) == expected, "the weights differ from those of the undisturbed run")
        spend = line.run("cost", "small", "--json").json["spend"]
        spent, budget = Decimal(spend["spent_usd"]), Decimal(spend["budget_usd"])
        self._check(0 < spent <= budget, f"spent {spent} of {budget} USD")
        self._check(Decimal(spend["promised_usd"]) == 0, f"{spend['promised_usd']} USD are still promised")
        self._check(line.nodes() == [], f"machines live: {line.nodes()}")
        until(lambda: not line.processes(), f"no process is left of {line.processes()}", 30)

    def _step(self) -> int:
        attempts = (self._line.state() or {}).get("attempts") or []
        return max((attempt["last_step"] or 0 for attempt in attempts), default=0)

    def _nodes(self) -> list[str]:
        alive = self._line.group.describe(_GROUP).alive
        return [node.id for node in alive if node.state is NodeState.RUNNING]

    def _over(self) -> bool:
        return self._train.poll() is not None

    def _said(self) -> str:
        return (self._line.folder / "err").read_text()[-1500:]

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)
            sys.stderr.write(f"{what}; so far: {'; '.join(self.events)}\n")


def _job(line: CommandLine) -> str:
    return line.job(steps=STEPS, step_s=0.1)


_EVENTS: tuple[tuple[str, Callable[[Storm], None]], ...] = (
    ("a notice", Storm.notice),
    ("a death", Storm.kill),
    ("a freeze", Storm.freeze),
    ("a damaged checkpoint, then a death", Storm.damage),
    ("SIGKILL of the command", lambda storm: storm.leave(signal.SIGKILL)),
    ("SIGINT", lambda storm: storm.leave(signal.SIGINT)),
    ("SIGTERM", lambda storm: storm.leave(signal.SIGTERM)),
)
