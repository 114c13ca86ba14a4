"""Makes a node fit for a job: facts, the steps that are needed, facts again; may be repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpucloud.domain.codec import Malformed, from_json
from gpucloud.domain.errors import HostUnreachable, NodeError, RemoteCommandFailed, SetupFailed, ShellClosed
from gpucloud.domain.node.bootstrap.facts import (
    PROBE_LIMIT_S,
    REFUSED,
    SETUP_FAILED,
    Bare,
    Facts,
    FailedSetup,
    awaiting,
    lock_record,
    package_path,
    parse_answer,
    parse_facts,
    parse_failed_setup,
    probe,
    question,
    ship,
)
from gpucloud.domain.node.bootstrap.steps import (
    DATA,
    GATE,
    IMAGE_HINT,
    LAYER,
    MACHINE,
    REBOOT_WANTED,
    STEPS,
    ClockReading,
    Command,
    Step,
    check,
    check_boto3,
    check_torch,
    check_torch_build,
    clock_reading,
    data_command,
    findings,
    job_python,
    lacking,
    layer_hint,
    require_python,
    surest,
)
from gpucloud.domain.node.bootstrap.wanted import Wanted
from gpucloud.domain.node.gate.report import REFUSED as GATE_REFUSED
from gpucloud.domain.untrusted import in_one_line
from gpucloud.ports import Clock, Completed, DataSets, Host
from gpucloud.system.processes import last_line
from gpucloud.usecases.services import Package
from gpucloud.usecases.supervise.needs import refusal

_LIMIT = timedelta(minutes=10)  # bare metal with eight GPUs takes five
_PAUSE_S = 3.0
_ASKED_S = 15.0
_BOOT_ID = ("cat", "/proc/sys/kernel/random/boot_id")
# As root, else by sudo without a password; where there is no systemd, `reboot` asks whatever is there.
REBOOT = """\
if [ "$(id -u)" -eq 0 ]; then systemctl reboot || reboot
else sudo -n systemctl reboot || sudo -n reboot
fi
"""


def reboot(host: Host, boot_id: str, clock: Clock) -> None:
    """Reboot the node and return when a boot other than `boot_id` answers. Raises NodeError."""
    try:
        done = host.run(("/bin/sh", "-c", REBOOT), timeout_s=_ASKED_S)
    except HostUnreachable:
        done = None  # it went before it could answer, or did not get the order: its boot says which
    if done is not None and done.exit_code != 0:
        said = done.stderr.decode("utf-8", errors="replace").strip()
        # A node that goes down may end the order's shell too, by a signal (128 + n).
        if done.exit_code < 128:
            raise NodeError(f"{host.node.id} does not reboot: {said}", hint="let its user reboot by sudo, or reboot it")
    come_back(host, (None, boot_id), clock)


def come_back(host: Host, not_yet: tuple[str | None, ...], clock: Clock) -> None:
    """Return when a node that reboots answers with another boot id than these (None: no answer). Raises NodeError."""
    deadline = clock.now() + _LIMIT
    while clock.now() < deadline:
        clock.sleep(_PAUSE_S)
        if _boot_id(host) not in not_yet:
            return
    raise NodeError(f"{host.node.id} did not come back within 10 min of a reboot", hint="replace the node")


def _boot_id(host: Host) -> str | None:
    try:
        done = host.run(_BOOT_ID, timeout_s=_ASKED_S)
    except ShellClosed:
        raise
    except HostUnreachable:
        return None
    return done.stdout.decode("ascii", errors="replace").strip() if done.exit_code == 0 else None


# Makes a node fit for a job: facts, the steps that are needed, facts again; may be repeated and killed anywhere.


_SHOWN_LINES = 20
_NOTE = "note: "  # so begins a line of a command's answer that the user should read
_TOLD_FROM_S = 1.0
_AWAIT_S = 3600.0
_SETUP_AGAIN_S = 5.0  # what the network lacked for a moment is there by then
_MOST_REBOOTS = 2  # one for the driver, one for what only shows with it: MIG, EFA


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlace:
    """What a node says of a data set that lies with the user: where it goes there, and which of its files it lacks."""

    folder: str
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrapped:
    """A node that is fit: where things lie on it, what was changed and how long each step took (seconds).

    `python` is the job's, `base_python` the one that runs the package. `changed` is empty when everything was there.
    `lock` holds JSON values only. `image` is the job's image as it is pinned there. `ahead` is the node's clock minus
    the caller's, zero where that is little.
    """

    python: str
    base_python: str
    package_path: str
    root: str
    findings: tuple[str, ...]
    changed: tuple[str, ...]
    seconds: tuple[tuple[str, float], ...]
    lock: dict[str, object]
    image: str | None = None
    ahead: timedelta = timedelta(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conduct:
    """Who carries the bootstrap out: a supervisor over SSH, or with `own` the node itself.

    `restart` reboots the node and returns on its next boot; the step `left` and all after it are not done.
    """

    own: bool = False
    restart: Callable[[Host, str, Clock], None] = reboot
    left: str = ""


SUPERVISOR = Conduct()


def bootstrap(  # noqa: PLR0913  each by its name
    host: Host,
    wanted: Wanted,
    package: Package,
    clock: Clock,
    *,
    sets: DataSets | None = None,
    story: Callable[[str], None] = lambda _: None,
    hide: Callable[[str], str] = str,
    conduct: Conduct = SUPERVISOR,
) -> Bootstrapped:
    """Return the fit node. `sets` sends the data sets that lie on this machine; `story` hears of what takes minutes.

    `hide` takes the secrets out of what a setup wrote, before anything is cut: a part of one is found no longer.

    A node that makes itself fit is waited for. Raises NodeError (with the last lines of a failed command),
    SetupFailed, HostUnreachable.
    """
    work = _Work(host, wanted, package, clock, sets=sets, story=story, hide=hide, conduct=conduct)
    facts = work.facts()
    for step in STEPS:
        if step.name == conduct.left:
            break
        facts = work.make(step, facts)
        if step is MACHINE:  # GPUs that do not answer may have lacked their driver only
            check(facts, wanted)
            work.log_in_anew()
        if step is LAYER:  # what the job file got wrong is no fault of the node, which the gate would find
            check_torch(facts, wanted)
            check_torch_build(facts, wanted)
            check_boto3(facts, wanted)
    return Bootstrapped(
        python=job_python(facts),
        base_python=facts.python,
        package_path=package_path(facts.root, wanted.package),
        root=facts.root,
        findings=(*findings(facts, wanted, work.skew), *work.notes),
        changed=tuple(work.changed),
        seconds=tuple(work.seconds),
        lock=lock_record(facts, wanted),
        image=facts.image.pinned if facts.image else None,
        ahead=work.skew,
    )


class _Work:
    """One node's bootstrap under way."""

    def __init__(  # noqa: PLR0913  each by its name
        self,
        host: Host,
        wanted: Wanted,
        package: Package,
        clock: Clock,
        *,
        sets: DataSets | None,
        story: Callable[[str], None],
        hide: Callable[[str], str],
        conduct: Conduct,
    ) -> None:
        self.changed: list[str] = []
        self.notes: list[str] = []
        self.seconds: list[tuple[str, float]] = []
        self._clock_reading: ClockReading | None = None
        self._host = host
        self._wanted = wanted
        self._package = package
        self._clock = clock
        self._sets = sets
        self._story = story
        self._hide = hide
        self._conduct = conduct
        self._boot_id = ""
        self._answer = Completed(exit_code=0, stdout=b"", stderr=b"")

    @property
    def skew(self) -> timedelta:
        """Return by how much the node's clock is wrong, as the surest question for it showed."""
        return self._clock_reading.wrong_by if self._clock_reading is not None else timedelta(0)

    def facts(self) -> Facts:
        """Return the node's facts; the package is shipped on the way if it is not there."""
        started = self._clock.now()
        found = self._probe()
        self._took("facts", started)
        if isinstance(found, Facts) and found.package == self._wanted.package:
            return self._rested(found)
        require_python(found.python, found.version)
        started = self._clock.now()
        receive = ship(found.python or "", self._package.sha256, self._host.node.root)
        self._run("package", Command(argv=receive, stdin=self._package.data))
        self.changed.append("package")
        found = self._again()  # where it does not run, its complaint is on stderr
        self._took("package", started)
        return self._rested(found)

    def _rested(self, found: Facts) -> Facts:
        """Return the facts of a node that is not at its own bootstrap (any more): what that makes, need not be made."""
        if self._conduct.own or not found.boots_itself:
            return found
        self._story(f"{self._host.node.id} makes itself ready; waiting for it")
        started = self._clock.now()
        command = awaiting(found.python, found.root, self._wanted.package)
        try:
            self._host.run(command, timeout_s=_AWAIT_S)
        except HostUnreachable:  # it may have booted anew: for its driver
            come_back(self._host, (None,), self._clock)
        after = self._again()
        self._took("own", started)
        # One that has just booted may go on with its own; whatever both do at once, locks on the node keep apart.
        return after

    def make(self, step: Step, facts: Facts) -> Facts:
        """Return the facts after the step, which is left out if nothing needs it."""
        if step.needed(facts, self._wanted) is None:
            return facts
        started = self._clock.now()
        for command in step.commands(facts, self._wanted):
            self._run(step.name, command)
        if step is DATA:
            self._send_data(facts)
        after = facts if step.proves_itself else self._again()
        self._took(step.name, started)
        reason = None if step.proves_itself else step.needed(after, self._wanted)
        if reason is not None:
            raise NodeError(f"{self._host.node.id}: {step.name}: {reason}, even after it was done", hint=None)
        self.changed.append(step.name)
        return after

    def log_in_anew(self) -> None:
        """Groups and limits that system software brought (Docker, EFA) count from the next login on."""
        if MACHINE.name in self.changed:
            self._host.renew()

    def _send_data(self, facts: Facts) -> None:
        """Send the sets that lie on this machine: the node says where to, and what of them it has."""
        for one in lacking(facts, self._wanted):
            if self._sets is not None and not one.in_s3:
                place = self._run("data", data_command("place", one, facts, self._wanted))
                try:
                    answer = from_json(DataPlace, last_line(place.stdout))
                except Malformed as error:
                    raise self._failed("data", place) from error
                self._sets.send(self._host, one, answer.folder, answer.missing)
                self._run("data", data_command("finish", one, facts, self._wanted))

    def _again(self) -> Facts:
        """Return the facts of a node that has the package."""
        found = self._probe()
        if isinstance(found, Bare):
            raise self._failed("facts", self._answer)
        return found

    def _probe(self) -> Facts | Bare:
        before = self._clock.now()
        self._answer = self._host.run(
            self._with_devices(probe(self._wanted.package, self._host.node.root)),
            stdin=question(self._wanted, visit=not self._conduct.own),
            timeout_s=PROBE_LIMIT_S,
        )
        after = self._clock.now()
        try:
            found = parse_facts(self._answer.stdout)
        except Malformed as error:
            raise self._failed("facts", self._answer) from error
        if isinstance(found, Facts):
            self._boot_id = found.boot_id
            self._clock_reading = surest(self._clock_reading, clock_reading(before, found.time, after))
        return found

    def _run(self, name: str, command: Command) -> Completed:
        completed = self._command(command)
        for _ in range(_MOST_REBOOTS):
            if not command.reboots or completed.exit_code != REBOOT_WANTED:
                break
            self._reboot(name, completed)
            completed = self._command(command)
        if (failed := self._failed_setup(completed)) is not None and not self._conduct.own:
            completed = self._once_more(failed, command)
        self._judge(name, completed)
        lines = completed.stdout.decode("utf-8", errors="replace").splitlines()
        self.notes += [line.removeprefix(_NOTE) for line in lines if line.startswith(_NOTE)]
        return completed

    def _once_more(self, failed: FailedSetup, command: Command) -> Completed:
        """Run the job's setup again on the same node. SetupFailed where the same command fails again."""
        node_id = self._host.node.id
        self._story(f"{node_id}: setup: {failed.in_short()}; once more on the same machine")
        self._clock.sleep(_SETUP_AGAIN_S)
        completed = self._command(command)
        again = self._failed_setup(completed)
        if again is None or (again.command, again.exit_code) != (failed.command, failed.exit_code):
            return completed
        raise SetupFailed(
            f"setup: {again.in_short()}",
            shown=f"setup failed twice on {node_id}: {again.shown()}",
            log=again.log,
            hint=layer_hint(self._wanted),
        )

    def _command(self, command: Command) -> Completed:
        return self._host.run(self._with_devices(command.argv), stdin=command.stdin, timeout_s=command.timeout_s)

    def _with_devices(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Whatever runs on the node sees its GPUs only, not those that another job may have there."""
        devices = self._host.node.devices
        return ("env", f"CUDA_VISIBLE_DEVICES={','.join(devices)}", *argv) if devices else argv

    def _judge(self, name: str, completed: Completed) -> None:
        """Raise NodeError for a command that failed; tell what took its time in one that did not."""
        answer = parse_answer(completed.stdout)
        if completed.exit_code == REFUSED and answer is not None:
            raise NodeError(f"{self._host.node.id}: {in_one_line(answer.said)}", hint=in_one_line(answer.hint) or None)
        if name == GATE and completed.exit_code == GATE_REFUSED:
            raise refusal(self._host.node.id, completed.stdout)
        if completed.exit_code != 0:
            raise self._failed(name, completed)
        for step, seconds in answer.steps if answer is not None else ():
            if seconds >= _TOLD_FROM_S:
                self._story(f"{self._host.node.id}: {name}: {step} took {seconds:.0f} s")

    def _reboot(self, name: str, completed: Completed) -> None:
        answer = parse_answer(completed.stdout)
        why = in_one_line(answer.said) if answer else "its software asks for it"
        self._story(f"{self._host.node.id} reboots ({name}: {why}); its paid time goes on")
        started = self._clock.now()
        self._conduct.restart(self._host, self._boot_id, self._clock)
        self._probe()
        self._took("reboot", started)

    def _failed(self, name: str, completed: Completed) -> RemoteCommandFailed:
        if (setup := self._failed_setup(completed)) is not None:
            return RemoteCommandFailed(f"{self._host.node.id}: setup: {setup.shown()}", hint=self._hint(name))
        output = (completed.stdout + completed.stderr).decode("utf-8", errors="replace").strip()
        lines = "\n".join(output.splitlines()[-_SHOWN_LINES:])
        return RemoteCommandFailed(
            f"{self._host.node.id}: {name} ended with exit code {completed.exit_code}:\n{lines}",
            hint=self._hint(name),
        )

    def _hint(self, name: str) -> str:
        if name == "data":
            return "`gpucloud train` goes on when that is put right; nothing that is whole is fetched again"
        if name == "image":
            return IMAGE_HINT
        return layer_hint(self._wanted) if name == "setup" else "run the command again"

    def _failed_setup(self, completed: Completed) -> FailedSetup | None:
        failed = parse_failed_setup(completed.stdout) if completed.exit_code == SETUP_FAILED else None
        return replace(failed, command=self._hide(failed.command), log=self._hide(failed.log)) if failed else None

    def _took(self, name: str, started: datetime) -> None:
        self.seconds.append((name, round((self._clock.now() - started).total_seconds(), 3)))
