"""What a node's agent is told: its part in the open attempt, whether to end it, and until when it is paid."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from gpucloud.domain.agentstatus import Desired, Launch, Stop, desired_to_json
from gpucloud.domain.job import Cloud
from gpucloud.domain.launch import AttemptStart, Place, attempt_secret, launch_of
from gpucloud.domain.state import Attempt, JobState
from gpucloud.usecases.world import World


def desired_for(
    node_id: str, state: JobState, world: World, place: Callable[[str, str, str], Place], ahead: timedelta
) -> bytes:
    """Return the node's desired.json.

    `place` says where a member is, as this node is to read it, in an attempt of that tree. The agent goes by the node's
    clock. A cloud's machines have their cloud's, by which its schedule ends them; that of a host of one's own is
    `ahead` of ours, and when its paid time ends is told by it.
    """
    attempt = state.attempt
    ranks = {member.node_id: member.rank for member in attempt.members} if attempt else {}
    launch, until = None, state.paid_until
    if attempt and node_id in ranks:
        places = tuple(place(member.node_id, node_id, attempt.tree) for member in attempt.members)
        launch = _launch(ranks[node_id], attempt, world, places)
    desired = Desired(
        epoch=state.epoch,
        launch=launch,
        stop=attempt.ordered if attempt and launch else Stop.NO,
        paid_until=until + ahead if until is not None and world.job.cloud is Cloud.SSH else until,
    )
    return desired_to_json(desired).encode()


def _launch(rank: int, attempt: Attempt, world: World, places: tuple[Place, ...]) -> Launch:
    start = AttemptStart(
        number=attempt.number,
        port=attempt.port,
        store_url=world.store.url,
        checkpoints=world.jobs.checkpoints,
        secret=attempt_secret(world.key, world.name, attempt.number),
        profile_steps=world.job.profile_steps,
    )
    return launch_of(rank, world.job, start, places, world.secrets)
