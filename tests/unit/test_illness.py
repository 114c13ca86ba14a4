"""What condemns the GPUs of a node while an attempt runs, and what does not."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from gpucloud.domain.node.hardware import GpuSample, Signs, Xid, find_error, find_xid, illness

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
FELL_OFF = "NVRM: Xid (PCI:0000:05:00): 79, pid=4711, name=python3, GPU has fallen off the bus."


def gpu(index: int, ecc: int | None = 0) -> GpuSample:
    return GpuSample(
        at=NOW,
        index=index,
        uuid=f"GPU-0000000{index}",
        pci=f"00000000:0{4 + index}:00.0",
        use=90,
        memory_used_mib=70000,
        memory_mib=143771,
        temperature=60,
        power=500.0,
        ecc_uncorrected=ecc,
    )


PAIR = (gpu(0), gpu(1))
WELL = Signs(before=PAIR, now=PAIR)


@pytest.mark.parametrize(
    ("signs", "why"),
    [
        (WELL, None),
        (replace(WELL, xids=(Xid(number=20034, pci="", switch=True),)), "a fatal error of an NVSwitch (SXid 20034)"),
        (replace(WELL, before=PAIR[:1], xids=(Xid(number=20034, pci="", switch=True),)), None),
        (replace(WELL, xids=(Xid(number=79, pci="0000:05:00"),)), "GPU 1: the GPU has fallen off the bus (Xid 79)"),
        (replace(WELL, xids=(Xid(number=13, pci="0000:05:00"),)), None),  # the program's own fault
        (replace(WELL, xids=(Xid(number=63, pci="0000:05:00"),)), None),  # a repair that succeeded
        (replace(WELL, xids=(Xid(number=79, pci="0000:09:00"),)), None),  # a device of another node on this machine
        (replace(WELL, now=(gpu(0), gpu(1, 1))), "GPU 1: 1 uncorrected memory error during the attempt"),
        (replace(WELL, before=(gpu(0, 3), gpu(1)), now=(gpu(0, 3), gpu(1))), None),  # old errors are the gate's
        (replace(WELL, now=(gpu(0), gpu(1, None))), None),
        (replace(WELL, silent=timedelta(seconds=29)), None),
        (replace(WELL, silent=timedelta(seconds=30)), "nvidia-smi has told of no GPU for 30 s"),
        (
            replace(WELL, silent=timedelta(seconds=11), said="Unable to determine the device handle for GPU0: lost"),
            "nvidia-smi has told of no GPU for 11 s: Unable to determine the device handle for GPU0: lost",
        ),
        (replace(WELL, silent=timedelta(seconds=11), said="some warning"), None),
        (replace(WELL, now=(gpu(0),), missing=timedelta(seconds=4)), None),
        (replace(WELL, now=(gpu(0),), missing=timedelta(seconds=5)), "GPU 1 (GPU-00000001) is no longer listed"),
        (Signs(before=(), now=(), silent=timedelta(hours=1)), None),  # no GPU was ever seen: not ill, absent
    ],
)
def test_signs_of_illness(signs: Signs, why: str | None) -> None:
    assert illness(signs) == why


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (FELL_OFF, Xid(number=79, pci="0000:05:00")),
        (f"4,1234,987654,-;{FELL_OFF}", Xid(number=79, pci="0000:05:00")),  # as /dev/kmsg writes it
        ("NVRM: Xid (PCI:0000:AF:00): 31, Ch 00000008", Xid(number=31, pci="0000:AF:00")),
        ("NVRM: loading NVIDIA UNIX Open Kernel Module", None),
        ("", None),
    ],
)
def test_a_line_of_the_kernel_log_tells_of_an_error(line: str, found: Xid | None) -> None:
    assert find_xid(line) == found


def test_a_switchs_fatal_error_is_seen_beside_those_of_devices():
    switch = "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28 LTSSM Fault Up"
    assert find_error(switch) == Xid(number=20034, pci="", switch=True)
    assert find_error(switch.replace("Fatal", "Non-fatal")) is None
    assert find_error(FELL_OFF) == find_xid(FELL_OFF)
