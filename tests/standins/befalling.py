"""A fault that befalls a rank and the process that writes its checkpoints, whichever makes the call of that number."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.standins import disk_faults, http_faults, in_writers

_HERE = "SAVED_FAULT"
_CODE = "from tests.standins import befalling\nbefalling.here()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens from one call to another, both counted from 1 over both processes; `calls` is where they count.

    `die`: the rank and its writer, as when a machine is lost. `writer`: the writer alone. `stop`: both, until they are
    continued. `full`: calls for room fail.
    `talk`: as `die`, at a moment of the talk with S3. `none`: they are only counted.
    """

    kind: str
    first: int
    last: int
    below: str
    calls: str


def befall(fault: Fault, folder: Path) -> None:
    """Have it befall this process and the writer that it will start; `folder` is for what that takes."""
    os.environ.update(environment(fault, folder))
    here()


def environment(fault: Fault, folder: Path) -> dict[str, str]:
    """Return the variables by which it befalls the writer, or the keeper, that is started with them."""
    return {"PYTHONPATH": in_writers.place(folder, _CODE), _HERE: json.dumps(asdict(fault))}


def here() -> None:
    """Have the fault that the environment describes befall this process."""
    fault = Fault(**json.loads(os.environ[_HERE]))
    count = _counter(fault.calls)
    if fault.kind == "talk":
        http_faults.befall(fault.first, count)
    elif fault.kind == "full":
        disk_faults.befall(fault.below, disk_faults.full(fault.first, fault.last), count, deadly=False)
    elif fault.kind == "stop":
        disk_faults.befall(fault.below, disk_faults.stop(fault.first), count, deadly=False)
    else:
        at = 0 if fault.kind == "none" else fault.first
        disk_faults.befall(fault.below, disk_faults.die(at, alone=fault.kind == "writer"), count, deadly=True)


def _counter(file: str) -> Callable[[], int]:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def count() -> int:
        os.write(descriptor, b".")
        return os.fstat(descriptor).st_size

    return count
