"""`rm`: deletes what the store and this machine keep of a job that is over; a job with anything alive is refused."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.cli.consent import is_meant
from gpucloud.cli.render import say, say_json, tell
from gpucloud.cli.target import called, known_job, require_one_run
from gpucloud.cli.use import condition_word
from gpucloud.domain.errors import UsageError
from gpucloud.domain.quantities import counted, format_size
from gpucloud.usecases.checkpoints import Shelf
from gpucloud.usecases.jobstore import JobStore
from gpucloud.usecases.lease import Lease, take
from gpucloud.wiring import Gpucloud, KnownJob
from gpucloud.wiring.strays import leftovers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What is kept of a job in its store: all keys, and its checkpoints with what they take."""

    keys: tuple[str, ...]
    checkpoints: int
    size: int

    def __str__(self) -> str:
        return counted(len(self.keys), "object") + (f" with {self.saved}" if self.checkpoints else "")

    @property
    def saved(self) -> str:
        """Its checkpoints in words."""
        return f"{counted(self.checkpoints, 'checkpoint')} ({format_size(self.size)})"


def rm(target: str | None, *, with_checkpoints: bool, yes: bool, as_json: bool) -> int:
    """Delete a job that has ended: its state, output, bills, and its checkpoints if told so; return the exit code.

    UsageError while anything of it is alive, and for checkpoints or results that nobody said may go.
    """
    cloud = Gpucloud()
    known = known_job(cloud, target)
    require_one_run(cloud, target, "gpucloud rm JOB")
    jobs, name = JobStore(cloud.store_of(known), known.name), called(cloud, known)
    _require_over(cloud, known, name)
    kept = _kept(jobs)
    if kept.checkpoints and not with_checkpoints:
        raise UsageError(
            f"{known.name} has {kept.saved}",
            hint=f"gpucloud rm {name} --with-checkpoints deletes them too;"
            f" gpucloud checkpoints {name} --pull DIR brings one here first",
        )
    tell(f"{known.name}: {kept} in {jobs.store.url}; `gpucloud cost` has it no longer")
    if not yes and not is_meant(f"gpucloud rm {name}{' --with-checkpoints' if with_checkpoints else ''} --yes"):
        return 2
    _delete(cloud, known, jobs, kept)
    _forget(cloud, known, jobs)
    if as_json:
        say_json({"job": known.name, "store": jobs.store.url, "objects": len(kept.keys), "bytes": kept.size})
    else:
        say(f"{known.name} is deleted: {kept}")
    return 0


def _forget(cloud: Gpucloud, known: KnownJob, jobs: JobStore) -> None:
    """A new run of the name, which may be there by now, is known by the same entry."""
    cloud.home.forget(known)
    if jobs.exists():
        cloud.home.remember(known)


def _require_over(cloud: Gpucloud, known: KnownJob, name: str) -> None:
    state = cloud.asker(known).state()
    if not state.status.ended or not state.torn_down:
        ended = "it has ended, and is not torn down"
        word = ended if state.status.ended else condition_word(cloud.asker(known).report())
        raise UsageError(f"{known.name} is not over: {word}", hint=f"gpucloud down {name}")
    if left := leftovers(cloud, known):
        raise UsageError(f"of {known.name} is still listed: {', '.join(left)}", hint=f"gpucloud down {name}")
    if cloud.has_stored_outputs(known):
        raise UsageError(f"results of {known.name} are in the store", hint=f"gpucloud down {name} brings them home")


def _kept(jobs: JobStore) -> _Kept:
    shelf = Shelf(store=jobs.store, prefix=jobs.checkpoints, keep=2)
    manifests = [one.found.manifest for one in shelf.standing()]
    pieces = {piece.key: piece.size for manifest in manifests if manifest is not None for piece in manifest.pieces}
    keys = jobs.store.list(f"jobs/{jobs.job}/")
    return _Kept(keys=keys, checkpoints=len(manifests), size=sum(pieces.values()))


def _delete(cloud: Gpucloud, known: KnownJob, jobs: JobStore, kept: _Kept) -> None:
    """Delete everything while the job's lease is ours, so that nobody starts it meanwhile.

    The state goes last: by it the same command again finds what is left, and until then no new run has the name, its
    key or its log.
    """
    root = f"jobs/{jobs.job}/"
    with take(jobs, cloud.clock) as lease:
        _require_unchanged(cloud, known, jobs, kept)
        for key in sorted(kept.keys, key=lambda key: key.startswith(f"{root}control/order")):
            _delete_key(jobs, lease, key)
        for key in jobs.store.list(root):  # a start that was refused meanwhile has left its code
            _delete_key(jobs, lease, key)
        cloud.home.clear(known)
        lease.delete()


def _delete_key(jobs: JobStore, lease: Lease, key: str) -> None:
    if key != f"jobs/{jobs.job}/state.json":
        lease.confirm()
        jobs.store.delete(key)


def _require_unchanged(cloud: Gpucloud, known: KnownJob, jobs: JobStore, kept: _Kept) -> None:
    """UsageError for a job that somebody went on with while the question stood: what was told is no longer all."""
    name = called(cloud, known)
    _require_over(cloud, known, name)
    if set(jobs.store.list(f"jobs/{jobs.job}/")) - set(kept.keys):
        raise UsageError(f"{known.name} has gone on meanwhile", hint=f"gpucloud status {name}")
