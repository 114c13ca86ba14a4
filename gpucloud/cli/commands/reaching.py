"""`watch`, `metrics`, `ssh` and `cp`: what reaches a job's machines from here, and supervises nothing."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from gpucloud.cli.render.onlookers import Display
from gpucloud.cli.render.reports import report_json
from gpucloud.cli.render.use import headline, use_rows
from gpucloud.cli.render.ways import stay_text
from gpucloud.cli.render.words import left, say, say_json, table, tell
from gpucloud.cli.target import known_job, node_of, one_node
from gpucloud.domain.checkpoint.protection import checkpoints_stay
from gpucloud.domain.errors import GpucloudError, LandingRefused, NodeError, StoreError, UsageError
from gpucloud.domain.job.quantities import format_size
from gpucloud.domain.untrusted import Arriving, Tree, fitting
from gpucloud.ports import PortForward, Shell
from gpucloud.store import ObjectStore
from gpucloud.store.contract import Stored, TooLarge
from gpucloud.store.filling import Part
from gpucloud.store.landing import Landing
from gpucloud.usecases.job.jobs import Asker, with_forecast
from gpucloud.usecases.jobstore.condition import Condition
from gpucloud.usecases.jobstore.report import JobReport
from gpucloud.usecases.supervise.look import visited
from gpucloud.wiring import Gpucloud, KnownJob, local_file, local_folder, place_in_code
from gpucloud.wiring.jobs import asker_of, copier_to, visitor

if TYPE_CHECKING:
    from gpucloud.adapters.transfer.copying import Copier, Listing

_LIVE_S = 1.0
_PLAIN_S = 10.0
_REPORT_S = 3.0  # the state in the store and the cloud's list change more slowly than GPUs

_HOST = r"\[[\w.:%]+\]|[\w.-]+"
_FORWARD = re.compile(rf"(?:(?:(?P<bind>{_HOST}):)?(?P<port>\d+):(?P<host>{_HOST}):)?(?P<host_port>\d+)", re.ASCII)
_PROGRAM = re.compile(r"[\w@%+=:,./-]+")

# The package that the agent runs from answers; which one that is the agent has written down.
_METRICS = """\
py="${GPUCLOUD_PYTHON:-python3}"
sha=$(sed -n 's/.*"package": "\\([0-9a-f]*\\)".*/\\1/p' "$1/agent/agent.json") || exit 1
exec "$py" -I "$1/lib/gpucloud-$sha.zip" metrics --root "$1"
"""

_STORE = "@store/"
_TOLD = 20
_CODE = re.compile(r"(~/)?\.gpucloud/(jobs/[^/]+/[^/]+/)?code/([0-9a-f]{64}/)?")
"""Where a node's home, which `gpucloud ssh` starts in, has the code, in which paths of `cp` start."""
_FORMS = "gpucloud cp JOB:path here, or gpucloud cp here JOB:path"


def watch(target: str | None, *, as_json: bool) -> int:
    """Show a job's GPUs, steps and money until its machines are gone, or stay for its user; return the exit code.

    Live on a terminal, lines every ten seconds elsewhere. Ctrl-C ends the watching alone.
    """
    cloud = Gpucloud()
    known = known_job(cloud, target)
    shell, live = visitor(cloud, known), sys.stdout.isatty() and not as_json
    try:
        with _live() if live else _Lines(as_json=as_json) as shown:
            last = _look(asker_of(cloud, known), shell, cloud.clock.sleep, shown, every_s=_LIVE_S if live else _PLAIN_S)
    except KeyboardInterrupt:
        why = f"the watching ends: nothing of {known.name} is changed by it"
        tell(why)
        return left(130, why, as_json=as_json)
    finally:
        shell.close()
    if (stay := stay_text(last)) is not None:
        tell(stay)
    return 0


def _live() -> Display:
    from gpucloud.cli.render.live import LiveUse

    return LiveUse()


