"""Seeded bugs: each a change of the product that somebody could make, and what must find it."""

from __future__ import annotations

from typing import Any

from tests.faults.seeded import Bug, Table

seeded = Table()


def bugs() -> tuple[Bug, ...]:
    """Return every seeded bug, by what it breaks."""
    return seeded.bugs()


# The lease

_LEASE_TESTS = ("pytest", "tests/functional/test_lease.py")
_AUTHORIZATION_TESTS = ("pytest", "tests/unit/test_authorization.py")
_ARMINGS_TESTS = ("pytest", "tests/unit/test_armings.py")
_WALL_TESTS = ("pytest", "tests/functional/aws/test_aws_wall.py")


@seeded("usecases.jobstore.jobstore:JobStore.replace", "lease", quick=True)
def plain_put(original: Any) -> Any:
    """The state is written whatever was written meanwhile."""
    import copy

    class Careless:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def put(self, key: str, data: bytes, **_: object) -> Any:
            return self.store.put(key, data)

    def replace(self: Any, *args: Any) -> Any:
        careless = copy.copy(self)
        careless.store = Careless(self.store)
        return original(careless, *args)

    return replace


@seeded("usecases.jobstore.lease:is_over", *_LEASE_TESTS)
def lease_never_expires(original: Any) -> Any:
    """Only a process that is known to be gone is followed."""
    from dataclasses import replace

    return lambda state, stored: original(state, replace(stored, modified=stored.store_time))


@seeded("usecases.jobstore.lease:is_over", *_LEASE_TESTS)
def lease_expires_by_the_owners_clock(original: Any) -> Any:
    """The age of a lease is reckoned from when its owner says that it took it."""
    from dataclasses import replace

    def is_over(state: Any, stored: Any) -> Any:
        return original(state, replace(stored, modified=state.owner.since) if state.owner else stored)

    return is_over


@seeded("usecases.jobstore.lease:take", "lease")
def epoch_does_not_rise(original: Any) -> Any:
    """Who takes over goes on with the number of who was there before."""
    from dataclasses import replace

    def take(*args: Any, **kwargs: Any) -> Any:
        lease = original(*args, **kwargs)
        lease.write(replace(lease.state, epoch=lease.state.epoch - 1))
        return lease

    return take


@seeded("usecases.jobstore.lease:Lease._put", "lease")
def nonce_not_compared(original: Any) -> Any:
    """A refused write is another's, even where its own reply was lost."""

    def put(self: Any) -> Any:
        self._unsure.clear()
        return original(self)

    return put


@seeded("usecases.jobstore.lease:Lease._put", "lease")
def foreign_nonce_accepted(original: Any) -> Any:
    """A refused write is taken for one's own, whoever wrote."""

    class Everything(set[str]):
        def __contains__(self, _: object) -> bool:
            return True

    def put(self: Any) -> Any:
        self._unsure = Everything(self._unsure)
        return original(self)

    return put


@seeded("usecases.jobstore.lease:Lease.write", *_LEASE_TESTS)
def lease_deleted_on_release(original: Any) -> Any:
    """Who gives the lease back deletes the state."""

    def write(self: Any, state: Any) -> Any:
        if state.owner is not None:
            return original(self, state)
        return self._jobs.store.delete(f"jobs/{self._jobs.job}/state.json")

    return write


@seeded("usecases.jobstore.lease:Lease._with_news", "events")
def events_not_written_with_the_state(original: Any) -> Any:
    """What has happened is put after the state alone: who is killed in between never told it."""

    def with_news(self: Any, state: Any) -> Any:
        original(self, state)
        return ()

    return with_news


@seeded("usecases.jobstore.events:Outbox.store", "events")
def events_forgotten_by_a_store_that_fails(original: Any) -> Any:
    """What could not be put is not tried again."""

    def store(self: Any) -> Any:
        original(self)
        self.pending = ()

    return store


@seeded("usecases.jobstore.events:EventLog.put", "events")
def events_written_over(original: Any) -> Any:
    """An event is put whether it is there or not."""
    from gpucloud.domain import codec

    return lambda self, event: self._store.put(f"{self._root}{event.name}.json", codec.to_json(event).encode())


@seeded("usecases.jobstore.lease:Lease._with_news", "events")
def events_of_a_state_that_was_never_written(original: Any) -> Any:
    """Events are put before the state that tells them: another may have the job by then."""

    def with_news(self: Any, state: Any) -> Any:
        pending = original(self, state)
        self._outbox.store()
        return pending

    return with_news


@seeded("usecases.jobstore.lease:Lease.confirm", *_LEASE_TESTS)
def lease_not_confirmed_after_a_sleep(original: Any) -> Any:
    """Whoever slept goes on as if nothing had happened meanwhile."""

    def confirm(self: Any) -> None:
        if self._lost is not None:
            raise self._lost

    return confirm


@seeded("agent.attempt.files:Inbox._take", "lease", quick=True)
def node_fence_skipped(original: Any) -> Any:
    """A machine obeys who was followed by another."""

    def take(self: Any) -> None:
        highest, self.epoch = self.epoch, 0
        original(self)
        self.epoch = max(highest, self.epoch)

    return take


# Money

_RECONCILE_TESTS = ("pytest", "tests/unit/test_reconcile.py")
_PAYABLE_TESTS = ("pytest", "tests/unit/test_payable.py")


@seeded("domain.supervision.reconcile:_must_arm", *_RECONCILE_TESTS, quick=True)
def launch_before_arm(original: Any) -> Any:
    """Machines are asked for first, the shut-off is armed when the level stands."""
    return lambda goal, snapshot, *rest: snapshot.group.size == goal.nodes and original(goal, snapshot, *rest)


