"""A check of a node's GPUs counts until something changed: devices, driver, job, or much time."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from gpucloud.domain.codec import from_json
from gpucloud.domain.node.bootstrap.steps import GATE_STEP
from gpucloud.domain.node.gate.report import GateFact, GateOrder, GateWanted
from gpucloud.domain.node.machine.facts import MachineWanted
from gpucloud.system.smi import parse
from tests.unit.test_lock_record import FACTS, WANTED

GPUS = parse((Path(__file__).parent.parent / "data" / "nvidia_smi" / "h200x4.xml").read_text())
ASKED = replace(WANTED, gate=GateWanted(gpus=4))
BARE = replace(FACTS, gpus=GPUS, gate=None)


OTHERS = "its GPUs, its driver or what the job wants of them are not those of the last check"


def ordered(wanted):
    (command,) = GATE_STEP.commands(BARE, wanted)
    return from_json(GateOrder, command.stdin)


CHECKED = replace(BARE, gate=GateFact(digest=ordered(ASKED).digest, at=BARE.time))


def test_a_node_that_passed_is_not_checked_again():
    assert GATE_STEP.needed(CHECKED, ASKED) is None
    assert GATE_STEP.needed(replace(CHECKED, time=BARE.time + timedelta(days=6)), ASKED) is None


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (BARE, "its GPUs were not checked on this boot, or something was reported of them since"),
        (
            replace(CHECKED, gpus=GPUS[:3]),
            OTHERS,
        ),
        (
            replace(CHECKED, gpus=(*GPUS[:3], replace(GPUS[3], uuid="GPU-9"))),
            OTHERS,
        ),
        (replace(CHECKED, time=BARE.time + timedelta(days=200)), "its GPUs were checked 200 days ago"),
    ],
    ids=["never", "one is gone", "one was exchanged", "long ago"],
)
def test_it_is_checked_again_where(facts, why):
    assert GATE_STEP.needed(facts, ASKED) == why


def test_root_is_asked_only_where_gpucloud_may_install():
    machine = MachineWanted(install=True, branch="", least_driver="", gpus=4)
    assert ordered(replace(ASKED, machine=machine)).sudo
    assert not ordered(replace(ASKED, machine=replace(machine, install=False))).sudo
    assert not ordered(ASKED).sudo
