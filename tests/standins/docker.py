#!/usr/bin/env python3
"""Stands in for the `docker` program: notes how it was called, runs the command on this machine, ends it by name.

Like the real one, `run` starts its "container" outside the caller's process tree and passes only the variables that
were named; `rm --force` ends it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STATE = Path(os.environ["DOCKER_STAND_IN"])
NAMED = {"--env", "--volume", "--ulimit", "--gpus", "--network", "--ipc", "--user", "--label", "--name", "--pull"}
NAMED |= {"--workdir", "--entrypoint", "--device"}


def main(words: list[str]) -> int:
    login = os.environ.get("DOCKER_CONFIG")
    note = {"argv": words, "login": json.loads(Path(login, "config.json").read_text()) if login else None}
    with (STATE / "calls").open("a") as calls:
        calls.write(json.dumps(note) + "\n")
    match words[0]:
        case "run":
            return run(words[1:])
        case "rm":
            return remove(words[-1])
        case "pull":
            (STATE / "pulled").write_text(words[-1])
            return 0
        case _:
            return inspect(words)


def run(words: list[str]) -> int:
    options: dict[str, list[str]] = {}
    while words[0].startswith("--"):
        option = words.pop(0)
        if option in NAMED:
            options.setdefault(option, []).append(words.pop(0))
    passed = [word.partition("=") for word in options["--env"]]
    env = {name: value if given else os.environ[name] for name, given, value in passed if given or name in os.environ}
    command = [options["--entrypoint"][0], *words[1:]]
    pid = STATE / options["--name"][0]
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            child = subprocess.Popen(command, env={"PATH": os.defpath, **env}, cwd=options["--workdir"][0])
            pid.write_text(str(child.pid))
            os.write(writer, b"%d" % (child.wait() & 255))
        os._exit(0)
    os.close(writer)
    return int(os.read(reader, 8) or b"137")


def remove(name: str) -> int:
    try:
        os.kill(int((STATE / name).read_text()), signal.SIGKILL)
    except (OSError, ValueError):
        return 1
    time.sleep(0.05)
    return 0


def inspect(words: list[str]) -> int:
    if not (STATE / "pulled").exists():
        sys.stderr.write("Error response from daemon: No such image\n")
        return 1
    print(f"{words[-1].partition('@')[0].rpartition(':')[0]}@sha256:ab")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