@seeded("usecases.supervise.provision:MachineProvisioner._arm", "armed")
def shut_off_lowered_before_the_state(original: Any) -> Any:
    """The cloud's shut-off comes closer while the books still promise the later one."""

    def arm(self: Any, group: Any, until: Any) -> Any:
        self.services.group.arm(group, until)
        return original(self, group, until)

    return arm


@seeded("domain.money.budget:paid_until", "budget")
def reserve_forgotten(original: Any) -> Any:
    """All that is left is promised, and nothing kept for the end."""
    from dataclasses import replace
    from datetime import timedelta

    return lambda now, *, prepaid_rule, **rest: original(
        now, prepaid_rule=replace(prepaid_rule, reserve=timedelta(0)), **rest
    )


@seeded("usecases.jobstore.lease:StoreClock.now", "storm")
def budget_by_the_own_clock(original: Any) -> Any:
    """The time is what this machine thinks it is."""
    return lambda self: self.clock.now()


@seeded("usecases.money.spend:SpendTracker.payable", *_PAYABLE_TESTS)
def replacement_not_counted(original: Any) -> Any:
    """Only the machines that are wanted are reckoned with, not what the group holds and what is being taken."""
    from dataclasses import replace

    def payable(self: Any, state: Any, group: Any, *rest: Any) -> Any:
        nodes = tuple(replace(node, relieved=False) for node in group.nodes)
        return original(self, state, replace(group, size=0, nodes=nodes), *rest)

    return payable


@seeded("domain.supervision.strays:with_intervals", *_PAYABLE_TESTS)
def vanished_machine_forgotten(original: Any) -> Any:
    """Only what is listed was ever there."""
    return lambda intervals, nodes: original((), nodes)


@seeded("domain.supervision.renewal:make_room", *_RECONCILE_TESTS)
def shut_off_not_lowered_before_relieving(original: Any) -> Any:
    """One more machine is asked for within a time that was reckoned without it."""
    from dataclasses import replace

    def make_room(goal: Any, snapshot: Any, prepaid_rule: Any) -> Any:
        if snapshot.payable_with_another is not None and snapshot.group.armed_until is not None:
            snapshot = replace(
                snapshot, payable_with_another=max(snapshot.payable_with_another, snapshot.group.armed_until)
            )
        return original(goal, snapshot, prepaid_rule)

    return make_room


@seeded("domain.supervision.membership:warned_until", *_RECONCILE_TESTS)
def notice_believed_for_ever(original: Any) -> Any:
    """A machine is about to be taken for as long as it says so itself."""

    def warned_until(node: Any, snapshot: Any) -> Any:
        notice = node.status.notice if node.status is not None else None
        return notice.at if notice is not None else original(node, snapshot)

    return warned_until


@seeded("adapters.aws.nodes.group:AwsNodeGroup.relieve", "wall")
def relieved_machine_taken_out_of_its_group(original: Any) -> Any:
    """A machine that says that it is being taken leaves the group, and so its schedule."""

    def relieve(self: Any, group: str, node_id: str, **cap: Any) -> None:
        original(self, group, node_id, **cap)
        watch = self._watch(group)
        with self._aws.calling("autoscaling", "detach", watch.place.region) as client:
            client.detach_instances(
                AutoScalingGroupName=watch.place.cluster, InstanceIds=[node_id], ShouldDecrementDesiredCapacity=True
            )

    return relieve


@seeded("usecases.supervise.provision:MachineProvisioner._last_intervals", "pytest", "tests/unit/test_last_bill.py")
def one_old_listing_trusted(original: Any) -> Any:
    """The first list after the end counts, whatever it still shows."""
    from gpucloud.domain.supervision.strays import as_listed

    return lambda self, name: (
        as_listed(self.lease.state, self.services.group.describe(name), self.services.clock.now()).nodes
    )


@seeded("agent.daemon:Agent._renew", "pytest", "tests/unit/test_agent_paid_time.py")
def save_too_late(original: Any) -> Any:
    """A last, short piece of paid time is taken for a whole lease."""
    from dataclasses import replace

    def renew(self: Any, now: Any) -> None:
        before = self._prepaid
        original(self, now)
        if self._prepaid is not None and self._prepaid is not before:
            self._prepaid = replace(self._prepaid, heard_at=now)

    return renew


@seeded("agent.attempt.decide:_of_running", "budget-save")
def no_save_before_the_wall(original: Any) -> Any:
    """Ranks hear nothing of the end of what is paid until it is there."""

    def of_running(snapshot: Any, running: Any, prepaid_rule: Any) -> Any:
        return original(
            snapshot, running, type(prepaid_rule).FAR if prepaid_rule is type(prepaid_rule).NEAR else prepaid_rule
        )

    return of_running


@seeded("agent.attempt.decide:_of_running", "pytest", "tests/unit/test_agent_decide.py")
def unpaid_ranks_go_on(original: Any) -> Any:
    """Ranks go on when their paid time is over."""

    def of_running(snapshot: Any, running: Any, prepaid_rule: Any) -> Any:
        return original(
            snapshot, running, type(prepaid_rule).FAR if prepaid_rule is type(prepaid_rule).PASSED else prepaid_rule
        )

    return of_running


@seeded("usecases.jobstore.orders:Orders.give", "pytest", "tests/unit/test_orders.py")
def order_given_over_another(original: Any) -> Any:
    """A start has its way, whatever was ordered since it looked: a `down` that came in between is lost."""
    return lambda self, order, over: original(self, order, self.newest())


@seeded("usecases.job.passes:sooner", "pytest", "tests/unit/test_budgeting.py")
def shut_off_left_to_machines(original: Any) -> Any:
    """A budget that was lowered is left to the machines that drive the job, whatever they may do on their cloud."""
    return lambda armed, until: None


# Supervision

_BELIEF_TESTS = ("pytest", "tests/unit/test_belief.py")
_ELASTIC_TESTS = ("pytest", "tests/unit/test_elastic.py")


