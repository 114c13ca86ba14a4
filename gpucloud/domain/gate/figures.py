"""The figures of a check in a few words: for the lock record, the story and the doctor."""

from __future__ import annotations

from gpucloud.domain.gate.report import Report


def figures(report: Report) -> tuple[tuple[str, str], ...]:
    """Return what was measured, name and figure with its unit; of several devices the slowest counts."""
    found: list[tuple[str, str]] = []
    for name, key, unit in (
        ("compute", "tflops", "TFLOP/s"),
        ("memory", "memory_gbps", "GB/s"),
        ("to GPU", "to_device_gbps", "GB/s"),
        ("from GPU", "from_device_gbps", "GB/s"),
    ):
        values = [value for probe in report.probes if (value := getattr(probe, key)) is not None]
        if values:
            found.append((name, f"{min(values):.1f} {unit}"))
    tried = [probe.memory_gb for probe in report.probes if probe.memory_gb is not None]
    if tried:
        found.append(("memory tried", f"{min(tried):.0f} GB"))
    seen = report.collective
    if seen is not None and seen.busbw_gbps is not None:
        found.append((f"all-reduce, {seen.ranks} ranks", f"{seen.busbw_gbps:.1f} GB/s"))
    if report.write_mbps is not None:
        found.append(("disk", f"{report.write_mbps:.0f} MB/s"))
    if report.store is not None and report.store.seconds is not None:
        found.append(("store", f"{report.store.seconds * 1000:.0f} ms"))
    return (*found, ("took", f"{report.seconds:.1f} s"))
