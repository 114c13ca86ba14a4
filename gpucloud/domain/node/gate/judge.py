"""The judgement: what was seen of a machine, against what the job wants and what its GPU model should do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gpucloud.domain.job.quantities import counted
from gpucloud.domain.node.gate.report import Finding, GateWanted, Report, Severity, TorchFacts, XidLine, fail, warn
from gpucloud.domain.node.gate.rules import device_findings, held_findings, work_findings
from gpucloud.domain.node.hardware import (
    Gpu,
    XidClass,
    is_older,
    least_driver,
    model_of,
    same_device,
    xid_class,
    xid_means,
)

_LEAST_FREE = 5 << 30
_LEAST_WRITE_MBPS = 50.0
_LEAST_MEMLOCK = 1 << 30
_FRESH_S = 3600.0
_OLD_S = 24 * 3600.0
REPLACE = "replace the machine"


def judge(report: Report, wanted: GateWanted) -> tuple[Finding, ...]:
    """Return everything that is not as it should be, failures first; the same report gives the same findings."""
    rules: tuple[Callable[[Report, GateWanted], Iterator[Finding]], ...] = (
        _presence,
        _stand_ins,
        _models,
        device_findings,
        held_findings,
        _xids,
        _switches,
        _torch,
        work_findings,
        _machine,
    )
    found = [_weighed(finding, report, wanted) for rule in rules for finding in rule(report, wanted)]
    return tuple(sorted(found, key=lambda finding: finding.severity.value))


def _weighed(finding: Finding, report: Report, wanted: GateWanted) -> Finding:
    """What is wrong with a device that the job does not get is told, and refuses nobody."""
    used = {gpu.index for gpu in report.used(wanted.gpus)}
    others = {gpu.index for gpu in report.gpus or ()} - used
    return replace(finding, severity=Severity.WARN) if finding.gpu in others and finding.code != "model" else finding


def _presence(report: Report, wanted: GateWanted) -> Iterator[Finding]:
    if report.gpu_fault is not None:
        yield fail("driver-fault", f"nvidia-smi failed: {report.gpu_fault}", "install the driver again, or " + REPLACE)
        return
    found, on_the_bus = len(report.gpus or ()), len(report.on_the_bus)
    if report.gpus is None and on_the_bus and not wanted.gpus:
        text = f"{counted(on_the_bus, 'NVIDIA device')} and no driver: nvidia-smi is not there, jobs run on the CPU"
        yield warn("no-driver", text, "install NVIDIA's driver for jobs that are to use them")
    unknown = max(0, on_the_bus - report.listed) if wanted.every and report.listed else 0
    expected = max(wanted.gpus, found + unknown)
    if found >= expected:
        return
    if report.gpus is None and on_the_bus:
        wants = f"{counted(wanted.gpus, 'GPU')} expected"
        text = f"{counted(on_the_bus, 'NVIDIA device')} and no driver: nvidia-smi is not there, {wants}"
        yield fail("no-driver", text, "machine: {driver: 580} has it installed")
        return
    if on_the_bus > report.listed:
        are = f"{on_the_bus} are on the PCI bus and the driver knows {report.listed}"
        why = f": {are}; one has failed, or is not of this driver"
    elif found < report.listed:
        why = f": {report.listed} are there, CUDA_VISIBLE_DEVICES hides the others"
    else:
        why = ""
    yield fail("count", f"{counted(found, 'GPU')}, {expected} expected{why}", f"{REPLACE}, or lower `resources.gpus`")


def _stand_ins(report: Report, wanted: GateWanted) -> Iterator[Finding]:  # noqa: ARG001
    if report.stand_in and report.gpus:
        text = "its GPUs are stand-ins, and nothing was computed on them"
        yield warn("stand-in", text, "it is an emulated machine: the job runs on the CPU")


def _models(report: Report, wanted: GateWanted) -> Iterator[Finding]:
    gpus, used = report.gpus or (), report.used(wanted.gpus)
    names = {model_of(gpu.name) for gpu in used}
    if len(names) > 1:
        yield warn("mixed", f"GPUs of several models: {', '.join(sorted(names))}", "the slowest sets the pace")
    right = [gpu for gpu in gpus if not wanted.models or any(_is(model, gpu.name) for model in wanted.models)]
    if len(right) >= wanted.gpus and any(gpu not in right for gpu in used):
        others = ", ".join(f"GPU {gpu.index} is a {gpu.name}" for gpu in used if gpu not in right)
        text = f"{others}, {' or '.join(wanted.models)} expected: the job would get it, and not those that are there"
        indices = ", ".join(str(gpu.index) for gpu in right)
        yield fail("choice", text, f"name the right ones: `ssh: hosts: [{{gpus: [{indices}]}}]`")
    elif len(right) < wanted.gpus:
        for gpu in (gpu for gpu in gpus if gpu not in right):
            text = f"it is a {gpu.name}, {' or '.join(wanted.models)} expected"
            yield fail("model", text, "take another machine, or mend `resources.gpu`", gpu.index)
    for gpu in used:
        memory_mib = _usable_mib(gpu, report)
        # 24 GiB are sold where 22.5 can be used: ECC and the driver take their part.
        if wanted.vram_gib is not None and memory_mib is not None and memory_mib < wanted.vram_gib * 1024 * 0.92:
            text = f"{memory_mib / 1024:.1f} GiB of memory, {wanted.vram_gib} expected"
            yield fail("memory", text, "take another machine, or lower `vram_gib`", gpu.index)


def _usable_mib(gpu: Gpu, report: Report) -> int | None:
    """Return its memory; of one that has none of its own what CUDA says, None while CUDA was not asked."""
    if gpu.memory_mib is not None:
        return gpu.memory_mib
    place = (report.gpus or ()).index(gpu)
    return next((probe.total_mib for probe in report.probes if probe.index == place), None)


def _is(model: str, name: str) -> bool:
    """Whether a device's name is of the model, as clouds write it: `RTX PRO 6000` is one of `… Blackwell Server`."""
    found, wanted = model_of(name).casefold(), model_of(model).casefold()
    return found == wanted or found.startswith(f"{wanted} ")


