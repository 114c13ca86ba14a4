"""What a display shows of one pass."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

from gpucloud.cli.progress import snapshot
from gpucloud.domain.action import Wait
from gpucloud.domain.gpus import GpuSample
from gpucloud.domain.ledger import Spend
from tests.unit.worlds import NOW, opened, part, seen, state, up

SPEND = Spend(budget_usd=Decimal(1), spent_usd=Decimal(0), promised_usd=Decimal(0))


def with_gpu(node):
    gpu = GpuSample(
        index=0, uuid="GPU-0", at=NOW, use=50, memory_used_mib=10, memory_mib=100, temperature=40, power=70.0
    )
    return replace(node, status=replace(node.status, gpus=(gpu,)))


def test_gpus_of_a_machine_that_waits_to_be_taken_are_not_the_attempts():
    nodes = [with_gpu(up("a", part(2))), with_gpu(up("b", part(1), notice=True)), with_gpu(up("c", part(2)))]
    attempts = (opened("a", "b"), opened("a", "c", number=2))
    now = snapshot(seen(*nodes, state=state(attempts=attempts)), Wait(why="x"), SPEND)
    assert now.gpus == "2 GPUs 50 %, 40 °C, 140 W"
    assert len(now.nodes) == 3