@seeded("domain.supervision.membership:believed_dead", *_BELIEF_TESTS)
def silence_alone_believed(original: Any) -> Any:
    """Who does not answer us is dead, whoever else was asked or not."""
    from dataclasses import replace

    from gpucloud.domain.node.node import PeerReport

    def believed_dead(node: Any, *rest: Any) -> Any:
        return original(
            node if node.peer_report is PeerReport.ALIVE else replace(node, peer_report=PeerReport.DEAD), *rest
        )

    return believed_dead


@seeded("domain.supervision.membership:believed_dead", *_BELIEF_TESTS)
def offline_believed(original: Any) -> Any:
    """What a witness said counts, though nobody at all answers us."""
    from gpucloud.domain.node.node import PeerReport
    from gpucloud.domain.supervision.membership import is_gone

    def believed_dead(node: Any, snapshot: Any, limits: Any) -> Any:
        silent = not is_gone(node) and node.silent_for >= limits.silent
        return (silent and node.peer_report is PeerReport.DEAD) or original(node, snapshot, limits)

    return believed_dead


@seeded("domain.supervision.elastic:order_to_grow", *_ELASTIC_TESTS)
def grows_at_once(original: Any) -> Any:
    """More machines are worth a new attempt as soon as they are ready, however young they are."""
    from dataclasses import replace
    from datetime import timedelta

    from gpucloud.domain.supervision.snapshot import Readiness

    def aged(node: Any) -> Any:
        return replace(node, node=replace(node.node, launched_at=node.node.launched_at - timedelta(days=30)))

    def order_to_grow(attempt: Any, goal: Any, snapshot: Any, limits: Any) -> Any:
        if all(node.readiness is Readiness.READY for node in snapshot.nodes):
            snapshot = replace(snapshot, nodes=tuple(map(aged, snapshot.nodes)))
        return original(attempt, goal, snapshot, limits)

    return order_to_grow


@seeded("domain.supervision.elastic:waits_until", *_ELASTIC_TESTS)
def waits_for_who_comes_later(original: Any) -> Any:
    """A start waits for machines that are only to come, too."""
    import sys
    from unittest import mock

    def waits_until(*args: Any) -> Any:
        with mock.patch.object(sys.modules[original.__module__], "_some_follow", return_value=True):
            return original(*args)

    return waits_until


@seeded("usecases.supervise.observe:Observer._look_at_unprepared", "pytest", "tests/unit/test_simulation.py")
def frozen_machine_waited_for(original: Any) -> Any:
    """One that was out of reach once, and is tried again, counts as one that has just answered."""

    def look(self: Any, node_id: Any, memory: Any, state: Any, now: Any) -> None:
        tried = not self.bootstrapper.unreachable(node_id)
        original(self, node_id, memory, state, now)
        if tried:
            memory.answered_at = now

    return look


@seeded("domain.supervision.membership:is_broken", "pytest", "tests/unit/test_supervision_limits.py")
def who_is_done_ends_who_is_not(original: Any) -> Any:
    """A member that is done counts as one that broke off: those that still work have a minute."""
    del original
    from gpucloud.domain.supervision.membership import is_over, members_of

    return lambda attempt, snapshot: len({is_over(attempt, node) for node in members_of(attempt, snapshot)}) == 2


@seeded("domain.supervision.strays:ended", "pytest", "tests/unit/test_supervision_limits.py")
def what_is_listed_no_longer_lives_on(original: Any) -> Any:
    """A machine that the cloud has forgotten is charged up to now."""
    return lambda interval, paid_until, now: original(interval, None, now)


@seeded("domain.supervision.during:_bring_home", "pytest", "tests/unit/test_supervision_limits.py")
def closed_before_the_outputs_are_home(original: Any) -> Any:
    """An attempt is closed, and its machines are ended, whatever became of its outputs."""
    del original
    return lambda attempt, goal, snapshot, rules: None


@seeded("domain.supervision.renewal:trained_nothing", *_RECONCILE_TESTS)
def a_run_without_a_step_succeeded(original: Any) -> Any:
    """A script that ends without a step has succeeded, whatever it resumed from."""
    del original
    return lambda attempt, goal, snapshot: False


@seeded("domain.state.order:is_of_another_file", "pytest", "tests/functional/test_start.py")
def a_name_is_enough(original: Any) -> Any:
    """A job file goes on with any run of its name."""
    del original
    return lambda order, job, spec_sha256, **_: False


@seeded("domain.checkpoint.protection:must_be_meant", "pytest", "tests/unit/test_protection.py")
def nobody_need_mean_it(original: Any) -> Any:
    """A script that saves nothing is begun in CI on machines that cost money."""
    del original
    return lambda job, protection: False


@seeded("domain.supervision.quarantine:_rounds", "pytest", "tests/unit/test_preparing.py")
def one_outage_is_many_failures(original: Any) -> Any:
    """Machines that fail beside one another count one by one."""
    del original
    return lambda failed: len(list(failed))


@seeded("domain.supervision.transitions:reopen", "pytest", "tests/unit/test_supervision_limits.py")
def what_failed_before_an_end_counts_on(original: Any) -> Any:
    """A job that goes on after its end is judged by the refusals and failed bootstraps that it ended for."""
    from dataclasses import replace

    return lambda state: replace(original(state), failed_bootstraps=state.failed_bootstraps, cooldowns=state.cooldowns)


@seeded("domain.supervision.reconcile:_keep", "pytest", "tests/unit/test_budget.py")
def kept_whatever_the_budget_pays(original: Any) -> Any:
    """Machines that are kept stay as long as the cloud has been told, whoever died before he told it less."""
    from gpucloud.domain.supervision.action import Done

    del original
    return lambda snapshot, prepaid_rule: Done()


@seeded("usecases.jobstore.lease:Lease.renew", "pytest", "tests/unit/test_lease_renewal.py")
def hung_owner_keeps_the_lease(original: Any) -> Any:
    """A lease is renewed for as long as its process is there, whatever that does."""
    del original
    return lambda self: self._write(self._state)