def _xids(report: Report, wanted: GateWanted) -> Iterator[Finding]:  # noqa: ARG001
    if report.kernel_log is not None:
        text = f"the kernel's log cannot be read ({report.kernel_log}): Xids are not known"
        yield warn("kernel-log", text, "let the login read it: sudo usermod -aG adm USER")
    ours = {gpu.index: gpu.pci for gpu in report.gpus or () if gpu.pci}
    seen: set[tuple[int, str]] = set()
    for xid in sorted(report.xids, key=lambda one: one.age_s or 0.0):  # of several alike, the last one counts
        kind, mine = xid_class(xid.number), [i for i, pci in ours.items() if same_device(pci, xid.pci)]
        # Of a device that the job does not use, nothing is said; of one that nobody lists any more, everything.
        if (
            kind is XidClass.APPLICATION
            or (xid.number, xid.pci) in seen
            or (not mine and not _is_lost(report, xid.pci))
        ):
            continue
        seen.add((xid.number, xid.pci))
        text = f"Xid {xid.number} in the kernel's log{_ago(xid.age_s)}: {xid_means(xid.number)}"
        gpu = next((one for one in report.gpus or () if one.index in mine), None)
        if kind is XidClass.BROKEN and _counts(xid, gpu):
            yield fail("xid", text, f"{_reset(gpu)}, boot anew, or {REPLACE}", gpu.index if gpu else None)
        else:
            yield warn("xid", text, "watch it; a reset of the GPU mends it", gpu.index if gpu else None)


def _counts(xid: XidLine, gpu: Gpu | None) -> bool:
    """Whether a device is still held to have what its Xid says.

    Once it works again the line is still in the log, and after a reset too. A driver that tells of recovery (R555 and
    later) and asks for nothing is believed after an hour, any other after a day in which the device went on.
    """
    if gpu is None or xid.age_s is None:
        return True
    return xid.age_s < (_FRESH_S if gpu.recovery_told else _OLD_S)


def _reset(gpu: Gpu | None) -> str:
    return f"sudo nvidia-smi --gpu-reset -i {gpu.index}" if gpu is not None else "sudo nvidia-smi --gpu-reset"


def _ago(age_s: float | None) -> str:
    if age_s is None:
        return " since boot"
    for seconds, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= seconds:
            return f" {age_s / seconds:.0f} {word} ago"
    return f" {age_s:.0f} s ago"


