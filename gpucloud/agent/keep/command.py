"""`keep`: puts a directory back, then is the parent of the script that goes on from it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from gpucloud.agent.keep.keeper import Keeper
from gpucloud.agent.keep.putting import Directory
from gpucloud.agent.keep.reporting import Reporting
from gpucloud.agent.keep.taking import Taking
from gpucloud.domain.errors import GpucloudError, StoreError
from gpucloud.domain.keeping.order import KeepOrder
from gpucloud.domain.manifest import Commit
from gpucloud.store import ObjectStore, open_store
from gpucloud.store.checkpoints import Checkpoints

_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)


def keep(order: KeepOrder, words: tuple[str, ...]) -> int:
    """Return the exit code of the attempt on this node."""
    # Ranks are made to tell where they are by SIGABRT; with `launcher: plain` this process bears a rank's variables.
    signal.signal(signal.SIGABRT, lambda *_: None)
    reporting = Reporting(Path(order.folder), rank=order.first_rank)
    try:
        store = open_store(order.store)
        checkpoints = Checkpoints(store, order.prefix, keep=order.keep)
        directory = Directory(Path(order.directory), Path(order.code), order.rule)
        base = _patiently(directory, checkpoints, store, order, reporting)
        taking = _begin(order, checkpoints, base, reporting) if order.rank == 0 else None
    except (GpucloudError, OSError) as error:
        hint = f" ({error.hint})" if isinstance(error, GpucloudError) else ""
        reporting.say(f"the directory {order.directory} could not be put back: {error}{hint}")
        return 1
    return Keeper(order, directory, reporting, taking).run(words)


def _patiently(
    directory: Directory, checkpoints: Checkpoints, store: ObjectStore, order: KeepOrder, reporting: Reporting
) -> Commit | None:
    """An outage is no damage: it is waited for, for half a minute."""
    for wait_s in (*_WAITS_S, None):
        try:
            return directory.put_back(checkpoints, store, order.prefix, reporting.say)
        except StoreError as error:
            if wait_s is None or not error.may_pass:
                raise
            time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")


def _begin(order: KeepOrder, checkpoints: Checkpoints, base: Commit | None, reporting: Reporting) -> Taking:
    if not checkpoints.begin(base=base, attempt=order.attempt):
        reporting.say("this store ignores conditional writes: two attempts at once would not notice each other")
    if base is not None:
        reporting.first_step = base.step + 1
        reporting.say(f"put back the checkpoint of step {base.step}: best effort, what your script saves")
    reporting.progress(base.step if base else 0)
    copies = Path(order.folder) / "copies"
    return Taking(checkpoints, copies, base=base, world=order.rule.nodes * order.rule.ranks)
