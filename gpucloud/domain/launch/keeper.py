"""The words that start the keeper of a script's own checkpoint directory, before the launcher's own."""

from __future__ import annotations

from pathlib import PurePosixPath

from gpucloud.domain.codec import to_json
from gpucloud.domain.keeping.layouts import Rule
from gpucloud.domain.keeping.order import KeepOrder
from gpucloud.domain.launch.form import workers_per_node
from gpucloud.domain.launch.member import Member, attempt_folder


def keeper_of(member: Member) -> tuple[str, ...]:
    """Return the words, none for a job that names no directory. Outside of a container: an image need not have us."""
    job, place, start = member.job, member.place, member.start
    kept = job.checkpoint.directory
    if kept is None:
        return ()
    ranks, nodes = workers_per_node(job), len(member.places)
    order = KeepOrder(
        code=place.code,
        directory=str(PurePosixPath(place.code) / kept.path),
        rule=Rule(
            layout=kept.layout,
            done_file=kept.done_file,
            ranks=ranks,
            nodes=nodes,
            per_node=kept.per_node and nodes > 1,
            node=member.rank,
        ),
        on_notice=kept.on_notice,
        settle=kept.settle,
        store=start.store_url,
        prefix=start.checkpoints,
        attempt=start.number,
        keep=job.checkpoint.keep,
        rank=member.rank,
        folder=attempt_folder(place.root, start.number),
        first_rank=member.rank * ranks,
    )
    return (place.python, place.package, "keep", "--root", place.root, "--order", to_json(order), "--")