@seeded("adapters.hosts.records:Recollection.remove", "pytest", "tests/unit/test_own_host_groups.py")
def ids_of_hosts_used_again(original: Any) -> Any:
    """A group of hosts is forgotten with how many nodes it had."""
    del original
    return lambda self, group: self._store.delete(f"clusters/{group}/hosts.json")


@seeded("domain.supervision.quarantine:_with", "pytest", "tests/unit/test_preparing.py")
def dead_in_bootstrap_is_the_users_error(original: Any) -> Any:
    """A machine that does not answer counts as one that cannot be prepared."""
    from dataclasses import replace

    from gpucloud.domain.supervision.quarantine import Prepared

    return lambda known, one: original(known, replace(one, how=Prepared.FAILED))


@seeded("domain.supervision.during:_reason", *_RECONCILE_TESTS)
def own_failure_not_told_from_a_lost_peers(original: Any) -> Any:
    """A script that failed because a machine went has failed by itself."""
    from dataclasses import replace

    def reason(attempt: Any, members: Any, snapshot: Any, *rest: Any) -> Any:
        taken = any(one.attempt == attempt.number for one in snapshot.state.interruptions)
        if taken and (attempt.ending_reason is None or attempt.ending_reason.retried):
            attempt = replace(attempt, ending_reason=None)
            snapshot = replace(snapshot, state=replace(snapshot.state, interruptions=()))
        return original(attempt, members, snapshot, *rest)

    return reason


@seeded("agent.attempt.decide:decide", "pytest", "tests/unit/test_agent_decide.py")
def attempt_started_twice(original: Any) -> Any:
    """An attempt that was begun before is begun again."""
    from dataclasses import replace

    return lambda snapshot: original(replace(snapshot, newest=snapshot.newest - 1))


@seeded("domain.market.policy:_in_time", "deadline")
def deadline_net_left_out(original: Any) -> Any:
    """What a policy wants is done, whatever becomes of the deadline."""
    return lambda task, snapshot, choice: choice


@seeded("domain.supervision.deadline:_before_it_is_late", "pytest", "tests/unit/test_capacity_decision.py")
def lost_time_on_spot_not_seen(original: Any) -> Any:
    """Spot machines that work are trusted to lose no time."""
    return lambda case, choice: choice


@seeded("domain.supervision.deadline:situation", "pytest", "tests/unit/test_capacity_decision.py")
def deadline_by_money_kept_for_the_end(original: Any) -> Any:
    """A deadline is reckoned with what is kept for the last save."""
    from dataclasses import replace

    def situation(goal: Any, snapshot: Any, *rest: Any) -> Any:
        case = original(goal, snapshot, *rest)
        return case and replace(case, money_left_usd=goal.budget_usd - snapshot.spent_usd)

    return situation


@seeded("domain.supervision.elastic:_begin", "pytest", "tests/unit/test_succession.py")
def both_pools_asked_for_before_the_shut_off(original: Any) -> Any:
    """Machines that take over are asked for within a time that was reckoned without them."""
    from gpucloud.domain.supervision.action import Appoint, Arm

    def begin(attempt: Any, goal: Any, snapshot: Any, offer: Any) -> Any:
        found = original(attempt, goal, snapshot, offer)
        return Appoint(offer=offer) if isinstance(found, Arm) else found

    return begin


@seeded("domain.state.state:JobState.dearest_usd_per_hour", "pytest", "tests/unit/test_succession.py")
def dearer_pool_not_counted(original: Any) -> Any:
    """Machines of another pool are reckoned at the price of the job's own."""
    return property(lambda self: self.cap_usd_per_hour)


@seeded("domain.supervision.during:_order_for_the_hung", "pytest", "tests/unit/test_hang.py")
def hang_not_noticed(original: Any) -> Any:
    """Ranks that make no step any more are left alone."""
    from gpucloud.domain.state.state import ExitReason

    def order(attempt: Any, *rest: Any) -> Any:
        return original(attempt, *rest) if attempt.ending_reason is ExitReason.HUNG else None

    return order


# Checkpoints


@seeded("domain.checkpoint.manifest:commits", "lost-steps")
def oldest_restored(original: Any) -> Any:
    """The lowest step counts as the newest."""
    return lambda keys: original(keys)[::-1]


@seeded("store.checkpoints:Checkpoints._read_part", "ckpt-corrupt")
def unverified_restored(original: Any) -> Any:
    """Whatever is read is as it was written."""
    from dataclasses import replace

    class Whatever:
        def __eq__(self, _: object) -> bool:
            return True

        def __getitem__(self, _: object) -> Whatever:
            return self

        __hash__ = None  # type: ignore[assignment]

    def read_part(self: Any, wanted: Any) -> Any:
        piece, *rest = wanted
        return original(self, (replace(piece, crc32=Whatever()), *rest))

    return read_part


@seeded("store.checkpoints:Checkpoints._see_that_none_is_newer", "pytest", "tests/functional/test_resume_protocol.py")
def older_trainer_goes_on(original: Any) -> Any:
    """Who was followed by another commits all the same."""
    return lambda self: None


@seeded("store.checkpoints:Checkpoints", "ckpt-torn")
def manifest_first(original: Any) -> Any:
    """The manifest is written before what it names."""
    from gpucloud.domain.checkpoint.manifest import Piece, data_key
    from gpucloud.domain.checkpoint.objects import sums_of

    commit_of = original.commit
    later: list[Any] = []

    def upload(self: Any, commit: Any, name: Any, data: Any) -> Any:
        key = data_key(commit, name)
        later.append((self._key(key), bytes(data)))
        sums = sums_of((data,))
        return Piece(key=key, size=sums.size, crc32=sums.crc32)

    def commit(self: Any, manifest: Any) -> None:
        commit_of(self, manifest)
        while later:
            self._store.put(*later.pop(0))

    original.upload, original.commit = upload, commit
    return original


