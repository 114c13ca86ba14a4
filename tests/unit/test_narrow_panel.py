"""The panel beneath the story, on a terminal of any width: lines are cut, and never take two."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest
from rich.console import Console

from gpucloud.cli.render.live import _panel, use_grid
from gpucloud.cli.render.onlookers import NodeLine, PanelState, line_of
from gpucloud.domain.money.budget import Spend
from tests.unit.worlds import NOW

NODE = NodeLine(node_id="i-0e2467d3f703d7dee", zone="us-east-2c", word="in the attempt, node rank 0", gpus="8 GPUs 97%")
RUNNING = PanelState(
    job="digits",
    phase="train",
    attempt=2,
    step=407,
    first_step=1,
    total_steps=768,
    loss=0.1806,
    time_left=timedelta(seconds=75),
    saved="step 254 is saved",
    spend=Spend(budget_usd=Decimal(1), spent_usd=Decimal("0.111"), promised_usd=Decimal("0.4")),
    paid_until=NOW,
    nodes=(NODE, NODE),
)


def lines(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    with console.capture() as shown:
        console.print(_panel(RUNNING, ("epoch 1:  52%|██████████          | 52/100",), width))
    return shown.get().splitlines()


@pytest.mark.parametrize("width", [24, 40, 60, 80, 120])
def test_no_line_takes_two(width: int) -> None:
    assert len(lines(width)) == 7
    assert {len(line) for line in lines(width)} == {width}


def test_what_matters_less_goes_first() -> None:
    assert "step 407 of 768" in lines(80)[1]
    assert "loss 0.1806" in lines(120)[1]
    assert "step 407 of 768  1 min 15 s to go" in lines(60)[1]
    assert "loss" not in lines(40)[1]


LOCAL = [
    ("node", "what", "use", "memory", "temperature", "power", "remarks"),
    ("i-0e2467d3f703d7dee", "machine", "100 %", "2.4 of 7 GiB", "", "", "17 GiB of disk free"),
    ("i-0bee3d163b7872abc", "machine", "63 %", "2.4 of 7 GiB", "", "", "17 GiB of disk free"),
]
GPUS = [
    *LOCAL,
    (
        "i-0e2467d3f703d7dee",
        "GPU 0",
        "97 %",
        "70.1 of 80 GiB",
        "61 °C",
        "688 of 700 W",
        "sw thermal slowdown, 3 errors",
    ),
]


@pytest.mark.parametrize("rows", [LOCAL, GPUS])
def test_watch_cuts_no_heading_and_no_figure_at_80_columns(rows: list[tuple[str, ...]]) -> None:
    console = Console(file=io.StringIO(), width=76, highlight=False, color_system=None)
    with console.capture() as shown:
        console.print(use_grid(rows, 76))
    text = shown.get()
    assert "…" not in text
    heads = ["node", "what", "use", "memory", *(["temp", "power"] if rows is GPUS else []), "remarks"]
    assert text.splitlines()[0].split() == heads
    for cell in ("i-0e2467d3", "100 %", "2.4 of 7 GiB", *(("70.1 of 80 GiB", "688 of 700 W") if rows is GPUS else ())):
        assert cell in text


@pytest.mark.parametrize(
    ("phase", "step", "said"),
    [
        ("done", 30, "done: step 30 of 60, where its script called run.done()"),
        ("done", 60, "done: step 60 of 60"),
        ("train", 30, "train: step 30 of 60"),
    ],
)
def test_a_script_that_is_done_before_its_last_step_is_said_to_have_said_so(phase: str, step: int, said: str) -> None:
    assert line_of(replace(RUNNING, phase=phase, step=step, total_steps=60)).startswith(
        f"{said}, step 254 is saved, loss 0.1806"
    )


def shown(**changes: object) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False, color_system=None)
    with console.capture() as told:
        console.print(_panel(replace(RUNNING, **changes), (), 160))  # type: ignore[arg-type]
    return told.get()


def test_the_panel_and_a_line_say_what_is_saved_or_that_nothing_is() -> None:
    none = {"saved": None, "unsaved": "nothing is saved yet: the first save is due at step 1000"}
    assert "step 254 is saved" in shown()
    assert "  nothing is saved yet  " in shown(**none)
    assert line_of(replace(RUNNING, **none)).startswith("train: step 407 of 768, nothing is saved yet, loss ")  # type: ignore[arg-type]
    untold = {"step": None, "phase": "running for 3 h, tells no steps", "loss": None, "saved": None}
    untold = {**untold, "unsaved": "nothing is saved: the script …", "time_left": None}
    assert line_of(replace(RUNNING, **untold)) == (  # type: ignore[arg-type]
        "running for 3 h, tells no steps, nothing is saved, spent 0.111 of 1.00 USD"
    )
