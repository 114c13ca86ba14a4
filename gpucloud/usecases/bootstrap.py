"""Makes a node fit for a job: facts, the steps that are needed, facts again; may be repeated and killed anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.domain.bootstrap.checks import check, check_boto3, check_torch, findings, job_python, require_python
from gpucloud.domain.bootstrap.facts import Bare, Facts, parse_facts
from gpucloud.domain.bootstrap.gate_step import GATE
from gpucloud.domain.bootstrap.probing import package_path, probe, question, ship
from gpucloud.domain.bootstrap.record import lock_record
from gpucloud.domain.bootstrap.step import Command, Step
from gpucloud.domain.bootstrap.steps import STEPS
from gpucloud.domain.bootstrap.wanted import Wanted
from gpucloud.domain.codec import Malformed
from gpucloud.domain.errors import NodeError, RemoteCommandFailed
from gpucloud.domain.gate.findings import REFUSED
from gpucloud.domain.job import Job
from gpucloud.domain.launch import Script, parse_run
from gpucloud.domain.layer import BOTO3, setup_digest, setup_files
from gpucloud.ports import Clock, Completed, Host
from gpucloud.usecases.gate import gate_wanted, refusal

_SHOWN_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The zip that nodes run; `sha256` names it there."""

    data: bytes
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrapped:
    """A node that is fit: where things lie on it, what was changed and how long each step took (seconds).

    `python` is the job's, `base_python` the one that runs the package. `changed` is empty when everything was there.
    `lock` holds JSON values only.
    """

    python: str
    base_python: str
    package_path: str
    root: str
    findings: tuple[str, ...]
    changed: tuple[str, ...]
    seconds: tuple[tuple[str, float], ...]
    lock: dict[str, object]


def wanted_for(
    job: Job, *, package: Package, code: str, secrets: Mapping[str, str], store_url: str, power_off: tuple[str, ...]
) -> Wanted:
    """Return what the job needs of a node where its code lies at `code`; reads the files that `setup` names.

    What the job pays for, and which GPUs a node has of its machine, is added by `gate.of_node`.
    """
    boto3 = store_url.startswith("s3://")
    files = tuple(
        (name, (job.code / name).read_bytes()) for name in setup_files(job.setup or "") if (job.code / name).is_file()
    )
    return Wanted(
        package=package.sha256,
        code=code,
        setup=job.setup,
        setup_digest=setup_digest(job.setup or "", files, code, requirements=(BOTO3,) if boto3 else ()),
        env=(*job.env, *secrets.items()),
        torchrun=isinstance(parse_run(job.run), Script),
        gpus=job.resources.gpus,
        asks_for_gpus=bool(job.resources.gpu) or job.resources.vram_gib is not None,
        gate=gate_wanted(job, None),
        power_off=power_off,
        boto3=boto3,
    )


def bootstrap(host: Host, wanted: Wanted, package: Package, clock: Clock) -> Bootstrapped:
    """Return the fit node. Raises NodeError (with the last lines of a failed command), HostUnreachable."""
    work = _Work(host, wanted, package, clock)
    facts = work.facts()
    check(facts, wanted)
    for step in STEPS:
        facts = work.make(step, facts)
    check_torch(facts, wanted)
    check_boto3(facts, wanted)
    return Bootstrapped(
        python=job_python(facts),
        base_python=facts.python,
        package_path=package_path(facts.root, wanted.package),
        root=facts.root,
        findings=findings(facts, wanted, work.skew),
        changed=tuple(work.changed),
        seconds=tuple(work.seconds),
        lock=lock_record(facts, wanted),
    )


class _Work:
    """One node's bootstrap under way."""

    def __init__(self, host: Host, wanted: Wanted, package: Package, clock: Clock) -> None:
        self.changed: list[str] = []
        self.seconds: list[tuple[str, float]] = []
        self.skew = timedelta(0)
        self._host = host
        self._wanted = wanted
        self._package = package
        self._clock = clock
        self._answer = Completed(exit_code=0, stdout=b"", stderr=b"")

    def facts(self) -> Facts:
        """Return the node's facts; the package is shipped on the way if it is not there."""
        started = self._clock.now()
        found = self._probe()
        self._took("facts", started)
        if isinstance(found, Facts) and found.package == self._wanted.package:
            return found
        require_python(found.python, found.version)
        started = self._clock.now()
        receive = ship(found.python or "", self._package.sha256)
        self._run("package", Command(argv=receive, stdin=self._package.data))
        self.changed.append("package")
        found = self._probe()
        self._took("package", started)
        if isinstance(found, Bare):  # it is there and does not run: its complaint is on stderr
            raise self._failed("facts", self._answer)
        return found

    def make(self, step: Step, facts: Facts) -> Facts:
        """Return the facts after the step, which is left out if nothing needs it."""
        if step.needed(facts, self._wanted) is None:
            return facts
        started = self._clock.now()
        for command in step.commands(facts, self._wanted):
            self._run(step.name, command)
        after = facts if step.proves_itself else self.facts()
        self._took(step.name, started)
        reason = None if step.proves_itself else step.needed(after, self._wanted)
        if reason is not None:
            raise NodeError(f"{self._host.node.id}: {step.name}: {reason}, even after it was done", hint=None)
        self.changed.append(step.name)
        return after

    def _probe(self) -> Facts | Bare:
        before = self._clock.now()
        self._answer = self._host.run(probe(self._wanted.package), stdin=question(self._wanted))
        after = self._clock.now()
        try:
            found = parse_facts(self._answer.stdout)
        except Malformed as error:
            raise self._failed("facts", self._answer) from error
        if isinstance(found, Facts):
            self.skew = found.time - (before + (after - before) / 2)
        return found

    def _run(self, name: str, command: Command) -> None:
        completed = self._host.run(command.argv, stdin=command.stdin, timeout_s=command.timeout_s)
        if name == GATE and completed.exit_code == REFUSED:
            raise refusal(self._host.node.id, completed.stdout)
        if completed.exit_code != 0:
            raise self._failed(name, completed)

    def _failed(self, name: str, completed: Completed) -> RemoteCommandFailed:
        output = (completed.stdout + completed.stderr).decode("utf-8", errors="replace").strip()
        lines = "\n".join(output.splitlines()[-_SHOWN_LINES:])
        return RemoteCommandFailed(
            f"{self._host.node.id}: {name} ended with exit code {completed.exit_code}:\n{lines}",
            hint=self._hint(name),
        )

    def _hint(self, name: str) -> str:
        if name != "setup":
            return "run the command again"
        if self._wanted.setup is None:
            return f"let the nodes reach PyPI, or take an image whose Python has {BOTO3}: the store in S3 needs it"
        return "mend `setup:` in the job file"

    def _took(self, name: str, started: datetime) -> None:
        self.seconds.append((name, (self._clock.now() - started).total_seconds()))
