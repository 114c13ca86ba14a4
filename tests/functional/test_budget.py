"""The budget as a wall, through the real command line: shown, raised, lowered, run into, and gone on from."""

from __future__ import annotations

import json
import re
from decimal import Decimal

import pytest

from tests.commandline import command_line, until, weights

# Paid times ten times shorter: 3 min of horizon, 15 s of reserve, 6 s at the least for a machine.
FASTER = {"GPUCLOUD_LOCAL_MONEY_FACTOR": "10"}


@pytest.fixture
def line(tmp_path):
    with command_line(tmp_path, **FASTER) as found:
        yield found


def money(report):
    return {key: Decimal(value) for key, value in report["spend"].items() if value is not None}


@pytest.mark.slow  # test_estimate.py has what refusals name accepted
def test_the_least_budget_that_a_refusal_names_trains(tmp_path):
    # Half as much faster: on a slow machine that is busy, a start takes longer than six seconds.
    with command_line(tmp_path, GPUCLOUD_LOCAL_MONEY_FACTOR="5") as line:
        trains_for_the_least(line)


def trains_for_the_least(line):
    job = line.job(steps=4000, step_s=0.05, budget="0.001 USD")
    refused = line.run("train", job, "--json")
    least = re.fullmatch(r"budget: (\d\.\d\d) USD", refused.json["error"]["hint"])
    assert (refused.code, least is not None) == (2, True), refused.stderr

    trained = line.run("train", line.job(steps=4000, step_s=0.05, budget=f"{least[1]} USD"), "--json")

    assert (trained.code, trained.json["exit_reason"]) == (10, "budget"), trained.stderr
    assert trained.json["checkpoint"]["step"] > 0
    assert 0 < money(trained.json)["spent_usd"] <= Decimal(least[1])


@pytest.mark.slow
def test_a_job_whose_budget_is_lowered_ends_at_the_wall_and_goes_on_from_there(line):
    job = line.job(steps=400, step_s=0.1)
    train = line.start("train", job, "--json")
    until(lambda: line.step() >= 12, "step 12")

    refused = line.run("budget", "small", "0.001 USD", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (2, "budget_refused")
    assert "what saving and ending costs: at least 0.0" in refused.json["error"]["message"]
    assert re.fullmatch(
        r"gpucloud budget small 0\.0\d USD, or gpucloud down small ends it now", refused.json["error"]["hint"]
    )
    spent = Decimal(line.run("cost", "small", "--json").json["spend"]["spent_usd"])
    lower = (spent + Decimal("0.018")).quantize(Decimal("0.0001"))
    lowered = line.run("budget", "small", f"{lower} USD", "--json").json

    (change,) = lowered["changes"]
    assert (Decimal(change["old_usd"]), Decimal(change["new_usd"])) == (1, lower)
    assert re.fullmatch(r".+@.+", change["by"])
    assert train.wait(timeout=120) == 10, (line.folder / "err").read_text()
    state = line.state()
    assert (state["exit_reason"], state["torn_down"], state["attempts"][-1]["reason"]) == ("budget", True, "budget")
    assert state["checkpoint"]["step"] == state["attempts"][-1]["last_step"] < 400
    shown = line.run("status", "small", "--json").json["message"]
    said = re.search(r"train small --budget '(\S+) USD' goes on from there, and pays for the \d+", shown)
    assert said is not None, shown
    unspent = re.search(
        r"pays for no more machine time \((\S+) USD spent, (\S+) USD"
        r" (kept aside for the last save and the machines' end"
        r"|left, which is too little to start machines and train 6 s on them)",
        shown,
    )
    assert unspent is not None, shown
    assert json.loads((line.folder / "out").read_text())["message"] == shown
    assert shown in line.run("status", "small").stdout
    assert line.nodes() == []
    ended = line.run("cost", "small", "--json").json
    assert money(ended)["promised_usd"] == 0
    assert abs(Decimal(unspent[1]) - money(ended)["spent_usd"]) < Decimal("0.0001")
    assert sum(Decimal(charge["usd"]) for charge in ended["charges"]) == money(ended)["spent_usd"] <= lower

    line.job(steps=400, step_s=0)
    again = line.run("train", "small", "--budget", f"{said[1]} USD", "--json")
    assert again.code == 0, again.stderr
    assert again.json["attempts"][-1]["first_step"] == state["checkpoint"]["step"] + 1
    assert [Decimal(c["new_usd"]) for c in line.order()["budget_changes"]] == [lower, Decimal(said[1])]
    plain = line.run("train", line.job("other", steps=400, step_s=0), "--json")
    assert plain.code == 0, plain.stderr
    assert weights(line) == weights(line, "other")


def test_a_budget_is_shown_and_raised_when_nobody_supervises_the_job(line):
    job = line.job(steps=3)
    assert line.run("up", job).code == 0

    shown = line.run("budget", "small")
    assert shown.code == 0
    assert re.search(r"budget +1\.00 USD", shown.stdout), shown.stdout
    raised = line.run("budget", "small", "2", "USD", "--json").json
    assert money(raised)["budget_usd"] == 2
    assert line.run("budget", "small", "much").code == 2
    assert "2.00 USD → 3.00 USD" in line.run("budget", job, "3USD").stderr
    assert line.run("train", job).code == 0
    over = line.run("budget", job, "4", "USD")
    assert (over.code, over.stderr) == (
        2,
        "error: small is over: no budget limits it any more\n"
        "hint: the next run takes `budget:` of small.yaml, or gpucloud train --budget '4 USD'\n",
    )
