"""Run a command in an emulated AWS with real machines: python -m tests.lab.aws [OPTIONS] -- COMMAND…

Prints what stands before, runs the command (terminal and Ctrl-C are its own), prints what stands after, what differs
and what was born without owner tags; exits with the command's exit code.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.lab.aws.lab import Lab


def main() -> int:
    """Run the command and return its exit code."""
    asked = _parse()
    with tempfile.TemporaryDirectory(prefix="gpucloud-lab-") as made:
        folder = Path(asked.folder or made)
        with Lab(folder, machines=_machines(plain=asked.no_machines), notice_s=asked.notice_s) as lab:
            _switch(lab, asked)
            before = lab.inventory()
            _say(f"the emulated AWS is at {lab.url}, its calls in {folder / 'calls.jsonl'}", before)
            code = _run(lab, asked)
            _report(lab, before)
            return code


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.aws", description=__doc__)
    parser.add_argument("--capacity", action="append", default=[], metavar="TYPE/ZONE/MARKET=COUNT")
    parser.add_argument("--quota", action="append", default=[], metavar="CODE=VCPUS")
    parser.add_argument("--notice-s", type=float, default=120.0)
    parser.add_argument(
        "--take-first", action="store_true", help="give the first node a notice when it has run a while"
    )
    parser.add_argument("--take-second", action="store_true", help="the same for the second node")
    parser.add_argument("--take-after-s", type=float, default=10.0, metavar="SECONDS", help="how long that while is")
    parser.add_argument("--no-notice", action="store_true", help="take the node at once, without a notice")
    parser.add_argument("--fault", action="append", default=[], metavar="JSON", help='{"action": "RunInstances", …}')
    parser.add_argument("--no-launch-instances", action="store_true")
    parser.add_argument("--no-machines", action="store_true", help="instances run, but nothing answers")
    parser.add_argument("--folder", help="keep calls, machines and gpucloud's home here")
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


def _machines(*, plain: bool) -> Any:
    if plain or importlib.util.find_spec("tests.lab.aws.machines") is None:
        return None
    module = importlib.import_module("tests.lab.aws.machines")
    return lambda folder, url: module.Machines(folder, endpoint_url=url, region="us-east-1")


def _switch(lab: Lab, asked: argparse.Namespace) -> None:
    for said in asked.capacity:
        pool, _, count = said.partition("=")
        lab.capacity[pool] = int(count)
    for said in asked.quota:
        code, _, limit = said.partition("=")
        lab.quotas[code] = float(limit)
    for said in asked.fault:
        rule = json.loads(said)
        lab.faults.add(rule.pop("action", "*"), **{**rule, "match": rule.get("match", "").encode()})
    lab.has_launch_instances = not asked.no_launch_instances


def _run(lab: Lab, asked: argparse.Namespace) -> int:
    process = subprocess.Popen(asked.command, env=lab.env)
    over = threading.Event()
    number = 1 if asked.take_first else 2 if asked.take_second else 0
    if number:
        threading.Thread(target=_taker, args=(lab, asked, number, over), daemon=True).start()
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the command's: its terminal sends it there too
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGINT, kept)
        over.set()


def _taker(lab: Lab, asked: argparse.Namespace, number: int, over: threading.Event) -> None:
    since: dict[str, float] = {}
    while not over.wait(0.1):
        with lab.world.lock:
            running = [one.id for one in lab.world.instances() if one.state == "running"]
        for id_ in running:
            since.setdefault(id_, time.monotonic())
        chosen = list(since)[number - 1] if len(since) >= number else None
        if chosen is not None and time.monotonic() - since[chosen] >= asked.take_after_s:
            _say(f"the lab takes {chosen}" + ("" if asked.no_notice else f" in {lab.notice_s:g} s"), ())
            if asked.no_notice:
                lab.take(chosen)
            else:
                lab.notice(chosen)
            return


def _report(lab: Lab, before: tuple[str, ...]) -> None:
    after = lab.inventory()
    _say("after the command there stand", after)
    _say("of that is new", sorted(set(after) - set(before)))
    _say("born without owner tags", lab.untagged)
    _say(f"{len(lab.calls)} calls", ())


def _say(title: str, lines: Any) -> None:
    sys.stderr.write(f"lab: {title}{':' if lines else ''}\n" + "".join(f"lab:   {line}\n" for line in lines))
    sys.stderr.flush()


if __name__ == "__main__":
    code = main()
    sys.exit(128 - code if code < 0 else code)
