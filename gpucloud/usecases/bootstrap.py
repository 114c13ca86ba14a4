"""Makes a node fit for a job: facts, the steps that are needed, facts again; may be repeated and killed anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpucloud.domain.bootstrap.checks import (
    check,
    check_boto3,
    check_torch,
    check_torch_build,
    findings,
    job_python,
    require_python,
)
from gpucloud.domain.bootstrap.data_step import DATA, data_command, lacking
from gpucloud.domain.bootstrap.facts import Bare, Facts, parse_facts
from gpucloud.domain.bootstrap.image_step import IMAGE_HINT
from gpucloud.domain.bootstrap.layer_step import layer_hint
from gpucloud.domain.bootstrap.probing import package_path, probe, question, ship
from gpucloud.domain.bootstrap.record import lock_record
from gpucloud.domain.bootstrap.step import Command, Step
from gpucloud.domain.bootstrap.steps import STEPS
from gpucloud.domain.bootstrap.wanted import Wanted
from gpucloud.domain.codec import Malformed
from gpucloud.domain.container import ImageWanted
from gpucloud.domain.data import DataWanted
from gpucloud.domain.errors import NodeError, RemoteCommandFailed
from gpucloud.domain.job import Job, Launcher
from gpucloud.domain.launch import launcher_of
from gpucloud.domain.layer import BOTO3, requirement_files, setup_digest, setup_files
from gpucloud.domain.torchwheels import TORCH, names_torch
from gpucloud.ports import Clock, Completed, DataSets, Host

_SHOWN_LINES = 20
_NOTE = "note: "  # so begins a line of a step's answer that the user should read


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The zip that nodes run; `sha256` names it there."""

    data: bytes
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrapped:
    """A node that is fit: where things lie on it, what was changed and how long each step took (seconds).

    `changed` is empty when everything was there. `lock` holds JSON values only. `image` is the job's
    image as it is pinned there.
    """

    python: str
    package_path: str
    root: str
    findings: tuple[str, ...]
    changed: tuple[str, ...]
    seconds: tuple[tuple[str, float], ...]
    lock: dict[str, object]
    image: str | None = None


def wanted_for(  # noqa: PLR0913  each by its name
    job: Job,
    *,
    package: Package,
    code: str,
    secrets: Mapping[str, str],
    store_url: str,
    power_off: tuple[str, ...],
    data: tuple[DataWanted, ...] = (),
) -> Wanted:
    """Return what the job needs of a node where its code lies at `code`; reads the files that `setup` names."""
    # An image brings its own Python; what stages data from S3 runs outside of it.
    boto3 = (store_url.startswith("s3://") and job.image is None) or any(one.in_s3 for one in data)
    torchrun = job.image is None and launcher_of(job) is Launcher.TORCHRUN
    torch = torchrun and not _brings_torch(job)
    requirements = (*((BOTO3,) if boto3 else ()), *((TORCH,) if torch else ()))
    conda = (job.code / job.conda).read_bytes() if job.conda else None
    return Wanted(
        package=package.sha256,
        code=code,
        setup=job.setup,
        setup_digest=setup_digest(
            job.setup or "", _files(job, setup_files(job.setup or "")), code, requirements=requirements, conda=conda
        ),
        env=(*job.env, *secrets.items()),
        torchrun=torchrun,
        image=_image(job, secrets),
        gpus=job.resources.gpus,
        asks_for_gpus=bool(job.resources.gpu) or job.resources.vram_gib is not None,
        power_off=power_off,
        boto3=boto3,
        data=data,
        torch=torch,
        conda=job.conda,
        pip_mirror=job.mirrors.pip,
        torch_mirror=job.mirrors.torch,
    )


def _image(job: Job, secrets: Mapping[str, str]) -> ImageWanted | None:
    if job.image is None:
        return None
    login = secrets.get(job.container.login) if job.container.login else None
    return ImageWanted(reference=job.image, runtime=job.container.runtime, login=login)


def _files(job: Job, names: tuple[str, ...]) -> tuple[tuple[str, bytes], ...]:
    return tuple((name, (job.code / name).read_bytes()) for name in names if (job.code / name).is_file())


def _brings_torch(job: Job) -> bool:
    """Whether the job's own files install torch: then its version is theirs."""
    setup = job.setup or ""
    named = (*requirement_files(setup), *((job.conda,) if job.conda else ()))
    texts = [setup, *(data.decode("utf-8", errors="replace") for _, data in _files(job, named))]
    return any(names_torch(text) for text in texts)


