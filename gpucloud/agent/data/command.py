"""`python3 <zip> data`: one line of JSON, then a packed set; the last line of the answer says what was done."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpucloud.agent.data.staging import Order, finish, locked, prepare, stage
from gpucloud.domain.codec import from_json
from gpucloud.domain.data import gigabytes, unpack
from gpucloud.domain.errors import GpucloudError
from gpucloud.domain.quantities import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be done with a set; `env` (secrets may be in it) is what S3 is reached with.

    `stage` does it all, for a set in S3. A set that is sent by the supervisor is `place`d (the answer is JSON: its
    folder, and the paths that are missing there) and `finish`ed.
    """

    do: str
    order: Order
    env: tuple[tuple[str, str], ...] = ()


def main(root: Path, given: BinaryIO, say: Callable[[str], object]) -> int:
    """Carry out what is asked on `given` and return the exit code."""
    asked = from_json(Asked, given.readline())
    found = unpack(given.read())
    os.environ.update(asked.env)
    try:
        match asked.do:
            case "place":
                place = prepare(root, asked.order, found)
                say(json.dumps({"folder": str(place.folder), "missing": [file.path for file in place.missing]}))
            case "finish":
                with locked(root, asked.order.content):
                    finish(root, asked.order, found, prepare(root, asked.order, found).folder)
                say(f"note: data: {asked.order.target}: {gigabytes(found.size)}, {counted(len(found.files), 'file')}")
            case _:
                say(f"note: {stage(root, asked.order, found)}")
    except GpucloudError as error:
        say(f"{error}; hint: {error.hint}" if error.hint else str(error))
        return 1
    except OSError as error:
        say(f"{error.filename}: {error.strerror}")
        return 1
    return 0