def _switches(report: Report, wanted: GateWanted) -> Iterator[Finding]:  # noqa: ARG001
    """A fatal error of a switch is every GPU's; one that the fabric was made anew since is over (a new driver load)."""
    for number in sorted({error.number for error in report.switch_errors}):
        ages = [e.age_s for e in report.switch_errors if e.number == number]
        youngest = min((age for age in ages if age is not None), default=None)
        text = f"a fatal error of an NVSwitch (SXid {number}) in the kernel's log{_ago(youngest)}"
        hint = f"reset all GPUs and restart nvidia-fabricmanager, boot anew, or {REPLACE}"
        yield (fail if youngest is None or youngest < _OLD_S else warn)("sxid", text, hint)


def _is_lost(report: Report, pci: str) -> bool:
    """Whether a device is on no list: what is on the bus, and not the job's, belongs to somebody else."""
    return report.listed <= len(report.gpus or ()) or not any(same_device(pci, other) for other in report.on_the_bus)


def _torch(report: Report, wanted: GateWanted) -> Iterator[Finding]:
    seen = report.torch
    if seen is None or not wanted.torch:
        return
    driver = report.gpus[0].driver if report.gpus else ""
    if seen.version is None:
        text = f"the job's Python has no torch that starts: {seen.error or 'not installed'}"
        yield fail("no-torch", text, "setup: uv pip install torch")
    elif seen.cuda is None:
        text = f"torch {seen.version} is built for the CPU only: the job would train without its GPUs"
        yield fail("cpu-torch", text, "setup: uv pip install --reinstall torch --torch-backend auto")
    elif driver and (least := least_driver(seen.cuda)) is not None and is_older(driver, least):
        text = f"torch {seen.version} is built for CUDA {seen.cuda} and needs driver {least}; this one is {driver}"
        older = "setup: uv pip install --reinstall torch --torch-backend auto"
        yield fail("wheel-too-new", text, f"{older}, or machine: {{driver: {least.partition('.')[0]}}}")
    elif not seen.available:
        yield fail(
            "no-cuda", f"torch {seen.version} cannot use CUDA: {seen.error or 'no reason given'}", _cuda_hint(seen)
        )
    elif seen.devices < wanted.gpus:
        text = f"torch sees {seen.devices} devices, {wanted.gpus} expected"
        yield fail("torch-count", text, "leave CUDA_VISIBLE_DEVICES out of `env:`")


def _cuda_hint(seen: TorchFacts) -> str:
    # 802: the driver waits for the NVSwitch fabric (NVIDIA Fabric Manager guide, "Partitioning and CUDA init").
    if "802" in (seen.error or "") or "not yet initialized" in (seen.error or ""):
        return "sudo systemctl start nvidia-fabricmanager, in exactly the driver's version"
    return "nvidia-smi on the machine says more; or " + REPLACE


def _machine(report: Report, wanted: GateWanted) -> Iterator[Finding]:  # noqa: ARG001
    if report.clock_kept is False:
        yield warn("clock", "no time service keeps the clock", "sudo timedatectl set-ntp true")
    if report.free_bytes is not None and report.free_bytes < _LEAST_FREE:
        yield warn("disk-full", f"{report.free_bytes / 2**30:.1f} GiB free, 5 expected", "free some space on the disk")
    if report.write_mbps is not None and report.write_mbps < _LEAST_WRITE_MBPS:
        text = f"the disk writes {report.write_mbps:.0f} MB/s, {_LEAST_WRITE_MBPS:.0f} expected"
        yield warn("disk-slow", text, "`data:` and checkpoints will be slow: another disk, or another machine")
    if report.memlock is not None and report.memlock < _LEAST_MEMLOCK:
        text = f"{report.memlock // 1024} KiB of memory may be locked, 1 GiB expected: EFA may not register buffers"
        yield warn("memlock", text, "raise memlock in /etc/security/limits.conf, and log in anew")
    if report.store is not None and report.store.error is not None:
        text = f"the store at {report.store.endpoint} cannot be reached: {report.store.error}"
        yield fail("store", text, "let the machine reach it (route, firewall, endpoint)")