def _look(asker: Asker, shell: Shell, sleep: Callable[[float], None], shown: Display, *, every_s: float) -> JobReport:
    report, age_s = asker.with_stored_checkpoint(asker.report()), 0.0
    while True:
        report = with_forecast(visited(report, shell, sleep))
        shown.show(report)
        if report.status.ended and (not report.nodes or report.condition in (Condition.HELD, Condition.KEPT)):
            return report
        sleep(every_s)
        age_s += every_s
        if age_s >= _REPORT_S:
            report, age_s = asker.with_stored_checkpoint(asker.report()), 0.0


class _Lines:
    """One paragraph a look, or one JSON object a line."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, report: JobReport) -> None:
        """Write how it stands."""
        if self._as_json:
            say_json(report_json(report), is_one_of_many=True)
            return
        say(headline(report))
        rows = use_rows(report)[1:]
        if rows:
            say(table(rows))


def metrics(target: str | None, node_id: str | None) -> int:
    """Write a node's figures as Prometheus reads them; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    node = one_node(cloud, known, node_id)
    shell = visitor(cloud, known)
    try:
        done = shell.host(node).run(("sh", "-c", _METRICS, "sh", node.root))
    finally:
        shell.close()
    if done.exit_code != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise NodeError(f"{node.id} tells no metrics: {said}", hint=f"gpucloud status {known.name}")
    say(done.stdout.decode(errors="replace").removesuffix("\n"))
    return 0


def ssh(target: str | None, node_id: str | None, command: tuple[str, ...], forwards: tuple[str, ...] = ()) -> int:
    """Open a shell on a node, or run a command there; return its exit code. One word may be a whole shell line."""
    ports = tuple(map(port_forward, forwards))
    cloud = Gpucloud()
    known = known_job(cloud, target)
    node = one_node(cloud, known, node_id)
    shell = cloud.shell(known.name, cloud.cloud_of(known).cloud_profile)
    try:
        return shell.host(node).interact(shell_line(command), ports)
    finally:
        shell.close()