# What `exact` says

_BESIDE_TESTS = ("pytest", "tests/unit/test_copies_beside.py")
_DATA_TESTS = ("pytest", "tests/functional/test_resume_data.py")
_STATE_TESTS = ("pytest", "tests/functional/test_resume_state.py")


@seeded("resume.save.capture:_Beside.copy", *_BESIDE_TESTS)
def graph_replayed_into_the_copy(original: Any) -> Any:
    """What comes next waits for no copy, also where no optimizer is seen to step."""
    return lambda self, own, shared, sums, *, waits: original(self, own, shared, sums, waits=False)


@seeded("store.parts:torn", *_BESIDE_TESTS, quick=True)
def torn_copy_believed(original: Any) -> Any:
    """What the GPU has summed is compared with nothing."""
    return lambda data, header, stretches: None


@seeded("resume.reading:unlike", "pytest", "tests/functional/test_resume_comparing.py")
def restored_state_believed(original: Any) -> Any:
    """What was put back is not compared with what was saved."""
    return lambda saved, put, ranks, shares: ""


@seeded("resume.state.tree:strides_of", *_STATE_TESTS)
def strides_lost(original: Any) -> Any:
    """Every tensor comes back row by row."""
    return lambda tensor: None


@seeded("resume.loader:Collated.__call__", *_DATA_TESTS)
def collation_unseeded(original: Any) -> Any:
    """Collation draws from whatever generators the worker has."""
    return lambda self, fetched: self._collate(fetched.samples)


@seeded("resume.feed:Feed._require_one_order", *_DATA_TESTS)
def ranks_order_as_they_like(original: Any) -> Any:
    """Ranks whose seeds differ train on overlapping samples."""
    return lambda self, loader: None


@seeded("resume.loader:Loader.load_state_dict", *_DATA_TESTS)
def other_order_is_exact(original: Any) -> Any:
    """Another seed, shuffle or length of the data lowers nothing."""

    def load_state_dict(self: Any, state: Any) -> Any:
        original(self, state)
        return ()

    return load_state_dict


@seeded("resume.state.modules:rebuckets", *_STATE_TESTS)
def deep_ddp_overlooked(original: Any) -> Any:
    """Only a DDP that is the model itself makes its steps in vain."""

    def rebuckets(module: Any) -> bool:
        from torch.nn.parallel import DistributedDataParallel

        return isinstance(module, DistributedDataParallel) and original(module)

    return rebuckets


@seeded("resume.feed:Feed._go_on_without_loader", *_STATE_TESTS)
def generators_left_without_a_loader(original: Any) -> Any:
    """A loop of the script's own finds its generators as they begin."""
    return lambda self: None


_SCRIPT_TESTS = ("pytest", "tests/functional/test_resume_scripts.py")


@seeded("resume.feed:Feed._go_on_as_the_step_left", *_SCRIPT_TESTS)
def evaluation_draws_for_training(original: Any) -> Any:
    """What is drawn between a step and the next batch changes what that trains with."""
    return lambda self, first_of_epoch: None


@seeded("resume.state.modules:Traits.put_back", *_SCRIPT_TESTS)
def frozen_layers_thaw(original: Any) -> Any:
    """What the script froze as it trained is trained again after a resume."""
    return lambda self, changed: None


@seeded("resume.save.cadence:Windows.now", *_SCRIPT_TESTS)
def one_optimizer_speaks_for_all(original: Any) -> Any:
    """A step at which any optimizer stepped counts as the end of every window."""

    def now(self: Any) -> Any:
        stepped = any(watch.stepped for watch in self._watches)
        for watch in self._watches:
            watch.stepped = stepped
        return original(self)

    return now


@seeded("resume.state.state:_keep_types", *_STATE_TESTS)
def master_weights_cast_down(original: Any) -> Any:
    """What torch makes of the types of optimizer state stays so."""
    return lambda optimizer, saved: None


# What lies outside


@seeded("adapters.ssh.connection:BoundedTransport.get_remote_server_key", "hostkey")
def host_key_not_compared(original: Any) -> Any:
    """Whatever key a host shows is the one that is pinned."""

    class Alike(str):
        def __eq__(self, _: object) -> bool:
            return True

        def __ne__(self, _: object) -> bool:
            return False

        __hash__ = str.__hash__

    class Shown:
        def get_base64(self) -> str:
            return Alike()

    return lambda self: Shown()


@seeded("domain.supervision.strays:ripe", "gc")
def gc_without_the_second_look(original: Any) -> Any:
    """A stray is removed when it is seen first."""
    from datetime import datetime, timezone

    long_ago = datetime(1970, 1, 1, tzinfo=timezone.utc)

    def ripe(found: Any, first_seen: Any, now: Any) -> Any:
        things = tuple(found)
        return original(things, {thing.key: long_ago for thing in things}, now)

    return ripe


@seeded("domain.supervision.strays:is_owned", "gc")
def gc_takes_another_stores(original: Any) -> Any:
    """What another store's jobs made is taken for one's own."""
    from dataclasses import replace

    return lambda thing, owner: original(thing, replace(owner, store=thing.tag("gpucloud:store")))


@seeded("adapters.ssh.shell:_word", "pytest", "tests/unit/test_shell_words.py")
def arguments_quoted_by_hand(original: Any) -> Any:
    """Words are put into quotes, whatever they hold."""
    return lambda word: f'"{word}"'


@seeded("usecases.supervise.session:words_of", "canary")
def secrets_not_masked(original: Any) -> Any:
    """Who looks on sees secrets."""
    return lambda secrets: ()


