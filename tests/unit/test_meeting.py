"""Ranks that come together beside their scripts: all of them or none, whenever each calls and leaves."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
import torch.distributed as dist

from gpucloud.resume.ranks import Meeting


def ranks(world: int) -> list[Meeting]:
    store = dist.HashStore()
    return [Meeting("pause-3-0", world, store) for _ in range(world)]


def test_a_lone_rank_comes_when_it_calls() -> None:
    (one,) = ranks(1)
    assert (one.called(), one.stands(), one.leave()) == (False, None, False)
    one.call()
    assert (one.called(), one.stands(), one.leave()) == (True, True, True)


def test_it_stands_once_every_rank_has_called() -> None:
    first, second = ranks(2)
    first.call()
    first.call()
    assert (second.called(), first.stands()) == (True, None)
    second.call()
    assert (first.stands(), second.stands(), first.leave(), second.leave()) == (True, True, True, True)


def test_who_goes_on_before_it_stands_has_it_not_take_place() -> None:
    first, second = ranks(2)
    first.call()
    assert first.leave() is False
    second.call()
    assert (second.stands(), second.leave()) == (False, False)


def test_who_never_called_goes_on_and_binds_nobody() -> None:
    first, second = ranks(2)
    first.call()
    assert second.leave() is False
    assert first.stands() is None
    assert first.leave() is False


ORDERS = sorted(set(itertools.permutations(["call 0", "call 1", "call 2", "leave 0", "leave 1", "leave 2"])))


def test_in_every_order_all_come_or_none() -> None:
    both = set()
    for order in ORDERS:
        three = ranks(3)
        gone: dict[int, bool] = {}
        for one in order:
            what, rank = one.split()
            if int(rank) in gone:  # who went on calls no more
                continue
            if what == "call":
                three[int(rank)].call()
            else:
                gone[int(rank)] = three[int(rank)].leave()
        assert len(set(gone.values())) == 1, order
        both |= set(gone.values())
    assert both == {True, False}


@pytest.mark.parametrize("seed", range(8))
def test_at_once_all_come_or_none(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        four, came = ranks(4), []
        waits = [(chance.random() / 500, chance.random() / 500) for _ in four]

        def attend(meeting: Meeting, before_s: float, after_s: float, came: list[bool] = came) -> None:
            time.sleep(before_s)
            meeting.call()
            time.sleep(after_s)
            came.append(meeting.leave())

        threads = [threading.Thread(target=attend, args=(m, *w)) for m, w in zip(four, waits, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(came)) == 1
