"""`python3 <zip> COMMAND`, or `python -m gpucloud.agent COMMAND`: what the supervisor has done on a node.

Orders come as JSON on standard input; the answer is the last line of standard output. `facts` is asked often and must
be quick: what it does not need is imported by the command that does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from gpucloud.agent.single_process import package_sha256, running_package
from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.variables import GPUCLOUD_ATTEMPT_DIR

Do = Callable[[Path, argparse.Namespace], int]


def main(arguments: list[str]) -> int:
    """Carry out one command and return its exit code."""
    options = _parser().parse_args(arguments)
    do: Do = options.do
    return do(Path(options.root).expanduser().absolute(), options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpucloud-node", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, do: Do, help_: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=help_)
        one.add_argument("--root", default="~/.gpucloud")
        one.set_defaults(do=do)
        return one

    command("facts", _facts, "say what the node is and has")
    command("machine", _machine, "give the machine the system software that a job wants")
    agent = command("agent", _agent, "start this node's agent, detached; say `started` or `already`")
    agent.add_argument("--replace", action="store_true", help="end an agent that runs another version first")
    agent.add_argument("--lock-memory", action="store_true", help="let attempts lock memory, by root")
    agent.add_argument("--power-off-after", type=float, default=0.0, metavar="SECONDS", help="so long after that end")
    agent.add_argument("--power-off", nargs=argparse.REMAINDER, default=[], help="run at the end of the paid time")
    boot = command("bootstrap", _bootstrap, "make this node fit by its record, on standard input with its code behind")
    boot.add_argument("--again", action="store_true", help="by the record that it read before")
    drive = command("drive", _drive, "have this node drive its job, as standard input says; say `started` or `already`")
    drive.add_argument("--as", dest="held", nargs=2, type=int, metavar=("LOCK", "READY"), help="be that driver")
    command("await", _await, "return when this node's own bootstrap has ended")
    code = command("code", _code, "have a tree of code, which comes on standard input")
    code.add_argument("target")
    code.add_argument("tree")
    command("image", _image, "have a container image")
    command("layer", _layer, "make a job's environment")
    command("data", _data, "stage a data set")
    command("gate", _gate, "check this machine's GPUs")
    command("gang", _gang, "exchange with the other machines of a job")
    command("metrics", _metrics, "write this node's figures as Prometheus reads them")
    probe = command("probe", _probe, "say whether SSH answers at another machine: alive or dead")
    probe.add_argument("address")
    probe.add_argument("port", type=int)
    probe.add_argument("--limit", type=float, default=2.0, metavar="SECONDS", help="how long to wait for its word")
    _add_mpi(command)
    keep = command("keep", _keep, "keep the checkpoint directory of the script that the words start")
    keep.add_argument("--order", required=True)
    keep.add_argument("words", nargs=argparse.REMAINDER)
    return parser


def _add_mpi(command: Callable[[str, Do, str], argparse.ArgumentParser]) -> None:
    mpi = command("mpi", _mpi, "take this node's part in an attempt under mpirun")
    for name in ("rank", "nodes", "slots", "port"):
        mpi.add_argument(f"--{name}", type=int, required=True)
    mpi.add_argument("--head", required=True)
    rexec = command("rexec", _rexec, "what mpirun calls in SSH's place")
    rexec.add_argument("host")
    for started in (mpi, rexec):
        started.add_argument("words", nargs=argparse.REMAINDER)


def _facts(root: Path, _: argparse.Namespace) -> int:
    from gpucloud.agent import facts
    from gpucloud.domain.node.bootstrap.facts import Asked

    asked = from_json(Asked, sys.stdin.read() or "{}")
    image = None
    if asked.image:
        from gpucloud.agent.attempt.composing import image_fact

        image = image_fact(root, asked.image)
    return _say(to_json(facts.gather(root, package=running_package(), asked=asked, image=image)))


def _machine(root: Path, _: argparse.Namespace) -> int:
    from gpucloud.agent.machine.making import machine_command

    return machine_command(root)


def _agent(root: Path, options: argparse.Namespace) -> int:
    from gpucloud.agent import daemon
    from gpucloud.agent.attempt.decide import OwnEnd

    end = OwnEnd(argv=tuple(options.power_off), after=timedelta(seconds=options.power_off_after))
    package = package_sha256(running_package())
    lock_memory = bool(options.lock_memory)
    return _say(daemon.start(root, package=package, own_end=end, replace=options.replace, lock_memory=lock_memory))


def _bootstrap(root: Path, options: argparse.Namespace) -> int:
    from gpucloud.agent.boot import bootstrap_command

    return bootstrap_command(root, running_package(), None if options.again else sys.stdin.buffer, _say)


def _drive(root: Path, options: argparse.Namespace) -> int:
    package = running_package()
    sha256 = package_sha256(package)
    if options.held is not None:
        from gpucloud.agent.drive.controller import be_controller

        return be_controller(root, *options.held, package=sha256)
    from gpucloud.agent.drive.starting import start
    from gpucloud.domain.errors import NodeError
    from gpucloud.domain.node.bootstrap.wanted import ControllerWanted

    wanted = from_json(ControllerWanted, sys.stdin.read())
    try:
        return _say(start(root, wanted, package=package, sha256=sha256))
    except NodeError as error:
        return _say(f"{error}; hint: {error.hint}", code=1)


def _await(root: Path, _: argparse.Namespace) -> int:
    from gpucloud.agent.single_process import wait_for_own

    wait_for_own(root)
    return _say("ended")


def _code(_root: Path, options: argparse.Namespace) -> int:
    from gpucloud.adapters.transfer.node_trees import tree

    return _say(json.dumps(tree(Path(options.target), options.tree, sys.stdin.buffer)))


def _image(root: Path, _: argparse.Namespace) -> int:
    from gpucloud.agent.attempt.composing import pull_image
    from gpucloud.domain.node.container import ImageWanted

    failure = pull_image(root, from_json(ImageWanted, sys.stdin.read()))
    return _say(failure or "ready", code=0 if failure is None else 1)


def _layer(_root: Path, _: argparse.Namespace) -> int:
    """Layers are shared by all jobs of a login, so that they lie below its home."""
    from gpucloud.agent.layer.build import Failed, SetupFailed, build
    from gpucloud.domain.node.bootstrap.facts import SETUP_FAILED
    from gpucloud.domain.node.layer import LayerOrder

    try:
        notes = build(from_json(LayerOrder, sys.stdin.read()))
    except SetupFailed as failure:
        return _say(to_json(failure.failed), code=SETUP_FAILED)
    except Failed as failure:
        return _say(str(failure), code=1)
    return _say("\n".join([*(f"note: {note}" for note in notes), "ready"]))


def _data(root: Path, _: argparse.Namespace) -> int:
    from gpucloud.agent.data import staging

    return staging.main(root, sys.stdin.buffer, _say)


def _gate(root: Path, _: argparse.Namespace) -> int:
    from gpucloud.agent.facts import is_busy
    from gpucloud.agent.gate.check import check
    from gpucloud.domain.node.gate.report import REFUSED, GateOrder, failures

    done = check(root, from_json(GateOrder, sys.stdin.read()), busy=is_busy(root))
    return _say(to_json(done), code=REFUSED if failures(done.findings) else 0)


def _gang(_root: Path, _: argparse.Namespace) -> int:
    from gpucloud.agent.gate.check import take_part
    from gpucloud.domain.node.gate.gang import GangOrder

    return _say(to_json(take_part(from_json(GangOrder, sys.stdin.read()))))


def _metrics(root: Path, _: argparse.Namespace) -> int:
    from gpucloud.agent.metrics import endpoint

    try:
        port = int((root / "agent" / "metrics.port").read_text())
        sys.stdout.write(endpoint.fetch(port))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"the agent of {root} serves no metrics: {error}\n")
        return 1
    return 0


def _probe(_root: Path, options: argparse.Namespace) -> int:
    from gpucloud.agent.network import probe

    return _say(probe(options.address, options.port, limit_s=options.limit).value)


def _mpi(_root: Path, options: argparse.Namespace) -> int:
    from gpucloud.agent.attempt.mpi_head import lead
    from gpucloud.agent.attempt.mpi_member import Order, follow
    from gpucloud.domain.node.launch import SECRET

    order = Order(
        rank=options.rank,
        nodes=options.nodes,
        slots=options.slots,
        head=options.head,
        port=options.port,
        secret=os.environ.pop(SECRET, ""),
        folder=Path(os.environ[GPUCLOUD_ATTEMPT_DIR]),
        words=tuple(options.words[1:] if options.words[:1] == ["--"] else options.words),
    )
    return lead(order) if order.rank == 0 else follow(order)


def _keep(_root: Path, options: argparse.Namespace) -> int:
    from gpucloud.agent.scripts.watcher import keep
    from gpucloud.domain.checkpoint.layouts import KeepOrder

    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    return keep(from_json(KeepOrder, options.order), tuple(words))


def _rexec(_root: Path, options: argparse.Namespace) -> int:
    from gpucloud.agent.attempt import mpi_head

    return mpi_head.call(options.host, options.words)


def _say(text: str, *, code: int = 0) -> int:
    sys.stdout.write(text + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