@seeded("domain.untrusted:landing_of", "landing")
def links_judged_by_their_text(original: Any) -> Any:
    """A link may go up after it went down, as long as its text ends inside."""
    import posixpath

    def landing_of(name: str, target: str) -> Any:
        place = posixpath.normpath(posixpath.join(posixpath.dirname(name), target))
        return original(name, target) if place.startswith((".", "/")) else place.split("/")

    return landing_of


@seeded("store.landing:Landing._mode", "landing", quick=True)
def landing_goes_through_links(original: Any) -> Any:
    """A link to a folder is taken for one."""
    import os

    from gpucloud.system import wholefile

    globals()["FOLDER"] = wholefile.FOLDER = wholefile.FOLDER & ~os.O_NOFOLLOW

    def mode(self: Any, name: str) -> int:
        try:
            return os.stat(name, dir_fd=self._top).st_mode
        except FileNotFoundError:
            return 0

    return mode


@seeded("store.filling:new_or_own", "pytest", "tests/unit/test_landing.py")
def part_written_through_a_link(original: Any) -> Any:
    """A part that is there is opened whatever it is."""
    import os

    return lambda name, flags, folder: os.open(name, flags & ~os.O_NOFOLLOW | os.O_CREAT, 0o600, dir_fd=folder)


@seeded("adapters.transfer.node_trees:_judge_together", "pytest", "tests/unit/test_pinned_tree.py")
def code_written_below_its_own_links(original: Any) -> Any:
    """A tree of code may have a name below a link."""
    return lambda manifest: None


@seeded("adapters.transfer.node_trees:stays", "pytest", "tests/unit/test_pinned_tree.py")
def code_with_links_to_anywhere(original: Any) -> Any:
    """A link in a tree of code may lead anywhere."""
    return lambda path, target: True


@seeded("adapters.transfer.copying:_top", "pytest", "tests/functional/test_copying.py")
def name_taken_from_the_node(original: Any) -> Any:
    """What arrives is named as the node names it."""
    return lambda written, named: named


@seeded("probe.torchrun:_is_loopback", "pytest", "tests/functional/test_rendezvous.py")
def ranks_meet_on_every_interface(original: Any) -> Any:
    """Where ranks meet, the whole network may come."""
    return lambda host: False


@seeded("adapters.terraform.workfolder:_files", "pytest", "tests/functional/test_terraform_lock.py")
def any_provider_taken(original: Any) -> Any:
    """The lock stays at home, and Terraform takes whatever it finds under the provider's name."""
    return lambda module: tuple(module.glob("*.tf"))


@seeded("adapters.packaging:_sum", "pytest", "tests/functional/test_ci_init.py")
def wheel_not_compared_with_its_record(original: Any) -> Any:
    """What was changed after it had been installed is passed on."""

    class Alike(str):
        def __eq__(self, _: object) -> bool:
            return True

        def __ne__(self, _: object) -> bool:
            return False

        __hash__ = str.__hash__

    return lambda data: Alike(original(data))


# One decision


@seeded("domain.supervision.snapshot:goal_of", "one-decision")
def machine_with_every_right(original: Any) -> Any:
    """A machine on AWS is taken for one that may move the shut-off and give machines up."""
    from dataclasses import replace

    return lambda order, who: replace(original(order, who), within_rights=False)


@seeded("domain.supervision.snapshot:goal_of", "one-decision")
def wish_to_keep_forgotten(original: Any) -> Any:
    """Whoever comes later does not know that the machines are to stay."""
    from dataclasses import replace

    return lambda order, who: replace(original(order, who), keep=False)


@seeded("domain.supervision.reconcile:_hold", "one-decision")
def held_for_as_long_as_they_are_paid(original: Any) -> Any:
    """Machines that wait for a mended script wait for all the time that is paid, which nobody was told."""
    from gpucloud.domain.supervision.action import Done

    del original
    return lambda until, snapshot: Done()


@seeded("usecases.supervise.session:Supervisor._goal", "one-decision")
def budget_of_the_first_start(original: Any) -> Any:
    """What the job may cost is what it was when it was started, whatever was ordered since."""
    from dataclasses import replace

    return lambda self: replace(original(self), budget_usd=self.services.job.budget_usd)


@seeded("domain.supervision.reconcile:decide", "one-decision")
def machine_tears_down(original: Any) -> Any:
    """A machine that drives the job decides as a process outside would."""
    from dataclasses import replace

    return lambda goal, snapshot, rules: original(
        replace(goal, self_driving=False, within_rights=False), snapshot, rules
    )


# What is said of a job


@seeded("cli.commands.passes:report_of", "views")
def budget_told_from_the_books_alone(original: Any) -> Any:
    """One command says how a job stood when its supervisor died, and the others how it stands."""
    del original

    def report_of(cloud: Any, known: Any) -> Any:
        from gpucloud.wiring.jobs import asker_of

        return asker_of(cloud, known).report()

    return report_of


@seeded("cli.render.bills:plain_amount", "views")
def what_is_spent_cut_off(original: Any) -> Any:
    """Sums in words are rounded down, and those for programs are not."""
    from decimal import ROUND_DOWN, Decimal

    del original
    return lambda usd: f"{usd.quantize(Decimal('0.01'), ROUND_DOWN):f}"


# Who ordered what


@seeded("domain.state.order:refuse_order", *_AUTHORIZATION_TESTS)
def older_order_taken(original: Any) -> Any:
    """The number of an order is not compared with the newest that was here."""
    return lambda order, *, signed_by, snapshot: original(order, signed_by=signed_by, snapshot=None)


@seeded("adapters.home:OrderMarks.raise_to", *_AUTHORIZATION_TESTS)
def mark_of_the_newest_order_set_back(original: Any) -> Any:
    """The last order that was read is the newest, whatever was read before."""

    def raise_to(self: Any, store: str, job: str, mark: Any) -> None:
        self._path(store, job).unlink(missing_ok=True)
        original(self, store, job, mark)

    return raise_to


