"""The gate's judgement: the genuine recording of four H200 (tests/data/nvidia_smi) with one planted change each."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from gpucloud.agent.gate.look import pairs
from gpucloud.cli.commands.machines import checked_text, is_fit
from gpucloud.domain.codec import from_json, to_json
from gpucloud.domain.node.gate.judge import judge
from gpucloud.domain.node.gate.report import (
    Checked,
    CollectiveProbe,
    DeviceProbe,
    GateOrder,
    GateWanted,
    Holder,
    Links,
    Report,
    Severity,
    StoreFacts,
    SwitchError,
    TorchFacts,
    UnderLoad,
    XidLine,
    fail,
    failures,
    figures,
    gate_digest,
    is_machines,
    store_endpoint,
    why,
)
from gpucloud.system.smi import parse

DATA = Path(__file__).parent.parent / "data" / "nvidia_smi"
XML = (DATA / "h200x4.xml").read_text()
TOPOLOGY = (DATA / "h200x4.topo.txt").read_text()
GPUS = parse(XML)
WANTED = GateWanted(gpus=4, models=("H200",))
GOOD_PROBE = DeviceProbe(
    index=0,
    right=True,
    repeatable=True,
    memory_right=True,
    memory_gb=120.0,
    tflops=600.0,
    to_device_gbps=55.0,
    from_device_gbps=55.0,
    memory_gbps=4100.0,
)
TORCH = TorchFacts(version="2.11.0+cu130", cuda="13.0", available=True, devices=4)
NCCL = CollectiveProbe(backend="nccl", ranks=4, right=True, megabytes=256, busbw_gbps=350.0)


def report(xml=XML, **changes):
    plain = {
        "at": datetime(2026, 11, 20, tzinfo=timezone.utc),
        "gpus": parse(xml),
        "listed": 4,
        "on_the_bus": tuple(gpu.pci.lower()[4:] for gpu in GPUS),
        "links": Links(pairs=pairs(TOPOLOGY), ports=tuple((i, 18, 0) for i in range(4))),
        "clock_kept": True,
        "free_bytes": 100 << 30,
        "write_mbps": 2000.0,
        "store": StoreFacts(endpoint="https://s3.us-west-2.amazonaws.com", seconds=0.02),
        "torch": TORCH,
        "probes": tuple(replace(GOOD_PROBE, index=i) for i in range(4)),
        "collective": NCCL,
        "under_load": tuple(UnderLoad(index=i, generation=5, width=16) for i in range(4)),
    }
    return Report(**{**plain, **changes})


def planted(old, new):
    """The recording with one word changed in its first device."""
    assert old in XML
    return report(XML.replace(old, new, 1))


def hidden(*left):
    return report(gpus=tuple(GPUS[i] for i in left))


def probe(**changes):
    return report(probes=(replace(GOOD_PROBE, **changes), *report().probes[1:]))


def xid(number, pci=GPUS[1].pci, age_s=None):
    return report(xids=(XidLine(number=number, pci=pci[:-2], text="NVRM: Xid", age_s=age_s),))


def test_the_genuine_machine_is_fit() -> None:
    assert judge(report(), WANTED) == ()
    assert judge(report(), replace(WANTED, every=True)) == ()


NOBODY_WANTS = GateWanted(gpus=0, full=False, torch=False, every=True)
"""What `doctor` asks of a machine whose nvidia-smi lists nothing."""


@pytest.mark.parametrize(
    ("found", "wanted", "head", "said", "fit"),
    [
        (
            report(gpus=None, listed=0),
            NOBODY_WANTS,
            "no NVIDIA driver here: jobs run on the CPU",
            "4 NVIDIA devices and no driver: nvidia-smi is not there, jobs run on the CPU",
            True,
        ),
        (
            report(gpus=None, listed=0),
            replace(NOBODY_WANTS, every=False),
            "no NVIDIA driver here: jobs run on the CPU",
            "4 NVIDIA devices and no driver: nvidia-smi is not there, jobs run on the CPU",
            True,
        ),
        (report(gpus=None, listed=0, on_the_bus=()), NOBODY_WANTS, "no NVIDIA GPU here: jobs run on the CPU", "", True),
        (
            report(gpus=(), listed=0, gpu_fault="exit code 9"),
            NOBODY_WANTS,
            "no NVIDIA GPU is known here: nvidia-smi fails",
            "nvidia-smi failed: exit code 9",
            False,
        ),
        (
            report(gpus=()),
            NOBODY_WANTS,
            "no NVIDIA GPU here is for jobs: CUDA_VISIBLE_DEVICES hides all 4",
            "",
            True,
        ),
        (
            report(gpus=GPUS[:3], listed=3),
            replace(NOBODY_WANTS, gpus=3),
            "GPU",
            "3 GPUs, 4 expected: 4 are on the PCI bus and the driver knows 3; one has failed, or is not of this driver",
            False,
        ),
        (report(gpus=GPUS[:3], listed=4), replace(NOBODY_WANTS, gpus=3), "GPU", "", True),
    ],
)
def test_of_a_machine_itself_all_that_is_on_its_bus_is_expected(found, wanted, head, said, fit):
    checked = Checked(report=found, findings=judge(found, wanted))
    assert [finding.text for finding in checked.findings] == ([said] if said else [])
    assert checked_text(checked).startswith(head)
    assert is_fit(checked) == fit


FAILS = {
    "a GPU is hidden by CUDA_VISIBLE_DEVICES": (
        hidden(0, 1, 2),
        "count",
        "3 GPUs, 4 expected: 4 are there, CUDA_VISIBLE_DEVICES hides the others",
    ),
    "a GPU has left the driver and is still on the bus": (
        report(gpus=GPUS[:3], listed=3),
        "count",
        "3 GPUs, 4 expected: 4 are on the PCI bus and the driver knows 3; one has failed, or is not of this driver",
    ),
    "there are too few": (report(gpus=GPUS[:2], listed=2, on_the_bus=()), "count", "2 GPUs, 4 expected"),
    "there is no driver": (
        report(gpus=None, listed=0),
        "no-driver",
        "4 NVIDIA devices and no driver: nvidia-smi is not there, 4 GPUs expected",
    ),
    "there is nothing at all": (report(gpus=None, listed=0, on_the_bus=()), "count", "0 GPUs, 4 expected"),
    "the driver does not answer": (
        report(gpus=(), gpu_fault="exit code 15: GPU is lost"),
        "driver-fault",
        "nvidia-smi failed: exit code 15: GPU is lost",
    ),
    "it is another model": (
        planted("<product_name>NVIDIA H200<", "<product_name>NVIDIA H100 80GB HBM3<"),
        "model",
        "GPU 0: it is a NVIDIA H100 80GB HBM3, H200 expected",
    ),
    "memory is missing": (
        planted("<total>143771 MiB<", "<total>71000 MiB<"),
        "memory",
        "GPU 0: 71000 MiB of memory, 143771 expected of a H200",
    ),
    "memory errors were not corrected": (
        planted("<dram_uncorrectable>0<", "<dram_uncorrectable>3<"),
        "ecc",
        "GPU 0: 3 uncorrected memory errors since the driver was loaded, 0 expected",
    ),
    "a row waits to be remapped": (
        planted("<remapped_row_pending>No<", "<remapped_row_pending>Yes<"),
        "repair-pending",
        "GPU 0: memory failed; a reset would mend it",
    ),
    "a row could not be remapped": (
        planted("<remapped_row_failure>No<", "<remapped_row_failure>Yes<"),
        "repair-failed",
        "GPU 0: memory failed and cannot be mended",
    ),
    "the driver asks for a reset": (
        planted("<gpu_recovery_action>None<", "<gpu_recovery_action>Reset<"),
        "recovery",
        "GPU 0: the driver asks for: Reset",
    ),
    "heat slows it down": (
        planted("hw_thermal_slowdown>Not Active<", "hw_thermal_slowdown>Active<"),
        "slowdown",
        "GPU 0: slowed down by the hardware now: hw_thermal_slowdown",
    ),
    "the fabric is not ready": (
        planted("<state>Completed<", "<state>In Progress<"),
        "fabric",
        "GPU 0: its NVSwitch fabric is 'In Progress', 'Completed' expected",
    ),
    "most lanes are gone": (
        planted("<current_link_width>16x<", "<current_link_width>4x<"),
        "pcie-width",
        "GPU 0: PCIe on 4 lanes, 16 expected",
    ),
    "NVLinks between two are down": (
        report(links=Links(pairs=((0, 1, "NV12"), (0, 2, "NV18")))),
        "nvlink",
        "GPU 0 and GPU 1 are joined by NV12, NV18 expected between two H200",
    ),
    "two are joined by PCIe only": (
        report(links=Links(pairs=((2, 3, "SYS"),))),
        "nvlink",
        "GPU 2 and GPU 3 are joined by SYS, NV18 expected between two H200",
    ),
    "some ports are inactive": (
        report(links=Links(ports=((1, 16, 2),))),
        "nvlink",
        "GPU 1: 2 of 18 NVLinks are down",
    ),
    "it fell off the bus": (
        xid(79),
        "xid",
        "GPU 1: Xid 79 in the kernel's log since boot: the GPU has fallen off the bus",
    ),
    "a double bit error": (
        xid(48),
        "xid",
        "GPU 1: Xid 48 in the kernel's log since boot: an uncorrectable memory error (double bit)",
    ),
    "its processor does not answer": (
        xid(119),
        "xid",
        "GPU 1: Xid 119 in the kernel's log since boot: the GPU's system processor did not answer",
    ),
    "one that nobody lists any more broke": (
        replace(xid(79, "0000:FF:00.0"), gpus=GPUS),
        "xid",
        "Xid 79 in the kernel's log since boot: the GPU has fallen off the bus",
    ),
    "torch is a wheel for CPUs": (
        report(torch=TorchFacts(version="2.13.0+cpu")),
        "cpu-torch",
        "torch 2.13.0+cpu is built for the CPU only: the job would train without its GPUs",
    ),
    "the wheel is too new for the driver": (
        replace(planted("580.159.04", "535.104.05"), torch=replace(TORCH, available=False, devices=0)),
        "wheel-too-new",
        "torch 2.11.0+cu130 is built for CUDA 13.0 and needs driver 580.65.06; this one is 535.104.05",
    ),
    "CUDA does not start": (
        report(
            torch=replace(
                TORCH, available=False, devices=0, error="RuntimeError: Error 802: system not yet initialized"
            )
        ),
        "no-cuda",
        "torch 2.11.0+cu130 cannot use CUDA: RuntimeError: Error 802: system not yet initialized",
    ),
    "torch sees fewer": (report(torch=replace(TORCH, devices=3)), "torch-count", "torch sees 3 devices, 4 expected"),
    "there is no torch": (
        report(torch=TorchFacts(error="ImportError: No module named 'torch'")),
        "no-torch",
        "the job's Python has no torch that starts: ImportError: No module named 'torch'",
    ),
    "it computes wrong": (probe(right=False), "wrong-result", "GPU 0: a product of matrices came out wrong"),
    "it computes differently each time": (
        probe(repeatable=False),
        "not-repeatable",
        "GPU 0: the same product came out different the second time",
    ),
    "its memory forgets": (
        probe(memory_right=False),
        "wrong-memory",
        "GPU 0: memory does not give back what was written",
    ),
    "it fails at work": (
        probe(error="AcceleratorError: CUDA error: unspecified launch failure"),
        "compute",
        "GPU 0: it fails at work: AcceleratorError: CUDA error: unspecified launch failure",
    ),
    "copies are slower than its neighbours'": (
        probe(to_device_gbps=6.2),
        "copy-slow",
        "GPU 0: copies to it reach 6.2 GB/s, its neighbours reach 55.0",
    ),
    "it multiplies far below its data sheet": (
        replace(
            probe(tflops=60.0),
            under_load=(
                UnderLoad(index=0, generation=5, width=16, sm_clock=210),
                *(UnderLoad(index=i, generation=5, width=16, sm_clock=1980) for i in range(1, 4)),
            ),
        ),
        "compute-slow",
        "GPU 0: it multiplies at 60 TFLOP/s, 297 expected (210 of 1980 MHz, power limit 700 W)",
    ),
    "it multiplies slower than its neighbours": (
        probe(tflops=400.0),
        "compute-slow",
        "GPU 0: it multiplies at 400 TFLOP/s, its neighbours reach 600 (power limit 700 W)",
    ),
    "the hardware slows it down under load": (
        report(under_load=(UnderLoad(index=2, generation=5, width=16, slowdowns=("hw_slowdown", "sw_power_cap")),)),
        "slowdown",
        "GPU 2: slowed down by the hardware under load: hw_slowdown",
    ),
    "a switch failed": (
        report(switch_errors=(SwitchError(number=20034, text="SXid", age_s=7300.0),)),
        "sxid",
        "a fatal error of an NVSwitch (SXid 20034) in the kernel's log 2 h ago",
    ),
    "somebody else computes on it": (
        replace(
            planted("<used>0 MiB<", "<used>80900 MiB<"),
            holders=(Holder(gpu=0, pid=4711, name="/usr/bin/python3 train.py", owner="alice", used_mib=80_800),),
        ),
        "in-use",
        "GPU 0: 80900 of 143771 MiB are in use by python3 (pid 4711, of alice)",
    ),
    "nobody who can be seen holds its memory": (
        planted("<used>0 MiB<", "<used>80900 MiB<"),
        "held",
        "GPU 0: 80900 of 143771 MiB are in use by a program that cannot be seen from here (in a container, or dead)",
    ),
    "its memory is slow": (
        probe(memory_gbps=900.0),
        "memory-slow",
        "GPU 0: its memory reaches 900 GB/s, 2400 expected",
    ),
    "the all-reduce is slow": (
        report(collective=replace(NCCL, busbw_gbps=38.0)),
        "collective-slow",
        "the all-reduce over 4 GPUs reaches 38.0 GB/s, 180 expected",
    ),
    "the all-reduce adds up wrong": (
        report(collective=replace(NCCL, right=False)),
        "wrong-sum",
        "the all-reduce over 4 GPUs gave a wrong sum",
    ),
    "the all-reduce hangs": (
        report(collective=CollectiveProbe(backend="nccl", ranks=4, error="it hangs: 4 ranks did not end")),
        "collective",
        "the all-reduce over 4 GPUs failed: it hangs: 4 ranks did not end",
    ),
    "heat under load": (
        report(under_load=(UnderLoad(index=2, generation=5, width=16, slowdowns=("hw_thermal_slowdown",)),)),
        "slowdown",
        "GPU 2: slowed down by the hardware under load: hw_thermal_slowdown",
    ),
    "the store is out of reach": (
        report(store=StoreFacts(endpoint="https://s3.us-west-2.amazonaws.com", error="timed out")),
        "store",
        "the store at https://s3.us-west-2.amazonaws.com cannot be reached: timed out",
    ),
}


@pytest.mark.parametrize("name", FAILS)
def test_one_planted_fault_keeps_the_machine_out(name: str) -> None:
    observed, code, text = FAILS[name]
    found = failures(judge(observed, WANTED))
    assert [(one.code, str(one)) for one in found] == [(code, text)]
    assert found[0].hint
    assert why(found) == text


@pytest.mark.parametrize(
    ("codes", "machines"),
    [
        (("store",), False),
        (("cpu-torch", "store"), False),
        (("count",), True),
        (("store", "xid"), True),
        (("in-use",), False),
        (("held",), True),
    ],
)
def test_what_the_next_machine_would_show_as_well_is_no_fault_of_this_one(
    codes: tuple[str, ...], machines: bool
) -> None:
    assert is_machines(tuple(fail(code, "text", "hint") for code in codes)) is machines


@pytest.mark.parametrize(
    ("said_by_job", "said_by_node", "endpoint"),
    [
        ({}, {}, "https://s3.us-east-1.amazonaws.com"),
        ({}, {"AWS_ENDPOINT_URL": "http://n"}, "http://n"),
        ({"AWS_ENDPOINT_URL": "http://j"}, {"AWS_ENDPOINT_URL": "http://n"}, "http://j"),
        ({"AWS_ENDPOINT_URL": "http://j"}, {"AWS_ENDPOINT_URL_S3": "http://s3"}, "http://s3"),
    ],
)
def test_the_store_is_sought_where_boto3_in_the_job_will_seek_it(
    said_by_job: dict[str, str], said_by_node: dict[str, str], endpoint: str
) -> None:
    order = GateOrder(
        wanted=WANTED, digest="", python="", store="https://s3.us-east-1.amazonaws.com", env=tuple(said_by_job.items())
    )
    assert store_endpoint(order, said_by_node) == endpoint
    assert store_endpoint(replace(order, store=""), said_by_node) == ""


WARNS = {
    "half of the lanes": (planted("<current_link_width>16x<", "<current_link_width>8x<"), "pcie-width"),
    "a slow link under load": (report(under_load=(UnderLoad(index=1, generation=3, width=16),)), "pcie-generation"),
    "the driver slows it down": (
        planted("sw_thermal_slowdown>Not Active<", "sw_thermal_slowdown>Active<"),
        "slowdown",
    ),
    "hot": (planted("<gpu_temp>42 C<", "<gpu_temp>88 C<"), "hot"),
    "error correction is off": (planted("<current_ecc>Enabled<", "<current_ecc>Disabled<"), "ecc-off"),
    "a row was remapped": (xid(63), "xid"),
    "a driver that tells of recovery asks for nothing, an hour after the error": (xid(79, age_s=3700.0), "xid"),
    "a switch failed days ago, and the machine went on": (
        report(switch_errors=(SwitchError(number=20034, text="SXid", age_s=200_000.0),)),
        "sxid",
    ),
    "the driver slows it down under load": (
        report(under_load=(UnderLoad(index=1, generation=5, width=16, slowdowns=("sw_thermal_slowdown",)),)),
        "slowdown",
    ),
    "somebody's notebook holds a little of it": (
        report(holders=(Holder(gpu=1, pid=7, name="python3", owner="bob", used_mib=300),)),
        "in-use",
    ),
    "little memory may be locked": (report(memlock=64 << 10), "memlock"),
    "copies are alike slow on all its GPUs": (
        report(probes=tuple(replace(GOOD_PROBE, index=i, to_device_gbps=10.0 + i / 10) for i in range(4))),
        "copies-slow",
    ),
    "a contained error": (xid(94), "xid"),
    "the kernel's log is closed": (report(kernel_log="Operation not permitted"), "kernel-log"),
    "nobody keeps the clock": (report(clock_kept=False), "clock"),
    "the disk is full": (report(free_bytes=1 << 30), "disk-full"),
    "the disk is slow": (report(write_mbps=12.0), "disk-slow"),
    "the GPUs are stand-ins": (report(stand_in=True, torch=None, probes=(), collective=None), "stand-in"),
}


@pytest.mark.parametrize("name", WARNS)
def test_what_is_worth_knowing_does_not_keep_it_out(name: str) -> None:
    observed, code = WARNS[name]
    assert [(one.code, one.severity) for one in judge(observed, WANTED)] == [(code, Severity.WARN)]


@pytest.mark.parametrize("number", [13, 31, 43, 45, 154])
def test_a_programs_own_xid_says_nothing_about_the_machine(number: int) -> None:
    assert judge(xid(number), WANTED) == ()


def test_a_broken_device_that_is_somebody_elses_says_nothing_about_ours() -> None:
    assert judge(replace(xid(79, GPUS[3].pci), gpus=GPUS[:2]), replace(WANTED, gpus=2)) == ()


@pytest.mark.parametrize("model", ["H200", "h200", "NVIDIA H200"])
def test_a_model_is_known_by_its_names(model: str) -> None:
    assert judge(report(), replace(WANTED, models=("A100", model))) == ()


def test_memory_is_what_was_asked_for_as_it_is_sold() -> None:
    assert judge(report(), replace(WANTED, vram_gib=141)) == ()
    found = judge(report(), replace(WANTED, vram_gib=180))
    assert [one.code for one in found] == ["memory"] * 4
    assert str(found[0]) == "GPU 0: 140.4 GiB of memory, 180 expected"


def test_a_model_that_is_not_in_the_table_has_no_floors() -> None:
    unknown = tuple(replace(gpu, name="NVIDIA Z9", memory_mib=1000) for gpu in GPUS)
    observed = report(gpus=unknown, collective=replace(NCCL, busbw_gbps=0.3), links=Links(pairs=((0, 1, "SYS"),)))
    assert judge(observed, GateWanted(gpus=4)) == ()
    assert [
        one.code for one in judge(replace(observed, probes=probe(to_device_gbps=0.2).probes), GateWanted(gpus=4))
    ] == ["copy-slow"]


def test_a_job_that_does_without_torch_is_not_asked_for_it() -> None:
    assert judge(report(torch=None, probes=(), collective=None), replace(WANTED, torch=False)) == ()


def test_a_report_travels_whole() -> None:
    checked = Checked(report=xid(79), findings=judge(xid(79), WANTED))
    assert from_json(Checked, to_json(checked)) == checked


def test_figures_are_those_of_the_slowest_device() -> None:
    assert figures(probe(tflops=500.0, to_device_gbps=40.0)) == (
        ("compute", "500.0 TFLOP/s"),
        ("memory", "4100.0 GB/s"),
        ("to GPU", "40.0 GB/s"),
        ("from GPU", "55.0 GB/s"),
        ("memory tried", "120 GB"),
        ("all-reduce, 4 ranks", "350.0 GB/s"),
        ("disk", "2000 MB/s"),
        ("store", "20 ms"),
        ("took", "0.0 s"),
    )


def test_another_driver_python_or_set_of_devices_is_checked_anew() -> None:
    newer = tuple(replace(gpu, driver="590.1") for gpu in GPUS)
    other = (*GPUS[:3], replace(GPUS[3], uuid="GPU-9"))
    plain = gate_digest(WANTED, "/p", GPUS)
    others = {gate_digest(WANTED, "/q", GPUS), gate_digest(WANTED, "/p", newer), gate_digest(WANTED, "/p", GPUS[:3])}
    others |= {gate_digest(WANTED, "/p", GPUS, ("1",)), gate_digest(replace(WANTED, full=False), "/p", GPUS)}
    assert len({plain, gate_digest(WANTED, "/p", other), *others}) == 7
    assert gate_digest(WANTED, "/p", GPUS[::-1]) == plain
