"""What tools and the kernel write becomes a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpucloud.agent.gate.look import pairs, ports
from gpucloud.agent.metrics.kernel_log import found, kernel_log, record_of, stamped
from gpucloud.domain.node.gate.models import spec_of
from gpucloud.domain.node.hardware import XidClass, find_xid, is_of_kernel, same_device, xid_class
from gpucloud.system.smi import on_the_bus

TOPOLOGY = (Path(__file__).parent.parent / "data" / "nvidia_smi" / "h200x4.topo.txt").read_text()


def test_the_genuine_topology_joins_every_two_devices():
    assert pairs(TOPOLOGY) == tuple((a, b, "NV18") for a in range(4) for b in range(a + 1, 4))


def test_network_cards_in_the_topology_are_left_out():
    text = (
        "\tGPU0\tNIC0\tGPU1\tCPU Affinity\nGPU0\t X \tPXB\tSYS\t0-3\nNIC0\tPXB\t X \tSYS\t\nGPU1\tSYS\tSYS\t X \t0-3\n"
    )
    assert pairs(text.replace("\tNIC0\tGPU1", "\tGPU1\tNIC0").replace("PXB\tSYS\t0-3", "SYS\tPXB\t0-3", 1)) == (
        (0, 1, "SYS"),
    )


def test_links_with_a_speed_are_up():
    # As the nvidia-smi manual shows it; no genuine recording of a broken link is at hand.
    first = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n"
    text = first + "GPU 1: NVIDIA H200 (UUID: GPU-2)\n\t Link 0: 26.562 GB/s\n"
    assert ports(text) == ((0, 1, 1), (1, 1, 0))


@pytest.mark.parametrize("text", ["", "No devices were found\n"])
def test_an_nvidia_smi_that_does_not_know_links_tells_nothing(text):
    assert (pairs(text), ports(text)) == ((), ())


LOG = """\
NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04
NVRM: Xid (PCI:0000:cb:00): 13, pid=1797828, name=python, Graphics SM Warp Exception on (GPC 7, TPC 7, SM 0)
[ 1234.5] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120, intr 10000000
"""


def test_xids_are_found_in_the_kernels_log():
    observed = found(map(stamped, LOG.splitlines()), now=2000.0)
    assert [(one.number, one.pci, one.age_s) for one in observed.xids] == [
        (13, "0000:cb:00", None),
        (79, "0000:3b:00", 765.5),
        (31, "0000:01:00", None),
    ]
    assert observed.newest == 1234.5


BROKE = "[10.0] NVRM: Xid (PCI:0000:3b:00): 119, pid=1, name=python, Timeout after 6s of waiting for RPC response"
RESET = (
    "[20.0] NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
)
WANTED = RESET.replace("from 0x1 (GPU Reset Required) to 0x0 (None)", "from 0x0 (None) to 0x1 (GPU Reset Required)")
LOADED = "[30.0] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.159.04"


@pytest.mark.parametrize(
    ("lines", "left", "newest"),
    [
        ((BROKE,), [119], 10.0),
        ((BROKE, WANTED), [119, 154], 10.0),
        ((BROKE, RESET), [], 20.0),
        ((BROKE, RESET.replace(":3b:", ":5e:")), [119], 20.0),
        ((BROKE, LOADED), [], 30.0),
        ((LOADED, BROKE.replace("10.0", "40.0")), [119], 40.0),
    ],
)
def test_what_came_before_a_reset_or_a_new_driver_is_over(lines, left, newest):
    observed = found(map(stamped, lines), now=100.0)
    assert ([one.number for one in observed.xids], observed.newest) == (left, newest)


def test_only_fatal_errors_of_a_switch_count():
    # As systems with NVSwitches wrote them (NVIDIA's Fabric Manager guide has the same form).
    fatal = "[5.0] nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): 20034, Fatal, Link 28 LTSSM Fault Up"
    mild = (
        "[6.0] nvidia-nvswitch4: SXid (PCI:0000:c6:00.0): 19084, Non-fatal, Link 29 AN1 Heartbeat Timeout Error (First)"
    )
    observed = found(map(stamped, (fatal, mild)), now=65.0)
    assert [(one.number, one.age_s) for one in observed.switch_errors] == [(20034, 60.0)]


def test_a_record_of_the_kernel_has_its_time_in_microseconds():
    assert record_of("6,1234,5678901,-;NVRM: loading\n SUBSYSTEM=pci") == (5.678901, "NVRM: loading")


@pytest.mark.parametrize(
    "record", ["6,1,²,-;NVRM: x", "6,1;NVRM: x", "6,1," + "9" * 5000 + ",-;NVRM: x", "NVRM: x", ";NVRM: x", "6,1,-1,-;"]
)
def test_a_record_without_a_time_has_none(record):
    assert record_of(record)[0] is None


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:3b:00): " + "7" * 5000,
        "NVRM: Xid (PCI:0000:3b:00): ٧٩, pid=1",
        "NVRM: Xid (PCI:" + "0" * 5000 + "): 79",
        "NVRM: Xid (PCI:0000:3b:00)",
        "NVRM: Xid (): 79",
        "NVRM:",
        "Xid (PCI:0000:3b:00): 79",
        "nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): " + "2" * 5000 + ", Fatal",
        "SXid (" * 200_000,
        "x" * 3000 + "NVRM: Xid (PCI:0000:3b:00): 79",
    ],
)
def test_a_line_that_the_driver_never_writes_is_no_xid(line):
    observed = found([(1.0, line)], now=2.0)
    assert (observed.xids, observed.switch_errors, observed.newest) == ((), (), None)


def test_a_time_that_is_still_to_come_is_now():
    (xid,) = found([stamped("[99999999999.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1")], now=2.0).xids
    assert xid.age_s == 0.0
    assert stamped("[" + "9" * 400 + ".0] NVRM") == (None, "[" + "9" * 400 + ".0] NVRM")


def test_of_what_a_device_says_thousands_of_times_the_last_is_kept():
    flood = [(float(n), "NVRM: Xid (PCI:0000:cb:00): 13, pid=1") for n in range(20_000)]
    observed = found([(0.5, BROKE[7:]), *flood], now=20_000.0)
    assert [(one.number, one.age_s) for one in observed.xids] == [(119, 19999.5), (13, 1.0)]
    others = [(1.0, f"NVRM: Xid (PCI:0000:cb:00): {n}, pid=1") for n in range(200, 900)]
    kept = [one.number for one in found(others, now=2.0).xids]
    assert kept == list(range(400, 900))  # the newest


def test_what_a_program_wrote_into_the_kernels_log_is_not_the_kernels():
    xid = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1"
    assert is_of_kernel(f"4,1234,987654,-;{xid}")
    assert is_of_kernel(xid)
    assert not is_of_kernel(f"12,1234,987654,-;{xid}")  # echo >/dev/kmsg: of LOG_USER, whatever it says
    assert not is_of_kernel(f"12,1,1,-,caller=T1;{xid}")


def test_a_log_that_cannot_be_read_is_said_and_not_taken_for_clean():
    def closed():
        raise PermissionError(1, "Operation not permitted")

    observed = kernel_log(closed)
    assert (observed.xids, observed.unread) == ((), "Operation not permitted")


def test_the_log_of_this_machine_is_read():
    observed = kernel_log()
    assert observed.unread is None, observed.unread
    assert observed.xids == ()  # a machine without NVIDIA's driver has no Xid


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("00000000:3B:00.0", "0000:3b:00", True),
        ("0000:3b:00.0", "3b:00", True),
        ("0000:3b:00", "0000:3c:00", False),
        ("0001:3b:00", "0000:3b:00", False),
    ],
)
def test_a_device_is_known_by_every_form_of_its_address(one, other, same):
    assert same_device(one, other) is same


def test_a_line_without_an_xid_is_none():
    assert find_xid("NVRM: GPU at PCI:0000:3b:00: GPU-1") is None


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ((48, 54, 62, 64, 74, 79, 95, 119, 120, 140), XidClass.BROKEN),
        ((63, 92, 94), XidClass.WEAK),
        ((8, 13, 31, 32, 43, 45, 68, 69), XidClass.APPLICATION),
    ],
)
def test_xids_are_sorted_as_nvidias_catalog_does(numbers, kind):
    assert {xid_class(number) for number in numbers} == {kind}


def test_nvidia_devices_are_found_by_vendor_and_class(tmp_path):
    for name, vendor, kind in (
        ("0000:3b:00.0", "0x10de", "0x030200"),
        ("0000:3b:00.1", "0x10de", "0x040300"),
        ("0000:05:00.0", "0x10de", "0x068000"),
        ("0000:00:02.0", "0x8086", "0x030000"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert on_the_bus(tmp_path) == ("0000:3b:00.0",)
    assert on_the_bus(tmp_path / "absent") == ()


@pytest.mark.parametrize(
    ("name", "model", "nvlink", "floor"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", 18, 180),
        ("NVIDIA H100 PCIe", "H100", 0, 8),
        ("NVIDIA H200", "H200", 18, 180),
        ("NVIDIA A100-SXM4-40GB", "A100", 12, 120),
        ("NVIDIA A100-PCIE-40GB", "A100", 0, 5),
        ("NVIDIA A10G", "A10G", 0, 1.5),
        ("Tesla T4", "T4", 0, 1),
        ("Tesla V100-SXM2-16GB", "V100", 1, 15),
        ("NVIDIA L40S", "L40S", 0, 3),
        ("NVIDIA B200", "B200", 18, 360),
        ("NVIDIA B300 SXM6 AC", "B300", 18, 360),
        ("NVIDIA T4G", "T4g", 0, 1),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000", 0, 3),
    ],
)
def test_models_are_known_as_nvidia_smi_names_them(name, model, nvlink, floor):
    spec = spec_of(name)
    assert spec is not None
    assert (spec.model, spec.nvlink, spec.busbw_floor_gbps) == (model, nvlink, floor)