@seeded("usecases.jobstore.orders:Orders.signed_by", *_AUTHORIZATION_TESTS)
def signature_not_checked(original: Any) -> Any:
    """Whoever an order says signed it did."""
    return lambda self, given: given.envelope.key or None


@seeded("adapters.keys:TrustedKeys.verify", "pytest", "tests/unit/test_signing.py")
def signature_of_other_bytes_accepted(original: Any) -> Any:
    """A trusted key's name is enough."""
    return lambda self, data, key_id, signature: self._keys[key_id].name if key_id in self._keys else None


@seeded("usecases.jobstore.orders:end_alone", *_AUTHORIZATION_TESTS)
def unsigned_order_has_a_budget(original: Any) -> Any:
    """All of an order to end a job counts, whoever wrote it."""
    return lambda order: order


@seeded("domain.state.order:refuse_elsewhere", *_AUTHORIZATION_TESTS)
def folders_of_another_machine_taken(original: Any) -> Any:
    """What an order names of the machine that gave it means the same here."""
    return lambda order, *, has_file: None


@seeded("usecases.jobstore.orders:is_ahead", *_AUTHORIZATION_TESTS)
def order_of_the_future_kept(original: Any) -> Any:
    """Another's order of the future is the newest there can be."""
    return lambda order, now: False


@seeded("usecases.jobstore.orders:Orders.is_own", *_AUTHORIZATION_TESTS)
def host_of_an_order_believed(original: Any) -> Any:
    """An order says itself on which machine it was given."""
    return lambda self, given: True


@seeded("adapters.home:_refuse_open", "pytest", "tests/unit/test_home.py")
def home_that_others_may_write_obeyed(original: Any) -> Any:
    """Whoever can write to the folder is obeyed."""
    return lambda root: None


@seeded("adapters.home:_on_the_way", "pytest", "tests/unit/test_home.py")
def links_on_the_way_home_not_looked_at(original: Any) -> Any:
    """Where the folder really lies is looked at alone."""
    return lambda path: (path.resolve(), *path.resolve().parents)


# What machines that drive their job may write


@seeded("usecases.jobstore.jobstore:as_armed", *_ARMINGS_TESTS)
def state_of_machines_believed(original: Any) -> Any:
    """What machines wrote of their price, pool and group counts."""
    return lambda state, armings: state


@seeded("usecases.jobstore.jobstore:joined", *_ARMINGS_TESTS)
def charge_lowered_by_a_machine(original: Any) -> Any:
    """A machine's bill of itself counts in place of the user's."""
    return lambda users, machines: original(
        tuple(c for c in users if c.node_id not in {m.node_id for m in machines}), machines
    )


@seeded("usecases.money.spend:unproven_usd", *_ARMINGS_TESTS)
def spend_of_machines_believed(original: Any) -> Any:
    """The books tell all that was spent while machines drove their job."""
    from decimal import Decimal

    return lambda *told: Decimal(0)


@seeded("usecases.money.spend:earlier_usd", "boundary")
def spend_before_machines_drove_forgotten(original: Any) -> Any:
    """What machines cost that were alive when the user left them is what their state says now."""
    from decimal import Decimal

    return lambda *told: Decimal(0)


@seeded("usecases.jobstore.jobstore:as_armed", "boundary")
def orders_acted_on_as_machines_say(original: Any) -> Any:
    """An order counts as acted on once a machine says so."""
    from dataclasses import replace

    return lambda state, armings: replace(original(state, armings), order_number=state.order_number)


@seeded("domain.supervision.self_driving:_lacking", "boundary")
def forgotten_machines_free(original: Any) -> Any:
    """A machine that the cloud lists no longer has cost what the books say of it."""
    from dataclasses import replace

    return lambda arming, *told: original(replace(arming, machines=0), *told)


@seeded("usecases.jobstore.jobstore:JobStore._of_ledger", "boundary")
def torn_bill_keeps_the_user_out(original: Any) -> Any:
    """Of a ledger in which a machine wrote what nobody can read, no sum is told."""

    def of_ledger(self: Any, kind: Any, key: str) -> Any:
        stored = self.store.get(key)
        return self._read(kind, key, stored.data) if stored is not None else None

    return of_ledger


@seeded("adapters.aws.policy:node_policy", "pytest", "tests/unit/test_iam_judge.py")
def machines_write_orders(original: Any) -> Any:
    """A machine's role may write all of its job."""

    def node_policy(**asked: Any) -> Any:
        policy = original(**asked)
        (written,) = (one for one in policy["Statement"] if one["Sid"] == "WriteJob")
        written["Resource"] = [f"{written['Resource'][0].rpartition('/checkpoints/')[0]}/*"]
        return policy

    return node_policy


@seeded("adapters.aws.policy:boundary_policy", "pytest", "tests/unit/test_iam_judge.py")
def boundary_without_its_refusal(original: Any) -> Any:
    """What is refused in a job's `control/` is only left out."""

    def boundary_policy(**asked: Any) -> Any:
        policy = original(**asked)
        return {**policy, "Statement": [one for one in policy["Statement"] if one["Effect"] == "Allow"]}

    return boundary_policy


@seeded("adapters.aws.statements:machines", "pytest", "tests/unit/test_iam_judge.py")
def groups_start_by_any_version(original: Any) -> Any:
    """The printed policies let a group start by the newest version of its template, whoever made that."""

    def machines(*asked: Any) -> Any:
        found = original(*asked)
        for statement in found:
            for operator in ("Bool", "BoolIfExists"):
                statement.get("Condition", {}).pop(operator, None)
        return found

    return machines


@seeded("adapters.aws.statements:keys", "pytest", "tests/unit/test_iam_judge.py")
def keys_used_by_themselves(original: Any) -> Any:
    """The printed policies let a key of the user's own be used by whoever holds them, not by S3 and EC2 alone."""

    def keys(*asked: Any, **more: Any) -> Any:
        return [{name: one[name] for name in one if name != "Condition"} for one in original(*asked, **more)]

    return keys


