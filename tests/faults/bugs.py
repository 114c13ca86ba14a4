"""Seeded bugs: each a change of the product that somebody could make, and what must find it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """Texts in a file and what stands in their place; `found_by` is a goal's name, or pytest and its arguments."""

    name: str
    file: str
    changes: tuple[tuple[str, str], ...]
    found_by: tuple[str, ...]
    quick: bool = False

    def stale(self, root: Path) -> tuple[str, ...]:
        """Return the texts that are not in the file exactly once: faults of this table."""
        text = (root / self.file).read_text(encoding="utf-8")
        return tuple(old for old, _ in self.changes if text.count(old) != 1)

    def put_into(self, root: Path) -> None:
        """Change the file of a copy of the product."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        for old, new in self.changes:
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


def bugs() -> Iterator[Bug]:
    """Yield every seeded bug, by what it breaks."""
    yield from _lease()
    yield from _money()
    yield from _supervision()
    yield from _checkpoints()
    yield from _outside()


def _bug(name: str, file: str, text: str, bug: str, *found_by: str, quick: bool = False) -> Bug:
    return Bug(name=name, file=f"gpucloud/{file}", changes=((text, bug),), found_by=found_by, quick=quick)


_LEASE_TESTS = ("pytest", "tests/functional/test_lease.py")


def _lease() -> Iterator[Bug]:
    lease = "usecases/lease.py"
    put = "_bytes(state), if_version=version)"
    yield _bug("plain-put", "usecases/jobstore.py", put, "_bytes(state))", "lease", quick=True)
    expiry = "    return stored.store_time - stored.modified >= timedelta(seconds=state.lease_s)"
    yield _bug("lease-never-expires", lease, expiry, "    return False", *_LEASE_TESTS)
    own_clock = "    return stored.store_time - owner.since >= timedelta(seconds=state.lease_s)"
    yield _bug("lease-expires-by-the-owners-clock", lease, expiry, own_clock, *_LEASE_TESTS)
    yield _bug("epoch-does-not-rise", lease, "epoch=state.epoch + 1", "epoch=state.epoch", "lease")
    nonce = "if loaded is None or loaded[0].nonce not in self._unsure:"
    yield _bug("nonce-not-compared", lease, nonce, "if loaded is not None or self._unsure:", "lease")
    yield _bug("foreign-nonce-accepted", lease, nonce, "if loaded is None:", "lease")
    release = "self.write(replace(self._state, owner=None))"
    deleted = 'self._jobs.store.delete(f"jobs/{self._jobs.job}/state.json")'
    yield _bug("lease-deleted-on-release", lease, release, deleted, *_LEASE_TESTS)
    stale = "if self._uptime() - self._written_at > self._state.lease_s / 3:"
    yield _bug("lease-not-confirmed-after-a-sleep", lease, stale, "if False:", *_LEASE_TESTS)
    fence = "        if desired.epoch < self.epoch:\n            return\n"
    yield _bug("node-fence-skipped", "agent/levels.py", fence, "", "lease", quick=True)


def _money() -> Iterator[Bug]:
    arm = "    if payable is not None and _must_arm(goal, seen, rules):"
    later = "    if group.size == goal.nodes and payable is not None and _must_arm(goal, seen, rules):"
    tests = ("pytest", "tests/unit/test_reconcile.py")
    yield _bug("launch-before-arm", "domain/supervision/between.py", arm, later, *tests, quick=True)
    lowering = "        if promised is not None and until < promised:"
    yield _bug("shut-off-lowered-before-the-state", "usecases/rent.py", lowering, "        if False:", "armed")
    spendable = "    spendable = left_usd - reserve_usd(nodes, cap_usd_per_hour, wall)"
    yield _bug("reserve-forgotten", "domain/supervision/prepaid.py", spendable, "    spendable = left_usd", "budget")
    clock = "clock=StoreClock(world.clock, world.jobs, watcher.story)"
    yield _bug("budget-by-the-own-clock", "usecases/supervise.py", clock, "clock=world.clock", "storm")
    coming = "max(wanted, group.size) + sum(node.detached for node in group.alive)"
    payable = ("pytest", "tests/unit/test_payable.py")
    yield _bug("replacement-not-counted", "usecases/cashier.py", coming, "wanted", *payable)
    lives = "    known = {life.node_id: life for life in lives}"
    yield _bug("vanished-machine-forgotten", "domain/supervision/lives.py", lives, "    known = {}", *payable)
    detach = "            return lower or Detach(node_id=counted[0])"
    free = "            return Detach(node_id=counted[0])"
    yield _bug("shut-off-not-lowered-before-detaching", "domain/supervision/upkeep.py", detach, free, *tests)
    listed = "if all(life.ended_at is not None for life in lives) or self.world.clock.now() >= deadline:"
    yield _bug(
        "one-old-listing-trusted", "usecases/rent.py", listed, "if True:", "pytest", "tests/unit/test_last_bill.py"
    )
    heard = "heard_at=before.heard_at if before else now"
    renewed = ("pytest", "tests/unit/test_agent_paid_time.py")
    yield _bug("save-too-late", "agent/reconcile.py", heard, "heard_at=now", *renewed)
    near = "    if wall is Wall.NEAR and seen.prepaid is not None:"
    yield _bug("no-save-before-the-wall", "agent/decide.py", near, "    if False:", "budget-save")
    passed = "    if wall is Wall.PASSED or _is_unwanted(seen.desired, running):"
    unpaid = "    if _is_unwanted(seen.desired, running):"
    yield _bug("unpaid-ranks-go-on", "agent/decide.py", passed, unpaid, "pytest", "tests/unit/test_agent_decide.py")
    wishes = "lambda request: replace(request, budgets=tuple(w for w in request.budgets if w.id not in wishes))"
    all_of_them = "lambda request: replace(request, budgets=())"
    yield _bug("budget-wish-lost", "usecases/jobstore.py", wishes, all_of_them, *_LEASE_TESTS)


_ELASTIC_TESTS = ("pytest", "tests/unit/test_elastic.py")


def _supervision() -> Iterator[Bug]:
    belief = "domain/supervision/belief.py"
    tests = ("pytest", "tests/unit/test_belief.py")
    dead = "    if node.word is Word.DEAD and somebody_answers(seen):"
    yield _bug("silence-alone-believed", belief, dead, "    if somebody_answers(seen):", *tests)
    yield _bug("offline-believed", belief, dead, "    if node.word is Word.DEAD:", *tests)
    stay = "    if not stay or _lasts_s("
    yield _bug("grows-at-once", "domain/supervision/elastic.py", stay, "    if _lasts_s(", *_ELASTIC_TESTS)
    siblings = "return until if seen.now < until and _some_follow(ready, seen, pace, limits) else None"
    yield _bug("waits-for-who-comes-later", "domain/supervision/elastic.py", siblings, "return until", *_ELASTIC_TESTS)
    frozen = "        elif memory.lost_at is None:\n"
    simulated = ("pytest", "tests/unit/test_simulation.py")
    yield _bug("frozen-machine-waited-for", "usecases/observe.py", frozen, "        else:\n", *simulated)
    unreachable = "            self._silent[node.id] = self._silence(node.id)\n"
    preparing = ("pytest", "tests/unit/test_preparing.py")
    failure = f"            self._failures += 1\n{unreachable}"
    yield _bug("dead-in-bootstrap-is-the-users-error", "usecases/prepare.py", unreachable, failure, *preparing)
    reconciling = ("pytest", "tests/unit/test_reconcile.py")
    taken = "    if taken is not None:\n        return taken\n"
    yield _bug("own-failure-not-told-from-a-lost-peers", "domain/supervision/during.py", taken, "", *reconciling)
    begun = "desired.launch.attempt <= seen.newest:"
    again = "desired.launch.attempt < seen.newest:"
    yield _bug("attempt-started-twice", "agent/decide.py", begun, again, "pytest", "tests/unit/test_agent_decide.py")
    yield from _deadline()
    hang = "return EndAttempt(how=Stop.ABORT, reason=ExitReason.HUNG, message=why) if why is not None else None"
    unheard = ("pytest", "tests/unit/test_hang.py")
    yield _bug("hang-not-noticed", "domain/supervision/during.py", hang, "return None", *unheard)


def _deadline() -> Iterator[Bug]:
    net = "    choice = _in_time(task, seen, choice)\n"
    yield _bug("deadline-net-left-out", "domain/policy/net.py", net, "", "deadline")
    course = "domain/supervision/course.py"
    tests = ("pytest", "tests/unit/test_course.py")
    late = "    return _before_it_is_late(case, _steadily(case, choice))"
    trusting = "    return _steadily(case, choice)"
    yield _bug("lost-time-on-spot-not-seen", course, late, trusting, *tests)
    reserve = "seen.state.budget_usd - seen.spent_usd - kept_usd"
    situation = "domain/supervision/situation.py"
    yield _bug(
        "deadline-by-money-kept-for-the-end", situation, reserve, "seen.state.budget_usd - seen.spent_usd", *tests
    )
    succession = ("pytest", "tests/unit/test_succession.py")
    both = "    return Arm(until=until) if until is not None else Appoint(offer=offer)"
    file = "domain/supervision/succession.py"
    yield _bug("both-pools-asked-for-before-the-shut-off", file, both, "    return Appoint(offer=offer)", *succession)
    coming = "return max(self.cap_usd_per_hour, self.left_usd_per_hour, coming)"
    yield _bug("dearer-pool-not-counted", "domain/state.py", coming, "return self.cap_usd_per_hour", *succession)


def _checkpoints() -> Iterator[Bug]:
    file = "store/checkpoints.py"
    newest = "return tuple(sorted(found, reverse=True))"
    yield _bug("oldest-restored", "domain/manifest.py", newest, "return tuple(sorted(found))", "lost-steps")
    whole = "        return found and crc32_of((into,)) == piece.crc32[number]"
    yield _bug("unverified-restored", file, whole, "        return found", "ckpt-corrupt")
    newer = "        if newest and newest[0] > self.generation:"
    yield _bug(
        "older-trainer-goes-on", file, newer, "        if False:", "pytest", "tests/functional/test_resume_protocol.py"
    )
    upload = "        sums = self._store.write(self._key(key), (data,))\n        return Piece("
    later = (
        "        from gpucloud.domain.parts import sums_of\n"
        "        self._later = [*getattr(self, '_later', ()), (key, bytes(data))]\n"
        "        sums = sums_of((data,))\n        return Piece("
    )
    done = "  # one that came in between may have begun without this commit\n"
    then = (
        "\n        for key, data in self.__dict__.pop('_later', ()):\n"
        "            self._store.put(self._key(key), data)\n"
    )
    changes = ((upload, later), (done, then))
    yield Bug(name="manifest-first", file=f"gpucloud/{file}", changes=changes, found_by=("ckpt-torn",))


def _outside() -> Iterator[Bug]:
    key = "        if transport.get_remote_server_key().get_base64() != text:"
    yield _bug("host-key-not-compared", "adapters/ssh/connection.py", key, "        if False:", "hostkey")
    apart = "        if all(now - first_seen.get(thing.key, now) >= APART for thing in some)"
    yield _bug("gc-without-the-second-look", "domain/strays.py", apart, "        if some", "gc")
    store = "        and thing.tag(STORE) == owner.store\n"
    yield _bug("gc-takes-another-stores", "domain/strays.py", store, "", "gc")
    quoted = "    return os.fsencode(shlex.join(argv))"
    by_hand = """    return os.fsencode(" ".join(f"'{word}'" for word in argv))"""
    yield _bug(
        "arguments-quoted-by-hand", "adapters/ssh/shell.py", quoted, by_hand, "pytest", "tests/contract/test_shell.py"
    )
    hidden = "told = Discreet(watcher, words_of(world.secrets.values()))"
    yield _bug("secrets-not-masked", "usecases/supervise.py", hidden, "told = Discreet(watcher, ())", "canary")