def shell_line(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words to run on a node: a single one that is more than a program's name is a line for its shell."""
    is_line = len(command) == 1 and not _PROGRAM.fullmatch(command[0])
    return ("sh", "-c", *command) if is_line else command


def port_forward(written: str) -> PortForward:
    """Return what `-L` says: `[BIND:]PORT:HOST:PORT` as OpenSSH has it, or PORT for the node's own of that number."""
    found = _FORWARD.fullmatch(written)
    ports = [int(found["port"] or found["host_port"]), int(found["host_port"])] if found else []
    if found is None or not all(0 < port < 1 << 16 for port in ports):
        raise UsageError(f"-L {written}: no port to forward", hint="-L 6006:localhost:6006, or -L 6006 for the same")
    bind, host = (found["bind"] or "127.0.0.1").strip("[]"), (found["host"] or "localhost").strip("[]")
    return PortForward(bind=bind, port=ports[0], host=host, host_port=ports[1])


# `cp`: files between this machine and a job's machines, and out of a job's store.


@dataclass(frozen=True, slots=True, kw_only=True)
class _There:
    job: str
    path: str


def copy(source: str, target: str, *, node: str | None, recursive: bool, as_json: bool) -> int:
    """Copy one way or the other and return the exit code."""
    here, there = _parsed(source), _parsed(target)
    if isinstance(here, _There) and not isinstance(there, _There):
        files, moved, refused, machine = _bring(here, there, node, recursive=recursive)
    elif isinstance(there, _There) and not isinstance(here, _There):
        files, moved, machine = _take(here, there, node, recursive=recursive)
        refused = ()
    else:
        raise UsageError("one of the two must be JOB:path, the other a path here", hint=_FORMS)
    if as_json:
        say_json({"files": files, "bytes": moved, "refused": list(refused), "node": machine})
    else:
        say(f"{files} file{'' if files == 1 else 's'}, {format_size(moved)} copied")
    _tell_left_out(refused)
    return LandingRefused.exit_code if refused else 0


def _tell_left_out(why: Sequence[str]) -> None:
    """Write what was not copied, the first of it: who filled the folder chose how much that is."""
    for one in why[:_TOLD]:
        tell(f"left out: {one}")
    if len(why) > _TOLD:
        tell(f"left out: {len(why) - _TOLD} more")


def _tell_of_code(asker: Asker, place: Path) -> None:
    """Say of what came into the job's code folder that it is code from now on, and what leaves it out."""
    with suppress(GpucloudError, OSError):
        path = place_in_code(asker.order().resolved.code, place)
        if path is not None:
            tell(
                f"{place} lies in the code folder: the next start sends it, and says that the code differs;"
                f" a line `/{path}` in .gpucloudignore leaves it out"
            )


def _parsed(written: str) -> _There | Path:
    """Return a path here, or one of a job: that may be named by its file, as in every command."""
    job, colon, path = written.partition(":")
    if colon and job and ("/" not in job or (job.endswith((".yaml", ".yml")) and Path(job).is_file())):
        return _There(job=job, path=path or ".")
    return Path(written)


def _bring(
    there: _There, target: Path, node: str | None, *, recursive: bool
) -> tuple[int, int, tuple[str, ...], str | None]:
    """Return how many files and bytes came, what was left out, and from which node; None for the store."""
    cloud = Gpucloud()
    known = known_job(cloud, there.job)
    place = target / _name(there.path) if target.is_dir() else target
    machine = None
    if there.path.startswith("@"):
        files, moved, refused = _from_store(cloud, known, there, target, recursive=recursive)
    else:
        files, moved, refused, machine = _from_node(cloud, known, there, target, node, recursive=recursive)
    _tell_of_code(asker_of(cloud, known), place)
    return files, moved, refused, machine


def _from_node(
    cloud: Gpucloud, known: KnownJob, there: _There, target: Path, node: str | None, *, recursive: bool
) -> tuple[int, int, tuple[str, ...], str]:
    _require_machines(cloud, known, shlex.quote(there.job))
    meant = node_of(cloud, known, node)
    with copier_to(cloud, known, meant, _shown) as copier:
        found = copier.listing([there.path])
        _refuse(found, there, recursive=recursive)
        moved, _, gone = copier.fetch(found, *_place(found, there.path, target))
    asker_of(cloud, known).bill_pull(moved)
    _tell_left_out([f"{path} leads elsewhere, or is no file" for _, path in found.outside])
    files = len(found.files) + len(found.links) - len(gone)
    return files, moved, tuple(f"{path} {_GONE}" for path in gone), meant.id


def _require_machines(cloud: Gpucloud, known: KnownJob, job: str) -> None:
    """UsageError for a job that has ended: its machines are gone, and here is where its outputs and weights are."""
    asker = asker_of(cloud, known)
    state = asker.state()
    if state.group is not None or not state.status.ended:
        return
    kept = []
    if home := cloud.outputs_of(known, state.attempts):
        kept.append(f"its outputs are in {home}")
    if cloud.has_stored_outputs(known):
        kept.append(f"`gpucloud cp -r {job}:@store/outputs FOLDER` copies those in its store")
    if state.checkpoint is not None:
        kept.append(checkpoints_stay(asker.order().resolved.checkpoint, job))
    raise UsageError(
        f"{known.name} has ended, and has no machines any more: outputs and checkpoints alone are kept",
        hint="; ".join(kept) or f"gpucloud status {job}",
    )


def _refuse(found: Listing, there: _There, *, recursive: bool) -> None:
    for path, near in found.missing:
        hint = f"did you mean {there.job}:{near}?" if near else f"gpucloud ssh {there.job} -- ls {found.base}"
        if inside := _CODE.match(path):
            hint = f"paths start in the code folder: gpucloud cp {there.job}:{path[inside.end() :] or '.'} ."
        raise UsageError(f"there is no {path} on the node", hint=hint)
    if found.asked_folders and not recursive:
        raise UsageError(f"{found.asked_folders[0]} is a folder", hint=f"gpucloud cp -r {there.job}:{there.path} .")


_WRITTEN_ONCE = "checkpoints/data/"  # what a job's script writes may have folders of that name
_ANEW_BYTES = 16 << 20
_GONE = "was deleted while it was copied"


def _place(found: Listing, written: str, target: Path) -> tuple[Path, Callable[[str], str]]:
    """Return the folder that everything arrives below, and where in it what was asked for goes.

    As cp(1): into a folder that is there under the source's own name, else as the name that is given. That is not made
    before all of it has come: a copy that was cut off would find it there, and go elsewhere.
    """
    tops = {*found.asked_folders, *(file.top for file in found.files if not file.inner)}
    if tops <= {written.rstrip("/") or "/"}:
        if target.is_dir():
            return target, _name
        return target.parent, lambda _: target.name
    if not target.is_dir():
        raise UsageError(f"{target} is no folder, and {written} names {len(tops)} files", hint=f"mkdir -p {target}")
    names = sorted(map(_name, tops))
    for one, other in pairwise(names):
        if one == other:
            raise UsageError(f"{written} names several of the name {one}", hint="copy them one by one")
    return target, _name


def _name(top: str) -> str:
    """Return the name that a path ends with; none for one that ends where its name is not written."""
    name = Path(top).name
    return "" if name in ("..", "~") else name


def _take(source: Path, there: _There, node: str | None, *, recursive: bool) -> tuple[int, int, str]:
    if there.path.startswith("@"):
        raise UsageError("the store is written by the job only", hint=f"gpucloud cp {source} {there.job}:.")
    if not source.exists():
        names = [path.name for path in source.parent.iterdir()] if source.parent.is_dir() else []
        near = get_close_matches(source.name, names, n=1)
        raise UsageError(f"there is no {source}", hint=f"did you mean {source.with_name(near[0])}?" if near else None)
    if source.is_dir() and not recursive:
        raise UsageError(f"{source} is a folder", hint=f"gpucloud cp -r {source} {there.job}:{there.path}")
    cloud = Gpucloud()
    known = known_job(cloud, there.job)
    meant = node_of(cloud, known, node)
    with copier_to(cloud, known, meant, _shown) as copier:
        name = _remote_name(copier, there.path, source)
        files, links = local_folder(source, name) if source.is_dir() else ((local_file(source, name),), ())
        moved = copier.send(files, links)
    return len(files) + len(links), moved, meant.id


def _remote_name(copier: Copier, written: str, source: Path) -> str:
    path = written.rstrip("/") or "/"
    return f"{path}/{source.resolve().name}" if written.endswith("/") or copier.is_folder(path) else path


def _from_store(
    cloud: Gpucloud, known: KnownJob, there: _There, target: Path, *, recursive: bool
) -> tuple[int, int, tuple[str, ...]]:
    """Objects of the job in its store: checkpoints, logs, its spec; its outputs as the script wrote them."""
    written, named = there.path, shlex.quote(there.job)  # a run of another store may have that name, too
    if written.rstrip("/") != _STORE.rstrip("/") and not written.startswith(_STORE):
        raise UsageError(f"there is no {written}", hint=f"{named}:@store/checkpoints/…")
    asker, root = asker_of(cloud, known), f"jobs/{known.name}/"
    store = asker.jobs.store
    wanted = written.removeprefix(_STORE.rstrip("/")).strip("/")
    if wanted == "outputs" and recursive:
        brought = cloud.copy_stored(known, _store_folder(wanted, target))
        _tell_left_out([f"{one.path} {one.why}" for one in brought.missing])
        if brought.paths:
            asker.bill_pull(brought.size)
            return len(brought.paths), brought.size, ()
    everything = [key.removeprefix(root) for key in store.list(root)]
    keys = [key for key in everything if not wanted or key == wanted or key.startswith(f"{wanted}/")]
    if not keys:
        near = get_close_matches(wanted, {*everything, *(key.rpartition("/")[0] for key in everything)}, n=1)
        hint = f"did you mean {named}:@store/{near[0]}?" if near else f"gpucloud cp -r {named}:@store here"
        raise UsageError(f"the store has no {wanted} of {known.name}", hint=hint)
    if keys != [wanted] and not recursive:
        raise UsageError(
            f"@store/{wanted} is a folder of {len(keys)} objects",
            hint=f"gpucloud cp -r {named}:@store/{wanted} {target}",
        )
    below, place_of = _store_place(wanted, target, is_folder=keys != [wanted])
    files, refused = fitting({key: place_of(key) for key in keys})
    moved = 0
    with Landing(below, resumes=True) as landing:
        landing.expect(Tree(files=tuple(files.values())))
        for key, file in files.items():
            try:
                moved += _received(store, root, key, file, landing)
            except StoreError as error:
                refused = (*refused, str(error))
        landing.settle()
    asker.bill_pull(moved)
    return len(keys) - len(refused), moved, refused


def _received(store: ObjectStore, root: str, name: str, file: Arriving, landing: Landing) -> int:
    """Bring an object of the job as a file, a large one in pieces; return how much came over. `root` begins its keys.

    What an earlier copy was cut off at is gone on with where it is of the very same object: by its version, or one of a
    checkpoint's, which is written once.
    """
    key = content = root + name
    with landing.part(file, key) as part:
        if name.startswith(_WRITTEN_ONCE) and _is_whole(store, key, part.length()):
            moved = 0
        elif (stored := _get_small(store, key)) is not None:
            if isinstance(stored, TooLarge):
                landing.require_room((replace(file, size=stored.size),))
                content = f"{key} {stored.about.version} {stored.size}"
                moved = _received_in_pieces(store, key, stored.size, landing.part(file, content))
            else:
                part.write(0, stored.data)
                part.cut(len(stored.data))
                moved = len(stored.data)
        else:
            raise StoreError(f"{key} {_GONE}")
    landing.keep(file, content)
    return moved


def _received_in_pieces(store: ObjectStore, key: str, size: int, into: Part) -> int:
    """Fill the part from where it ends on, its last piece anew; return how much came over."""
    with into as part:
        start = max(0, part.length() - _ANEW_BYTES)
        if not part.fill(store, key, size, start=start):
            raise StoreError(f"{key} became shorter while it was read", hint="the same command again")
    return size - start


def _get_small(store: ObjectStore, key: str) -> Stored | TooLarge | None:
    try:
        return store.get(key)
    except TooLarge as error:
        return error


def _is_whole(store: ObjectStore, key: str, length: int) -> bool:
    """Whether the object is so long; nothing is asked of one of which nothing is here."""
    byte = memoryview(bytearray(1))
    return length > 0 and store.read_into(key, length - 1, byte) and not store.read_into(key, length, byte)


def _store_place(wanted: str, target: Path, *, is_folder: bool) -> tuple[Path, Callable[[str], str]]:
    """Return the folder that objects arrive below, and where in it a key goes; as `_place` does."""
    name = wanted.rpartition("/")[2]
    if not is_folder:
        return (target, lambda _: name) if target.is_dir() else (target.parent, lambda _: target.name)
    below, top = (target, name) if target.is_dir() else (target.parent, target.name)
    return below, lambda key: f"{top}/{key.removeprefix(wanted).removeprefix('/')}".removeprefix("/")


def _store_folder(wanted: str, target: Path) -> Path:
    """Return where a folder of the store arrives."""
    return target / wanted.rpartition("/")[2] if target.is_dir() and wanted else target


def _shown(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{format_size(done)} of {format_size(total)}" + ("\n" if done >= total else ""))
        sys.stderr.flush()