@seeded("adapters.aws.statements:drills", "pytest", "tests/unit/test_iam_judge.py")
def tags_set_on_what_stands(original: Any) -> Any:
    """The printed policies let somebody's drill be made ours by a tag."""

    def drills(names: Any) -> Any:
        return [
            {**one, "Resource": [resource.replace("${*}", "*") for resource in one["Resource"]]}
            for one in original(names)
        ]

    return drills


@seeded("usecases.supervise.provision:MachineProvisioner._tell_of", "pytest", "tests/unit/test_arming_first.py")
def machines_asked_for_before_they_are_told_of(original: Any) -> Any:
    """Machines that are to drive their job are asked for, and nothing on the user's side tells of them."""
    return lambda self, machines: None


# The wall on AWS


@seeded("adapters.aws.nodes.group:lift", "wall")
def protection_and_suspension_left(original: Any) -> Any:
    """What keeps the schedule from ending machines stays."""
    return lambda *asked: None


@seeded("adapters.aws.nodes.listing:held_back", *_WALL_TESTS)
def scale_in_protection_ignored(original: Any) -> Any:
    """A machine that is protected from its end counts as one that the schedule ends."""
    return lambda listing: tuple(one for one in original(listing) if "rotected" not in one)


@seeded("adapters.aws.nodes.listing:held_back", *_WALL_TESTS)
def suspended_processes_ignored(original: Any) -> Any:
    """A group whose schedule is suspended counts as armed."""
    return lambda listing: tuple(one for one in original(listing) if not one.startswith("suspended"))


@seeded("adapters.aws.nodes.sizing:Sizing._confirm", "wall")
def machine_started_after_the_shut_off_left(original: Any) -> Any:
    """What a supervisor started that slept before its call is left to the shut-off that recurs."""
    return lambda self, watch, before: None


@seeded("adapters.aws.nodes.sizing:require_time", "wall")
def machine_started_too_near_to_its_end(original: Any) -> Any:
    """Machines start however little time is ahead of the shut-off."""
    return lambda place, listing, now: None


@seeded("adapters.aws.nodes.launching:_data", *_WALL_TESTS)
def highest_price_left_to_the_market(original: Any) -> Any:
    """AWS is not told what a spot machine may cost at the most."""
    return lambda ec2, base, pool, cap: original(ec2, base, pool, None)


@seeded("adapters.aws.nodes.sizing:pinned", *_WALL_TESTS)
def newest_template_started(original: Any) -> Any:
    """A group starts whatever the newest version of its template says."""
    return lambda *asked: {**original(*asked), "Version": "$Latest"}


# What arrives


@seeded("domain.untrusted:judge_together", "landing")
def names_that_are_one_on_the_disk_taken(original: Any) -> Any:
    """Of two names for one place, the later takes it."""
    return lambda tree, *, folded=False: None


@seeded("domain.untrusted:judge", "pytest", "tests/unit/test_landing.py")
def any_number_of_files_taken(original: Any) -> Any:
    """A machine fills the disk's table with files of no bytes."""
    from dataclasses import replace

    return lambda tree, limits=original.__defaults__[0]: original(tree, replace(limits, entries=1 << 60))


@seeded("domain.untrusted:unpacked", "pytest", "tests/unit/test_bounds.py")
def archives_unpacked_without_end(original: Any) -> Any:
    """A few bytes may become any number."""
    return lambda data, most: original(data, 1 << 40)


@seeded("domain.untrusted:plain", "pytest", "tests/unit/test_shown.py")
def terminal_obeys_machines(original: Any) -> Any:
    """Text of others reaches the terminal as it is."""
    return lambda text: text


# The gate


@seeded("domain.node.gate.rules:_least_link", "gate")
def hosts_taken_for_as_fast_as_their_gpus(original: Any) -> Any:
    """A virtual machine's host is held to the generation of the GPU itself."""
    from dataclasses import replace

    return lambda gpu, spec: replace(original(gpu, spec), generation=spec.pcie_generation)


@seeded("domain.node.gate.rules:has_switches", "gate")
def boards_without_switches_not_known(original: Any) -> Any:
    """Every two GPUs are to have all their links between them."""
    return lambda report: True


@seeded("domain.node.gate.rules:_arithmetic", "gate")
def arithmetic_measured_and_not_judged(original: Any) -> Any:
    """A GPU whose clocks somebody locked takes part."""
    return lambda report: iter(())


@seeded("domain.node.gate.rules:held_findings", "gate")
def gpus_of_others_taken(original: Any) -> Any:
    """A GPU whose memory another program holds is as good as a free one."""
    return lambda report, wanted: iter(())


# Numbers


@seeded("domain.market.sizing:training_flops", "numbers")
def recomputing_counted_as_work(original: Any) -> Any:
    """The same arithmetic, made twice, is charged to a figure that leaves it out."""
    return lambda model, tokens: original(model, tokens) * (8 if model.recompute else 6) / 6


@seeded("domain.market.feasibility:least_span_s", "numbers")
def deadlines_with_room_for_one_start(original: Any) -> Any:
    """A deadline is taken that leaves no time to come back from an interruption."""
    return lambda task: original(task) - task.changeover_s


@seeded("domain.market.learned:grid_of", "numbers")
def slack_of_two_roundings(original: Any) -> Any:
    """The tables lack a tick of slack, and know of no try at spot at the least deadline."""
    from dataclasses import replace

    def grid_of(task: Any) -> Any:
        grid = original(task)
        return replace(grid, slack=max(grid.slack - 1, 0))

    return grid_of


@seeded("usecases.money.simulate:zone_sets", "numbers")
def plan_in_every_zone_of_a_region(original: Any) -> Any:
    """The plan replays more zones than the job has."""
    return lambda market, zones: original(market, 9)
