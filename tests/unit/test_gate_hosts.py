"""Floors of the gate come from what a host can do: its ports, its boards, its neighbours."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest

from gpucloud.agent.gate.look import host_links
from gpucloud.domain.node.gate.judge import judge
from gpucloud.domain.node.gate.report import (
    CollectiveProbe,
    DeviceProbe,
    GateWanted,
    Holder,
    HostLink,
    Links,
    Report,
    UnderLoad,
    XidLine,
    failures,
)
from gpucloud.domain.node.hardware import Gpu

A100 = "NVIDIA A100-SXM4-40GB"
H100 = "NVIDIA H100 80GB HBM3"


def gpu(index, name, memory_mib, **changes):
    plain = {"pci": f"00000000:{index + 16:02X}:00.0", "pcie_width": 16, "pcie_width_most": 16}
    return Gpu(
        index=index, uuid=f"GPU-{index}", name=name, memory_mib=memory_mib, driver="580.1", **{**plain, **changes}
    )


def good(index, copies, tflops):
    return DeviceProbe(
        index=index,
        right=True,
        repeatable=True,
        memory_right=True,
        tflops=tflops,
        to_device_gbps=copies,
        from_device_gbps=copies,
    )


def report(*gpus, copies=(), tflops=None, **changes):
    observed = Report(at=datetime(2026, 11, 24, tzinfo=timezone.utc), gpus=gpus, listed=len(gpus))
    probes = tuple(good(i, gbps, tflops) for i, gbps in enumerate(copies))
    return replace(observed, probes=probes, **changes)


def on(generation, width, count, slot=None):
    return tuple(HostLink(index=i, generation=generation, width=width, slot_width=slot or width) for i in range(count))


def board(kind, count):
    return Links(pairs=tuple((a, b, kind) for a in range(count) for b in range(a + 1, count)))


def codes(observed, gpus):
    return [one.code for one in judge(observed, GateWanted(gpus=gpus))]


def a100s(count):
    return [gpu(i, A100, 40960, pcie_generation_most=4) for i in range(count)]


def h100s(count):
    return [gpu(i, H100, 81559, pcie_generation_most=5) for i in range(count)]


@pytest.mark.parametrize(
    "observed",
    [
        report(*a100s(8), copies=[10.8, 11.9] * 4, host_links=on(3, 16, 8)),
        report(*a100s(8), copies=[10.8, 11.9] * 4),
        report(*h100s(8), copies=[21.9] * 8, host_links=on(4, 16, 8)),
        report(*h100s(8), copies=[18.0] * 8),
    ],
    ids=["A100 in a host of PCIe 3", "the same in a virtual machine", "H100 in a host of PCIe 4", "the same, virtual"],
)
def test_a_host_of_an_older_pcie_is_what_it_is(observed):
    assert codes(observed, 8) == []


def test_of_one_gpu_the_hosts_own_port_says_what_it_should_reach():
    observed = report(*h100s(1), copies=[9.0], host_links=on(5, 16, 1))
    (found,) = failures(judge(observed, GateWanted(gpus=1)))
    assert str(found) == "GPU 0: copies to it reach 9.0 GB/s, 22.1 expected of PCIe 5 on 16 lanes"
    assert codes(replace(observed, host_links=on(3, 16, 1)), 1) == []


def test_one_gpu_of_a_virtual_machine_fails_only_where_its_link_is_seen_trained_down():
    observed = report(*h100s(1), copies=[3.1])
    assert codes(observed, 1) == ["copies-slow"]
    down = replace(observed, under_load=(UnderLoad(index=0, generation=1, width=16),))
    assert [one.code for one in failures(judge(down, GateWanted(gpus=1)))] == ["copy-slow"]


def test_a_slot_of_four_lanes_is_no_fault_of_its_card():
    card = gpu(0, "NVIDIA GeForce RTX 3090", 24576, pcie_width=4, pcie_width_most=16)
    assert codes(report(card, copies=[3.2], tflops=60.0, host_links=on(3, 4, 1)), 1) == []
    wide = report(card, host_links=on(4, 16, 1))
    assert [str(one) for one in failures(judge(wide, GateWanted(gpus=1)))] == ["GPU 0: PCIe on 4 lanes, 16 expected"]


@pytest.mark.parametrize(("name", "memory", "kind"), [(A100, 40960, "NV4"), (H100, 81559, "NV6")])
def test_a_board_of_four_without_switches_shares_its_links_out(name, memory, kind):
    gpus = [gpu(i, name, memory) for i in range(4)]
    links = int(kind[2:]) * 3
    observed = report(*gpus, links=replace(board(kind, 4), ports=tuple((i, links, 0) for i in range(4))))
    assert codes(observed, 4) == []
    one_down = replace(observed.links, pairs=((0, 1, "NV2"), *observed.links.pairs[1:]))
    (found,) = judge(replace(observed, links=one_down), GateWanted(gpus=4))
    assert (found.code, f"joined by NV2, {kind} expected" in found.text, "fabricmanager" in found.hint) == (
        "nvlink",
        True,
        False,
    )


def test_two_gpus_of_such_a_board_have_links_that_lead_to_others():
    observed = report(*a100s(2), links=replace(board("NV4", 2), ports=((0, 4, 8), (1, 4, 8))))
    ring = CollectiveProbe(backend="nccl", ranks=2, right=True, busbw_gbps=70.0)
    assert codes(replace(observed, collective=ring), 2) == []
    assert codes(replace(observed, links=replace(observed.links, ports=((0, 3, 9), (1, 4, 8)))), 2) == ["nvlink"]


def test_without_nvlink_a_slow_all_reduce_is_told_and_refuses_nobody():
    cards = [gpu(i, "NVIDIA L40S", 46068) for i in range(4)]
    observed = report(*cards, collective=CollectiveProbe(backend="nccl", ranks=4, right=True, busbw_gbps=1.2))
    assert [(one.code, one.severity.value) for one in judge(observed, GateWanted(gpus=4))] == [
        ("collective-slow", "warn")
    ]


def test_a_gpu_for_the_display_does_not_refuse_the_host():
    card, display = gpu(0, "NVIDIA RTX A6000", 49140), gpu(1, "NVIDIA T400 4GB", 4096)
    wanted = GateWanted(gpus=1, models=("RTX A6000",), vram_gib=48)
    assert judge(report(card, display), wanted) == ()
    first = report(replace(display, index=0), replace(card, index=1))
    (found,) = judge(first, replace(wanted, vram_gib=None))
    assert (found.code, found.hint) == ("choice", "name the right ones: `ssh: hosts: [{gpus: [1]}]`")
    assert [one.code for one in failures(judge(report(display), wanted))] == ["model", "memory"]


def test_what_is_wrong_with_a_gpu_that_the_job_does_not_get_refuses_nobody():
    gpus = h100s(4)
    observed = report(*gpus[:3], replace(gpus[3], ecc_uncorrected=3))
    assert [(one.code, one.severity.value) for one in judge(observed, GateWanted(gpus=2))] == [("ecc", "warn")]
    assert [(one.code, one.severity.value) for one in judge(observed, GateWanted(gpus=4))] == [("ecc", "fail")]


def test_a_gpu_that_somebody_holds_is_named_beside_those_that_are_free():
    gpus = h100s(4)
    busy = tuple(replace(gpu, memory_used_mib=70_000 if gpu.index < 2 else 4) for gpu in gpus)
    held = tuple(Holder(gpu=i, pid=40 + i, name="python3", owner="bob") for i in (0, 1))
    (found,) = judge(report(*busy, holders=held), GateWanted(gpus=1))
    assert (str(found), found.hint) == (
        "GPU 0: 70000 of 81559 MiB are in use by python3 (pid 40, of bob)",
        "wait until it is free, or name free ones: `ssh: hosts: [{gpus: [2, 3]}]`",
    )
    assert judge(report(*busy[::-1], holders=held), GateWanted(gpus=2)) == ()
    (rest,) = judge(report(*busy, holders=(replace(held[0], own=True),)), GateWanted(gpus=1))
    assert rest.hint == "kill 40, if it is a rest of yours"


def test_memory_that_is_the_machines_is_judged_by_what_cuda_says():
    spark = gpu(0, "NVIDIA GB10", None)
    observed = report(spark)
    assert judge(observed, GateWanted(gpus=1, vram_gib=24)) == ()
    asked = replace(observed, probes=(replace(good(0, 30.0, 90.0), total_mib=122_000),))
    assert judge(asked, GateWanted(gpus=1, vram_gib=96)) == ()
    assert [one.code for one in judge(asked, GateWanted(gpus=1, vram_gib=140))] == ["memory"]


@pytest.mark.parametrize("changes", [{"mig": True}, {"virtualization": "VGPU"}], ids=["MIG", "vGPU"])
def test_a_share_of_a_device_is_not_held_to_the_whole_ones_figures(changes):
    share = replace(h100s(1)[0], memory_mib=19_968, name="NVIDIA H100-20C" if "mig" not in changes else H100, **changes)
    found = judge(report(share, copies=[12.0], tflops=60.0), GateWanted(gpus=1))
    assert failures(found) == ()


def test_an_old_error_of_a_driver_that_knows_no_recovery_counts_for_a_day():
    xid = XidLine(number=119, pci="0000:10:00", text="NVRM: Xid", age_s=80_000.0)
    observed = report(*a100s(1), xids=(xid,))
    assert [one.severity.value for one in judge(observed, GateWanted(gpus=1))] == ["fail"]
    (found,) = judge(replace(observed, xids=(replace(xid, age_s=9e6),)), GateWanted(gpus=1))
    assert (found.severity.value, found.text) == (
        "warn",
        "Xid 119 in the kernel's log 104 d ago: the GPU's system processor did not answer",
    )


def test_of_several_errors_alike_the_last_one_counts():
    xids = tuple(XidLine(number=119, pci="0000:10:00", text="NVRM: Xid", age_s=age) for age in (9e6, 60.0, 8e6))
    (found,) = judge(report(*a100s(1), xids=xids), GateWanted(gpus=1))
    assert (found.severity.value, "1 min ago" in found.text) == ("fail", True)


def tree(root, path, speed, width):
    """A device of the kernel's tree, with what it can do."""
    place = root / path
    place.mkdir(parents=True)
    (place / "vendor").write_text("0x10de\n")
    (place / "max_link_speed").write_text(f"{speed} GT/s PCIe\n")
    (place / "max_link_width").write_text(f"{width}\n")
    return place


def test_a_devices_way_is_as_wide_as_its_narrowest_port(tmp_path):
    root = tmp_path / "devices" / "pci0000:00"
    tree(root, "0000:00:01.0", "8.0", 16)
    for port in ("0000:01:00.0", "0000:01:00.0/0000:02:04.0"):
        tree(root, f"0000:00:01.0/{port}", "16.0", 16)
    place = tree(root, "0000:00:01.0/0000:01:00.0/0000:02:04.0/0000:10:00.0", "16.0", 16)
    bus = tmp_path / "bus"
    bus.mkdir()
    (bus / "0000:10:00.0").symlink_to(place)
    (gpu,) = a100s(1)
    assert host_links((gpu,), bus) == (HostLink(index=0, generation=3, width=16, slot_width=16),)
    assert host_links((replace(gpu, virtualization="Pass-Through"),), bus) == ()
    (place.parent / "max_link_width").write_text("255\n")
    assert host_links((gpu,), bus) == ()


def test_a_device_on_the_root_bus_of_a_virtual_machine_has_no_way_of_its_own(tmp_path):
    tree(tmp_path, "0000:10:00.0", "32.0", 16)
    assert host_links(tuple(h100s(1)), tmp_path) == ()
