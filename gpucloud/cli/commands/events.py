"""`events`: what happened to a job, from its order to its end."""

from __future__ import annotations

import json

from gpucloud.cli.render.words import say_json, say_words, tell
from gpucloud.cli.target import known_job
from gpucloud.domain.state.event import Event, EventKind, event_json
from gpucloud.domain.state.state import JobState
from gpucloud.store import Stored
from gpucloud.usecases.job.jobs import Asker
from gpucloud.usecases.jobstore.events import told
from gpucloud.usecases.jobstore.lease import is_over
from gpucloud.wiring import Gpucloud
from gpucloud.wiring.jobs import asker_of

_WIDTH = max(len(kind.value) for kind in EventKind)
_LOOK_S = 2.0
"""How often a job that is followed is looked at: one small request, and a list of its events where it was written."""


def events(target: str | None, *, follow: bool, as_json: bool) -> int:
    """Write what happened to a job in order, with `follow` until it ends; return the exit code."""
    cloud = Gpucloud()
    known = known_job(cloud, target)
    asker, size, any_told = asker_of(cloud, known), 0, False

    def load() -> tuple[JobState, Stored]:
        loaded = asker.jobs.load()
        if loaded is None:
            raise asker.jobs.absent()
        return loaded

    def goes_on(state: JobState, stored: Stored) -> bool:
        return follow and not (state.status.ended and (state.torn_down or is_over(state, stored)))

    if follow:
        _tell_whose_it_is(asker)
    try:
        for some in told(asker.jobs.events, load, goes_on, lambda: asker.clock.sleep(_LOOK_S)):
            for event in some:
                size, any_told = size + len(json.dumps(event_json(event))), True
                _say(event, as_json=as_json)
    finally:
        asker.bill_pull(size)
    if not any_told:
        tell(f"no event of {known.name} is kept: a gpucloud without them started it, and nothing has happened since")
    return 0


def _tell_whose_it_is(asker: Asker) -> None:
    """Say of a job that nobody supervises that nothing comes by itself."""
    state, by = asker.stored_state(), asker.supervisor()
    if by is None and not state.status.ended and not state.drives_itself:
        tell(f"nobody supervises {state.job}: nothing new is seen until `gpucloud train {state.job}` goes on")


def _say(event: Event, *, as_json: bool) -> None:
    if as_json:
        say_json(event_json(event), is_one_of_many=True)
        return
    say_words(f"{event.at:%Y-%m-%d %H:%M:%S}  {event.shown_kind:<{_WIDTH}}  {event.shown}")
