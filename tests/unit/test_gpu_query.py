"""Rows of `nvidia-smi --query-gpu` become samples; the recording is genuine (tests/data/nvidia_smi)."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from pathlib import Path

import pytest

from gpucloud.agent.metrics.sampler import FIELDS, OLD_FIELDS, command, row
from gpucloud.system.smi import visible

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
RECORDINGS = Path(__file__).parent.parent / "data" / "nvidia_smi"
RECORDED = (RECORDINGS / "h200x4.query.csv").read_text().splitlines()
IDLE_FIELDS = [
    "index",
    "uuid",
    "name",
    "driver_version",
    "pstate",
    "utilization.gpu",
    "utilization.memory",
    "memory.used",
    "memory.total",
    "temperature.gpu",
    "temperature.memory",
    "power.draw",
    "power.limit",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_event_reasons.active",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.corrected.volatile.total",
    "pcie.link.gen.current",
    "pcie.link.width.current",
    "gpu_recovery_action",
]
BUSY_FIELDS = [
    "index",
    "utilization.gpu",
    "utilization.memory",
    "memory.used",
    "temperature.gpu",
    "power.draw",
    "clocks.sm",
    "clocks_event_reasons.active",
]
# A row in the order of FIELDS; its cells are as the recording has them, without units.
ROW = (
    "0, GPU-00000000-0000-0000-0000-000000000000, 00000000:04:00.0, 97, 70211, 143771, 61, 612.40, 700.00, 1755, "
    "0x0000000000000000, 0"
)


def sample(**cells: str):
    """The row with other cells, named with _ for every dot."""
    values = dict(zip((name.replace(".", "_") for name in FIELDS), ROW.split(", "), strict=True))
    found = row(", ".join({**values, **cells}.values()), FIELDS, NOW)
    assert found is not None
    return found


def test_a_genuine_recording_gives_every_device() -> None:
    fields = [re.sub(r" \[.*", "", name) for name in RECORDED[0].split(", ")]
    samples = [found for line in RECORDED if (found := row(line, fields, NOW))]
    assert [(s.index, s.memory_mib, s.use, s.temperature, s.power, s.ecc_uncorrected) for s in samples] == [
        (0, 143771, 0, 41, 126.12, 0),
        (1, 143771, 0, 37, 97.19, 0),
        (2, 143771, 0, 40, 131.59, 0),
        (3, 143771, 0, 42, 128.24, 0),
    ]
    assert samples[2].uuid == "GPU-00000002-0000-0000-0000-000000000002"


def test_a_genuine_recording_of_idle_devices_shows_no_slowdown() -> None:
    lines = (RECORDINGS / "h200x2.query-idle.csv").read_text().splitlines()
    samples = [found for line in lines if (found := row(line, IDLE_FIELDS, NOW))]
    assert [(s.use, s.memory_mib, s.power, s.power_limit, s.sm_clock, s.slowdowns) for s in samples] == [
        (0, 143771, 78.77, 700.0, 345, ()),
        (0, 143771, 78.19, 700.0, 345, ()),
    ]


def test_a_genuine_recording_of_a_busy_device_shows_its_power_cap() -> None:
    lines = (RECORDINGS / "h200x2.query-busy.csv").read_text().splitlines()
    # The recording leaves the UUID out, which a row of ours always has.
    samples = [found for line in lines if (found := row(f"{line}, GPU-0", [*BUSY_FIELDS, "uuid"], NOW))]
    assert len(samples) == len(lines) > 0
    busy = samples[6]
    assert (busy.use, busy.memory_used_mib, busy.temperature, busy.power, busy.slowdowns) == (
        98,
        975,
        56,
        687.42,
        ("sw_power_cap",),
    )


def test_every_field_lands_where_it_belongs() -> None:
    found = sample()
    assert (found.use, found.memory_used_mib, found.memory_mib, found.temperature) == (97, 70211, 143771, 61)
    assert (found.power, found.power_limit, found.sm_clock) == (612.4, 700.0, 1755)
    assert (found.pci, found.slowdowns, found.at) == ("00000000:04:00.0", (), NOW)


@pytest.mark.parametrize("word", ["[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[GPU is lost]", "ERR!", ""])
def test_what_a_device_does_not_say_is_none(word: str) -> None:
    found = sample(utilization_gpu=word, power_draw=word, ecc_errors_uncorrected_volatile_total=word)
    assert (found.use, found.power, found.ecc_uncorrected, found.temperature) == (None, None, None, 61)


@pytest.mark.parametrize(
    ("mask", "reasons"),
    [
        ("0x0000000000000001", ()),  # idle
        ("0x0000000000000002", ()),  # clocks set by the user
        ("0x0000000000000004", ("sw_power_cap",)),
        ("0x0000000000000048", ("hw_slowdown", "hw_thermal_slowdown")),
        ("0x00000000000000A0", ("sw_thermal_slowdown", "hw_power_brake_slowdown")),
        ("[N/A]", ()),
    ],
)
def test_the_mask_of_clock_reasons_names_slowdowns_only(mask: str, reasons: tuple[str, ...]) -> None:
    assert sample(clocks_event_reasons_active=mask).slowdowns == reasons


@pytest.mark.parametrize(
    "line",
    [
        "",
        "No devices were found",
        "Unable to determine the device handle for GPU0000:04:00.0: Unknown Error",
        ROW[:60],
        ROW + ", 1",
        "index, uuid, pci.bus_id, a, b, c, d, e, f, g, h, i",
    ],
)
def test_a_line_that_is_no_row_is_none(line: str) -> None:
    assert row(line, FIELDS, NOW) is None


def test_older_drivers_are_asked_for_throttle_reasons() -> None:
    line = ROW.replace("0x0000000000000000", "0x0000000000000040")
    found = row(line, OLD_FIELDS, NOW)
    assert found is not None
    assert found.slowdowns == ("hw_thermal_slowdown",)


def test_devices_that_a_job_cannot_see_are_left_out() -> None:
    both = (sample(), sample(index="1", uuid="GPU-00000001-0000-0000-0000-000000000001"))
    assert [gpu.index for gpu in visible(both, "1")] == [1]


def test_the_command_asks_for_plain_rows_every_second() -> None:
    assert command("/usr/bin/nvidia-smi", ("index", "uuid"), 1000) == [
        "/usr/bin/nvidia-smi",
        "--query-gpu=index,uuid",
        "--format=csv,noheader,nounits",
        "-lms",
        "1000",
    ]
