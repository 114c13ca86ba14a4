"""`python3 <zip> agent|facts|layer|gate|gang|metrics`, or `python -m gpucloud.agent` with the same words."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import timedelta
from pathlib import Path

from gpucloud.agent import daemon, facts, layer
from gpucloud.agent.decide import OwnEnd
from gpucloud.agent.metrics import endpoint
from gpucloud.domain.bootstrap.facts import Asked
from gpucloud.domain.codec import from_json, to_json


def main(arguments: list[str]) -> int:
    """Carry out one command and return its exit code; answers go to stdout as one line."""
    options = _parser().parse_args(arguments)
    root = Path(options.root).expanduser().absolute()
    match options.command:
        case "agent":
            _say(_start_agent(root, options))
        case "facts":
            asked = from_json(Asked, sys.stdin.read() or "{}")
            _say(to_json(facts.gather(root, package=_package(), asked=asked)))
        case "gate":
            return _check(root)
        case "gang":
            _take_part()
        case "metrics":
            return _write_metrics(root)
        case _:
            return _build_layer(root)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpucloud-node", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    agent = commands.add_parser("agent", help="start this node's agent, detached; say `started` or `already`")
    agent.add_argument("--replace", action="store_true", help="end an agent that runs another version first")
    agent.add_argument("--power-off-after", type=float, default=0.0, metavar="SECONDS", help="so long after that end")
    agent.add_argument("--power-off", nargs=argparse.REMAINDER, default=[], help="run at the end of the paid time")
    probe = commands.add_parser("facts", help="answer a question, JSON on standard input: what the node is and has")
    build = commands.add_parser("layer", help="run a job's setup, given as JSON on standard input")
    gate = commands.add_parser("gate", help="check this machine's GPUs, as JSON on standard input asks")
    gang = commands.add_parser("gang", help="exchange with the other machines of a job, as JSON on standard input asks")
    figures = commands.add_parser("metrics", help="write this node's figures as Prometheus reads them")
    for command in (agent, probe, build, gate, gang, figures):
        command.add_argument("--root", default="~/.gpucloud")
    return parser


def _start_agent(root: Path, options: argparse.Namespace) -> str:
    package = facts.package_sha256(_package())
    end = OwnEnd(argv=tuple(options.power_off), after=timedelta(seconds=options.power_off_after))
    return daemon.start(root, package=package, own_end=end, replace=options.replace)


def _build_layer(root: Path) -> int:
    failure = layer.build(root, layer.Order(**json.load(sys.stdin)))
    _say(failure or "ready")
    return 0 if failure is None else 1


def _check(root: Path) -> int:
    from gpucloud.agent.gate.check import check
    from gpucloud.domain.gate.findings import REFUSED, failures
    from gpucloud.domain.gate.wanted import GateOrder

    done = check(root, from_json(GateOrder, sys.stdin.read()))
    _say(to_json(done))
    return REFUSED if failures(done.findings) else 0


def _take_part() -> None:
    from gpucloud.agent.gate.member import take_part
    from gpucloud.domain.gate.gang import GangOrder

    _say(to_json(take_part(from_json(GangOrder, sys.stdin.read()))))


def _write_metrics(root: Path) -> int:
    try:
        port = int((root / "agent" / "metrics.port").read_text())
        sys.stdout.write(endpoint.fetch(port))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"the agent of {root} serves no metrics: {error}\n")
        return 1
    return 0


def _package() -> Path | None:
    """Return the zip that this code was read from; None when it was not read from one."""
    path = Path(sys.argv[0]).absolute()
    return path if path.suffix == ".zip" and path.is_file() else None


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
