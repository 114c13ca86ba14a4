"""`python3 <zip> agent|facts|layer|data|…`, or `python -m gpucloud.agent` with the same words."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path

from gpucloud.agent import daemon, facts, image
from gpucloud.agent.decide import OwnEnd
from gpucloud.agent.layer.build import Failed, build
from gpucloud.agent.machine.command import machine_command
from gpucloud.agent.metrics import endpoint
from gpucloud.agent.mpi import remote
from gpucloud.agent.mpi.head import lead
from gpucloud.agent.mpi.member import follow
from gpucloud.agent.mpi.order import Order
from gpucloud.domain.bootstrap.facts import Asked
from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.container import ImageWanted
from gpucloud.domain.launch import SECRET
from gpucloud.domain.layer import LayerOrder


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
        case "metrics":
            return _write_metrics(root)
        case "data":
            from gpucloud.agent.data import command  # noqa: PLC0415  facts must answer at once: this imports a lot

            return command.main(root, sys.stdin.buffer, _say)
        case "image":
            failure = image.pull(root, from_json(ImageWanted, sys.stdin.read()))
            _say(failure or "ready")
            return 0 if failure is None else 1
        case "mpi":
            return _run_mpi(options)
        case "rexec":
            return remote.call(options.host, options.words)
        case "machine":
            return machine_command(root)
        case _:
            return _build_layer()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpucloud-node", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    agent = commands.add_parser("agent", help="start this node's agent, detached; say `started` or `already`")
    agent.add_argument("--replace", action="store_true", help="end an agent that runs another version first")
    agent.add_argument("--power-off-after", type=float, default=0.0, metavar="SECONDS", help="so long after that end")
    agent.add_argument("--power-off", nargs=argparse.REMAINDER, default=[], help="run at the end of the paid time")
    probe = commands.add_parser("facts", help="answer a question, JSON on standard input: what the node is and has")
    build = commands.add_parser("layer", help="make a job's environment, given as JSON on standard input")
    machine = commands.add_parser("machine", help="give the machine the system software that a job wants")
    figures = commands.add_parser("metrics", help="write this node's figures as Prometheus reads them")
    stage = commands.add_parser("data", help="stage a data set, given on standard input")
    mpi = commands.add_parser("mpi", help="this node's part in an attempt under mpirun")
    for name in ("rank", "nodes", "slots", "port"):
        mpi.add_argument(f"--{name}", type=int, required=True)
    mpi.add_argument("--head", required=True)
    rexec = commands.add_parser("rexec", help="what mpirun calls in SSH's place")
    rexec.add_argument("host")
    for started in (mpi, rexec):
        started.add_argument("words", nargs=argparse.REMAINDER)
        started.set_defaults(root="~/.gpucloud")
    pull = commands.add_parser("image", help="have a container image, given as JSON on standard input")
    for one in (agent, probe, build, machine, stage, figures, pull):
        one.add_argument("--root", default="~/.gpucloud")
    return parser


def _start_agent(root: Path, options: argparse.Namespace) -> str:
    package = facts.package_sha256(_package())
    end = OwnEnd(argv=tuple(options.power_off), after=timedelta(seconds=options.power_off_after))
    return daemon.start(root, package=package, own_end=end, replace=options.replace)


def _build_layer() -> int:
    try:
        notes = build(from_json(LayerOrder, sys.stdin.read()))
    except Failed as failure:
        _say(str(failure))
        return 1
    _say("\n".join([*(f"note: {note}" for note in notes), "ready"]))
    return 0


def _write_metrics(root: Path) -> int:
    try:
        port = int((root / "agent" / "metrics.port").read_text())
        sys.stdout.write(endpoint.fetch(port))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"the agent of {root} serves no metrics: {error}\n")
        return 1
    return 0


def _run_mpi(options: argparse.Namespace) -> int:
    order = Order(
        rank=options.rank,
        nodes=options.nodes,
        slots=options.slots,
        head=options.head,
        port=options.port,
        secret=os.environ.pop(SECRET, ""),
        folder=Path(os.environ["GPUCLOUD_ATTEMPT_DIR"]),
        words=tuple(options.words[1:] if options.words[:1] == ["--"] else options.words),
    )
    return lead(order) if order.rank == 0 else follow(order)


def _package() -> Path | None:
    """Return the zip that this code was read from; None when it was not read from one."""
    path = Path(sys.argv[0]).absolute()
    return path if path.suffix == ".zip" and path.is_file() else None


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