def bootstrap(host: Host, wanted: Wanted, package: Package, clock: Clock, sets: DataSets | None = None) -> Bootstrapped:
    """Return the fit node; `sets` sends the data sets that lie on this machine.

    Raises NodeError (with the last lines of a failed command), HostUnreachable.
    """
    work = _Work(host, wanted, package, clock, sets)
    facts = work.facts()
    check(facts, wanted)
    for step in STEPS:
        facts = work.make(step, facts)
    check_torch(facts, wanted)
    check_torch_build(facts, wanted)
    check_boto3(facts, wanted)
    return Bootstrapped(
        python=job_python(facts),
        package_path=package_path(facts.root, wanted.package),
        root=facts.root,
        findings=(*findings(facts, wanted, work.skew), *work.notes, *work.told),
        changed=tuple(work.changed),
        seconds=tuple(work.seconds),
        lock=lock_record(facts, wanted),
        image=facts.image.pinned if facts.image else None,
    )


class _Work:
    """One node's bootstrap under way."""

    def __init__(self, host: Host, wanted: Wanted, package: Package, clock: Clock, sets: DataSets | None) -> None:
        self.told: list[str] = []
        self.changed: list[str] = []
        self.notes: list[str] = []
        self.seconds: list[tuple[str, float]] = []
        self.skew = timedelta(0)
        self._host = host
        self._wanted = wanted
        self._package = package
        self._clock = clock
        self._sets = sets
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
        receive = ship(found.python or "", self._package.sha256, self._host.node.root)
        self._run("package", Command(argv=receive, stdin=self._package.data))
        self.changed.append("package")
        found = self._again()  # where it does not run, its complaint is on stderr
        self._took("package", started)
        return found

    def make(self, step: Step, facts: Facts) -> Facts:
        """Return the facts after the step, which is left out if nothing needs it."""
        if step.needed(facts, self._wanted) is None:
            return facts
        started = self._clock.now()
        done = [self._run(step.name, command) for command in step.commands(facts, self._wanted)]
        done += self._send_data(facts) if step is DATA else []
        self.told += [_last_line(one) for one in done if step.tells]
        after = facts if step.proves_itself else self._again()
        self._took(step.name, started)
        reason = None if step.proves_itself else step.needed(after, self._wanted)
        if reason is not None:
            raise NodeError(f"{self._host.node.id}: {step.name}: {reason}, even after it was done", hint=None)
        self.changed.append(step.name)
        return after

    def _send_data(self, facts: Facts) -> list[Completed]:
        """Send the sets that lie on this machine: the node says where to, and what of them it has."""
        done = []
        for one in lacking(facts, self._wanted):
            if self._sets is not None and not one.in_s3:
                place = self._run("data", data_command("place", one, facts, self._wanted))
                answer = json.loads(_last_line(place))
                self._sets.send(self._host, one, answer["folder"], tuple(answer["missing"]))
                done.append(self._run("data", data_command("finish", one, facts, self._wanted)))
        return done

    def _again(self) -> Facts:
        """Return the facts of a node that has the package."""
        found = self._probe()
        if isinstance(found, Bare):
            raise self._failed("facts", self._answer)
        return found

    def _probe(self) -> Facts | Bare:
        before = self._clock.now()
        self._answer = self._host.run(
            self._with_devices(probe(self._wanted.package, self._host.node.root)), stdin=question(self._wanted)
        )
        after = self._clock.now()
        try:
            found = parse_facts(self._answer.stdout)
        except Malformed as error:
            raise self._failed("facts", self._answer) from error
        if isinstance(found, Facts):
            self.skew = found.time - (before + (after - before) / 2)
        return found

    def _with_devices(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Whatever runs on the node sees its GPUs only, not those that another job may have there."""
        devices = self._host.node.devices
        return ("env", f"CUDA_VISIBLE_DEVICES={','.join(devices)}", *argv) if devices else argv

    def _run(self, name: str, command: Command) -> Completed:
        completed = self._host.run(self._with_devices(command.argv), stdin=command.stdin, timeout_s=command.timeout_s)
        if completed.exit_code != 0:
            raise self._failed(name, completed)
        lines = completed.stdout.decode("utf-8", errors="replace").splitlines()
        self.notes += [line.removeprefix(_NOTE) for line in lines if line.startswith(_NOTE)]
        return completed

    def _failed(self, name: str, completed: Completed) -> RemoteCommandFailed:
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

    def _took(self, name: str, started: datetime) -> None:
        self.seconds.append((name, round((self._clock.now() - started).total_seconds(), 3)))


def _last_line(completed: Completed) -> str:
    return completed.stdout.decode("utf-8", errors="replace").strip().rpartition("\n")[2]
