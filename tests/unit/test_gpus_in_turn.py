"""GPUs that others use before an attempt: what is waited for is the end of the wait, whoever has them in turn."""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta

from gpucloud.domain.supervision.action import Inspect
from gpucloud.usecases.supervise.inspection import Inspector, _Look
from tests.unit.worlds import NOW


def test_machines_that_others_use_in_turn_are_waited_for_no_longer_than_one_that_they_use_all_the_time() -> None:
    inspector = Inspector(services=None, bootstrapper=None, pool=None)  # type: ignore[arg-type]
    inspector._asked = Inspect(number=1, node_ids=("a", "b"))
    since = []
    for look, used in enumerate((("a",), ("b",), ("a", "b"), (), ("b",))):
        inspector._work = Future()
        at = NOW + look * timedelta(seconds=10)
        inspector._work.set_result(_Look(in_use=tuple((one, "x") for one in used), over_at=at))
        snapshot = inspector.snapshot()
        assert snapshot is not None
        since.append([(one.since - NOW).total_seconds() for one in snapshot.in_use])
    assert since == [[0], [0], [0, 0], [], [40]]
