"""The Grafana dashboard asks for figures that the agent's endpoint tells, and for nothing else."""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpucloud.agent.metrics.endpoint import Figures, exposition
from gpucloud.domain.node.hardware import GpuSample, HostSample
from gpucloud.domain.node.status import AttemptStatus, Progress, RunState

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
DASHBOARD = json.loads((Path(__file__).parents[2] / "templates" / "dashboards" / "grafana-gpucloud.json").read_text())
EVERYTHING = Figures(
    gpus=(
        GpuSample(
            at=NOW, index=0, uuid='GPU-"odd\\', pci="00000000:04:00.0", use=97, memory_used_mib=70000,
            memory_mib=143771, temperature=61, power=612.4, power_limit=700.0, sm_clock=1755,
            slowdowns=("sw_power_cap",), ecc_uncorrected=0,
        ),
    ),
    host=HostSample(
        at=NOW, cpu=50.0, memory_used_mib=1000, memory_mib=2000, disk_free_mib=3000, received=2**53, sent=5
    ),
    attempt=AttemptStatus(
        attempt=1, state=RunState.RUNNING, outcome=None, exit_code=None, failed_rank=None,
        progress=Progress(
            step=7, first_step=1, total_steps=9, loss=0.25, phase="train", committed_step=5, step_seconds=0.5,
            age_s=0.0, waiting_share=0.1,
        ),
    ),
)  # fmt: skip
TOLD = {line.partition("{")[0].split()[0] for line in exposition(EVERYTHING).splitlines() if not line.startswith("#")}
ASKED = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("expr", ASKED)
def test_every_expression_asks_for_what_the_endpoint_tells(expr: str) -> None:
    names = set(re.findall(r"\b(?:DCGM_FI|gpucloud)_\w+", expr))
    assert names
    assert names <= TOLD


def test_every_figure_of_the_endpoint_is_shown_or_plainly_a_number_of_the_job() -> None:
    shown = set(re.findall(r"\b(?:DCGM_FI|gpucloud)_\w+", " ".join(ASKED)))
    assert TOLD - shown == {"gpucloud_attempt", "gpucloud_attempt_running", "gpucloud_committed_step"}


def test_panels_have_numbers_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(set(places)) == len(DASHBOARD["panels"]) == 16


def test_large_counts_are_told_in_full_and_odd_labels_are_escaped() -> None:
    text = exposition(EVERYTHING)
    assert "gpucloud_host_received_bytes_total 9007199254740992\n" in text
    assert 'UUID="GPU-\\"odd\\\\"' in text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["DCGM_FI_DEV_GPU_UTIL"].samples[0].labels["UUID"] == 'GPU-"odd\\'


def test_each_family_is_described_once_before_its_samples() -> None:
    """As `promtool check metrics` wants it: HELP and TYPE first, once, then every sample of the family together."""
    seen: list[str] = []
    for line in exposition(EVERYTHING).splitlines():
        name = re.match(r"(?:# (?:HELP|TYPE) )?(\w+)", line)[1]
        if line.startswith("# HELP"):
            assert name not in seen
            seen.append(name)
        assert name == seen[-1]
