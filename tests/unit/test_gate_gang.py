"""Who is to blame where machines do not reach each other as they should."""

from __future__ import annotations

import pytest

from gpucloud.domain.node.gate.gang import Blame, GangFacts, PairFacts, blame, rounds

EITHER = "which end is at fault is not known"


def gang(world, slow=(), *, broken=(), gbps=3.0):
    """What a gang's members say when these ranks (or pairs) are slow."""
    observed = []
    for rank in range(world):
        pairs = []
        for other in range(world):
            if other == rank:
                continue
            pair = (min(rank, other), max(rank, other))
            bad = pair in slow or rank in slow or other in slow
            reached = None if rank in broken or other in broken else 0.3 if bad else gbps
            pairs.append(PairFacts(one=pair[0], other=pair[1], gbps=reached))
        arrived = tuple(range(world)) if rank == 0 else ()
        observed.append(GangFacts(rank=rank, met=True, arrived=arrived, pairs=tuple(pairs)))
    return tuple(observed)


def check(observed, world, *, efa=False, proven=()):
    return blame(observed, [f"i-{rank}" for rank in range(world)], efa=efa, proven=frozenset(proven))


def test_nobody_is_to_blame_in_a_good_gang():
    assert check(gang(4), 4) == ()


def test_the_machine_that_all_slow_pairs_have_in_common_is_to_blame():
    assert check(gang(4, slow=(2,)), 4) == (
        Blame(rank=2, why="its network is too slow: 0.30 GB/s at best with i-0, i-1, i-3"),
    )


def test_two_slow_machines_are_both_found():
    assert [one.rank for one in check(gang(6, slow=(1, 4)), 6)] == [4, 1]


def test_between_two_alike_the_one_that_was_not_proven_goes():
    assert [one.rank for one in check(gang(2, slow=(0,), gbps=3.0), 2, efa=True)] == [1]
    assert [one.rank for one in check(gang(2, slow=(0,)), 2, efa=True, proven=(1,))] == [0]


@pytest.mark.parametrize(
    ("observed", "world", "proven", "blamed"),
    [
        (
            gang(2, gbps=0.01),
            2,
            (),
            (Blame(rank=1, why=f"the way between it and i-0 is too slow ({EITHER}): 0.01 GB/s at best"),),
        ),
        (
            gang(2, gbps=0.01),
            2,
            (0, 1),
            (Blame(rank=1, why=f"the way between it and i-0 is too slow ({EITHER}): 0.01 GB/s at best"),),
        ),
        (gang(2, gbps=0.01), 2, (0,), (Blame(rank=1, why="its network is too slow: 0.01 GB/s at best with i-0"),)),
        (
            gang(4, slow=((1, 3),)),
            4,
            (),
            (Blame(rank=3, why=f"the way between it and i-1 is too slow ({EITHER}): 0.30 GB/s at best"),),
        ),
        (
            (GangFacts(rank=0, met=False, arrived=(0,)), GangFacts(rank=1, error="timed out")),
            2,
            (),
            (Blame(rank=0, why=f"it and i-1 do not reach each other ({EITHER}): timed out"),),
        ),
    ],
)
def test_a_way_that_is_bad_is_not_called_the_fault_of_one_end(observed, world, proven, blamed):
    assert check(observed, world, proven=proven) == blamed


def test_two_machines_on_an_ordinary_network_are_held_to_a_sane_floor_only():
    assert check(gang(2, slow=(0,)), 2) == ()
    assert [one.rank for one in check(gang(2, gbps=0.01), 2)] == [1]


def test_a_machine_through_which_nothing_arrives_is_to_blame():
    assert check(gang(3, broken=(1,)), 3) == (
        Blame(rank=1, why="its network is too slow: nothing arrives with i-0, i-2"),
    )


def test_what_arrives_wrong_counts_more_than_speed():
    observed = list(gang(3))
    wrong = tuple(
        PairFacts(one=p.one, other=p.other, gbps=p.gbps, right=2 not in (p.one, p.other)) for p in observed[0].pairs
    )
    observed[0] = GangFacts(rank=0, met=True, arrived=(0, 1, 2), pairs=wrong)
    assert [one.rank for one in check(observed, 3)] == [2]
    assert check(observed, 3)[0].why == f"what is sent arrives wrong between it and i-0 ({EITHER})"
    assert check(observed, 3, proven=(0, 1))[0].why == "what it sends arrives wrong (with i-0)"


def test_who_did_not_come_is_to_blame():
    observed = (
        GangFacts(rank=0, met=True, arrived=(0, 2)),
        GangFacts(rank=1, error="DistNetworkError: timed out"),
        GangFacts(rank=2, met=True),
    )
    assert check(observed, 3) == (Blame(rank=1, why="it does not reach the others: DistNetworkError: timed out"),)


@pytest.mark.parametrize("host", [GangFacts(rank=0, met=True, arrived=(0,)), GangFacts(rank=0)])
def test_where_nobody_comes_to_the_meeting_place_is_to_blame(host):
    observed = (host, GangFacts(rank=1, error="timed out"), GangFacts(rank=2, error="timed out"))
    assert check(observed, 3) == (Blame(rank=0, why="the others do not reach it: timed out"),)


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 9])
def test_every_pair_comes_once_and_no_member_twice_in_a_round(world):
    found = rounds(world)
    pairs = [pair for one in found for pair in one]
    assert sorted(pairs) == [(a, b) for a in range(world) for b in range(a + 1, world)]
    assert all(len({rank for pair in one for rank in pair}) == 2 * len(one) for one in found)


def test_a_member_that_came_and_then_failed_is_to_blame():
    observed = list(gang(3))
    observed[2] = GangFacts(rank=2, met=True, error="DistBackendError: NCCL error")
    assert [one.rank for one in check(observed, 3)] == [2]


def test_a_gang_that_only_names_its_gpus_is_not_blamed():
    assert check([GangFacts(rank=r, met=True, arrived=(0, 1)) for r in (0, 1)], 2) == ()
