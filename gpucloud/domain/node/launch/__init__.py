"""The command line and environment of every member of an attempt."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote, urlsplit

from gpucloud.domain.job.spec import Job
from gpucloud.domain.node.container import ContainerRun, Mount
from gpucloud.domain.node.launch.argv import argv_of, keeper_of
from gpucloud.domain.node.launch.environment import SECRET, env_of, sharing
from gpucloud.domain.node.launch.member import (
    AttemptStart,
    CommandLine,
    Member,
    Place,
    Script,
    attempt_folder,
    attempt_secret,
    launcher_of,
    parse_run,
    workers_per_node,
)
from gpucloud.domain.node.status import Launch

__all__ = [
    "SECRET",
    "AttemptStart",
    "CommandLine",
    "Place",
    "Script",
    "attempt_folder",
    "attempt_secret",
    "launch_of",
    "launcher_of",
    "launches",
    "parse_run",
    "workers_per_node",
]


def launches(
    job: Job, start: AttemptStart, places: tuple[Place, ...], secrets: Mapping[str, str]
) -> tuple[Launch, ...]:
    """Return one launch per member, in rank order; see `launch_of`."""
    return tuple(launch_of(rank, job, start, places, secrets) for rank in range(len(places)))


def launch_of(
    rank: int, job: Job, start: AttemptStart, places: tuple[Place, ...], secrets: Mapping[str, str]
) -> Launch:
    """Return the launch of the member of that rank; member 0's private address is the rendezvous.

    Static rendezvous by IP without restarts: torchrun's elasticity hangs when a node joins again, so that a new
    membership is always a new attempt.
    """
    form, launcher = parse_run(job.run), launcher_of(job)
    member = Member(form=form, launcher=launcher, job=job, start=start, places=places, rank=rank, secrets=secrets)
    return Launch(
        attempt=start.number,
        argv=argv_of(member),
        directory=member.place.code,
        env=env_of(member),
        address=member.place.node.private_address,
        hidden=tuple(sorted((*secrets, SECRET))),
        container=_container(member),
        keeper=keeper_of(member),
        sharing=sharing(job, len(places)),
    )


def _container(member: Member) -> ContainerRun | None:
    job, place, number = member.job, member.place, member.start.number
    if job.image is None:
        return None
    store = urlsplit(member.start.store_url)
    home = f"{place.root}/home"  # of the node and not of the attempt: what was downloaded into it is there for the next
    local_store = (Mount(path=unquote(store.path)),) if store.scheme in ("", "file") else ()
    return ContainerRun(
        name=f"gpucloud-{job.name}-{number}-{member.rank}",
        image=place.image or job.image,
        runtime=job.container.runtime,
        devices=place.node.devices[: job.resources.gpus],
        gpus=job.resources.gpus,
        home=home,
        mounts=(
            Mount(path=place.code),
            Mount(path=home),
            Mount(path=attempt_folder(place.root, number)),
            Mount(path=place.package, read_only=True),
            *(Mount(path=target) for _, target in job.data),
            *local_store,
        ),
    )
