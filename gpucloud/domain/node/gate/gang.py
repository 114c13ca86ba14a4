"""Whether the machines of a job reach each other as they should, and who is to blame where they do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SHARE = 0.4  # of what the better pairs reach: machines of one pool are alike
_BETTER = 0.8  # this share of all pairs is no faster: a third of the machines may be slow, a few pairs too fast
_SANE_GBPS = 0.02  # a fifth of the slowest network that is sold, 1 Gbit/s
_EITHER = "which end is at fault is not known"
_EFA_GBPS = 1.0  # 25 Gbit/s, the least of a type with EFA, are 3 GB/s


@dataclass(frozen=True, slots=True, kw_only=True)
class GangOrder:
    """What one member is told: its place, where all meet, and how. `device` is `cuda` or `cpu`."""

    rank: int
    world: int
    address: str
    port: int
    python: str
    device: str
    interface: str | None = None
    own_address: str = ""
    devices: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    megabytes: int = 64
    limit_s: float = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFacts:
    """What two members exchanged, in GB/s, one direction after the other; None when it failed. The lower rank first."""

    one: int
    other: int
    gbps: float | None
    right: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GangFacts:
    """What one member saw: whether it came to the meeting, who else did (rank 0 knows), and its pairs."""

    rank: int
    met: bool = False
    arrived: tuple[int, ...] = ()
    pairs: tuple[PairFacts, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """One member that is to take no part, by its rank, and why."""

    rank: int
    why: str


def blame(
    observed: Sequence[GangFacts], names: Sequence[str], *, efa: bool, proven: frozenset[int]
) -> tuple[Blame, ...]:
    """Return who is to go, nobody for a good gang. `names` are the members' by rank; `proven` are ranks that passed a
    check with others before.

    Who did not come to the meeting goes, unless most did not: then it is where they were to meet. Else every pair is
    measured, and the machine that all slow pairs have in common goes, one after the other. Between two with the same
    record, the one goes that was not proven, and then the higher rank: the way between them is at fault, and why then
    says that nobody knows at which end.
    """
    absent = _absent(observed, names)
    if absent:
        return absent
    slow = _slow_pairs(observed, efa=efa)
    found = []
    while slow:
        ranks = {rank for pair in slow for rank in (pair.one, pair.other)}
        record = {rank: sum(rank in (pair.one, pair.other) for pair in slow) for rank in ranks}
        worst = max(ranks, key=lambda rank: (record[rank], rank not in proven, rank))
        own = [pair for pair in slow if worst in (pair.one, pair.other)]
        alike = [rank for rank in _partners(worst, own) if record[rank] == record[worst]]
        is_sure = not alike or (worst not in proven and proven.issuperset(alike))
        found.append(Blame(rank=worst, why=_why(worst, own, names, is_sure=is_sure)))
        slow = [pair for pair in slow if pair not in own]
    return tuple(found)


def rounds(world: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return every pair once, in rounds in which each member is in one pair at most (the circle method)."""
    ring: list[int | None] = [*range(world), *([None] if world % 2 else [])]
    found = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        found.append(tuple((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None))
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return tuple(found)


def _absent(observed: Sequence[GangFacts], names: Sequence[str]) -> tuple[Blame, ...]:
    by_rank = {member.rank: member for member in observed}
    met = {rank for rank, member in by_rank.items() if member.met}
    missing = [rank for rank in range(len(names)) if rank not in met]
    if not missing:
        return ()
    host = by_rank.get(0)
    known = set(host.arrived) if host is not None else set()
    gone = [rank for rank in range(len(names)) if rank not in known and rank not in met]
    if host is None or len(known) <= 1 or not gone:
        said = _said(by_rank.get(missing[-1]))
        if len(names) == 2:
            return (Blame(rank=0, why=f"it and {names[1]} do not reach each other ({_EITHER}){said}"),)
        return (Blame(rank=0, why=f"the others do not reach it{said}"),)
    return tuple(Blame(rank=rank, why=f"it does not reach the others{_said(by_rank.get(rank))}") for rank in gone)


def _said(member: GangFacts | None) -> str:
    return f": {member.error}" if member is not None and member.error else ""


def _pairs(observed: Sequence[GangFacts]) -> tuple[PairFacts, ...]:
    """Both members of a pair tell of it: the worse counts. Who failed before any exchange failed with everybody."""
    found: dict[tuple[int, int], PairFacts] = {}
    failed = [
        PairFacts(one=min(member.rank, other.rank), other=max(member.rank, other.rank), gbps=None)
        for member in observed
        for other in observed
        if member.rank != other.rank and member.error is not None and not member.pairs
    ]
    for pair in (*failed, *(pair for member in observed for pair in member.pairs)):
        before = found.get((pair.one, pair.other), pair)
        found[pair.one, pair.other] = min(before, pair, key=lambda p: (p.right, p.gbps or 0.0))
    return tuple(found.values())


def _slow_pairs(observed: Sequence[GangFacts], *, efa: bool) -> list[PairFacts]:
    pairs = _pairs(observed)
    measured = sorted(pair.gbps for pair in pairs if pair.gbps is not None)
    floor = max(
        _EFA_GBPS if efa else _SANE_GBPS, _SHARE * measured[int(_BETTER * len(measured))] if len(measured) > 2 else 0.0
    )
    return [pair for pair in pairs if not pair.right or pair.gbps is None or pair.gbps < floor]


def _partners(rank: int, slow: Sequence[PairFacts]) -> list[int]:
    return [pair.other if pair.one == rank else pair.one for pair in slow]


def _why(rank: int, slow: Sequence[PairFacts], names: Sequence[str], *, is_sure: bool) -> str:
    others = ", ".join(names[one] for one in _partners(rank, slow))
    if any(not pair.right for pair in slow):
        if is_sure:
            return f"what it sends arrives wrong (with {others})"
        return f"what is sent arrives wrong between it and {others} ({_EITHER})"
    reached = [pair.gbps for pair in slow if pair.gbps is not None]
    figure = f"{max(reached):.2f} GB/s at best" if reached else "nothing arrives"
    if is_sure:
        return f"its network is too slow: {figure} with {others}"
    return f"the way between it and {others} is too slow ({_EITHER}): {figure}"
