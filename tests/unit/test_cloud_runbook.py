"""The run on a real account: its reckoning, and its steps against stand-ins for the account and the command line."""

from __future__ import annotations

import json
import sys
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal

import pytest
import yaml

from tests.cloud import jobs, run
from tests.cloud.account import ended_at
from tests.cloud.figures import (
    Figures,
    Machine,
    Resource,
    TooDear,
    appeared,
    cost_usd,
    guard,
    left_over,
    median,
    refund_command,
    vanished,
)
from tests.unit.real_commands import read_as_typed

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=timezone.utc)
VPC = Resource("vpc", "vpc-1", base=True)
GROUP = Resource("group", "gpucloud-digits")
OTHER = Resource("role", "gpucloud-other")
USER = "AROAEXAMPLE:i-0c"

STORY = """\
import json, pathlib, sys
words = sys.argv[1:]
pathlib.Path(__file__).with_name("asked").open("a").write(" ".join(words) + "\\n")
answers = json.loads(pathlib.Path(__file__).with_name("answers").read_text())
if words[0] == "train":
    print("12:00:00 start: step 0 of 330", file=sys.stderr)
    print("12:00:09 train: step 1 of 330", file=sys.stderr)
said = answers.get("foreign" if "i-0aaaaaaaaaaaaaaaa" in " ".join(words) else
                   "whoami" if "sts" in words else words[0], "")
print(said if isinstance(said, str) else json.dumps(said))
sys.exit(answers.get("codes", {}).get(words[0], 0))
"""
ANSWERS = {
    "plan": {"plan": {"nodes": 2, "cap_usd_per_hour": "1.1", "worst_usd": "1"}},
    "up": {"nodes": [{"id": "i-0c"}]},
    "train": {
        "status": "succeeded",
        "message": None,
        "attempts": [{}, {}],
        "interruptions": [
            {
                "node": "i-0b",
                "kind": "notice",
                "attempt": 1,
                "noticed_at": "2026-11-21T12:00:00+00:00",
                "resumed_at": "2026-11-21T12:01:30+00:00",
            }
        ],
    },
    "whoami": USER,
    "ssh": '{"ETag": "x"}',
    "foreign": "An error occurred (AccessDenied) when calling the PutObject operation",
}


class StandIn:
    """An account in which everything goes as it should; `usd` is spent by one machine, if any."""

    region = "us-east-1"

    def __init__(self, quota=8.0, hours=0.0, late=timedelta(seconds=40)):
        self.quota, self.hours, self.late = quota, hours, late
        self.until = None

    def caller(self):
        return {"Account": "123456789012", "Arn": "arn:aws:iam::123456789012:user/me"}

    def spot_quota(self):
        return self.quota

    def machines(self):
        now = datetime.now(timezone.utc) + timedelta(seconds=1)
        lived = timedelta(hours=self.hours)
        return (Machine(id="i-0b", launched_at=now, ended_at=now + lived),) if self.hours else ()

    def alive(self):
        return ()

    def inventory(self):
        return frozenset({OTHER})

    def bring_forward(self, group, until):
        self.until = until

    def ending(self, instance_id):
        return f"User initiated ({self.until + self.late:%Y-%m-%d %H:%M:%S} GMT)"

    def launch_instances_answers(self, group):
        return "answers:ValidationError"


@pytest.fixture
def made(tmp_path, monkeypatch):
    (tmp_path / "gpucloud.py").write_text(STORY)
    monkeypatch.setattr(jobs, "GPUCLOUD", (sys.executable, str(tmp_path / "gpucloud.py")))

    def make(account, **changes):
        (tmp_path / "answers").write_text(json.dumps({**ANSWERS, **changes}))
        return run.Run(account, tmp_path)

    return make


def asked(folder):
    return [line.split() for line in (folder / "asked").read_text().splitlines()]


def test_a_figure_is_one_line_and_a_missed_one_is_remembered(capsys):
    figures = Figures()
    figures.at_most("lag_s", 12.34567, 300)
    figures.at_least("quota", 4, 8)
    figures.equal("left", "vpc vpc-1", "")
    figures.told("caller", "arn me")

    assert capsys.readouterr().out == (
        "FIGURE lag_s 12.3457 <=300 pass\n"
        "FIGURE quota 4 >=8 fail\n"
        "FIGURE left vpc_vpc-1 =none fail\n"
        "FIGURE caller arn_me - pass\n"
    )
    assert figures.missed == ["quota", "left"]


def test_what_is_left_after_down_is_all_that_is_new_but_the_base():
    before, after = frozenset({OTHER}), frozenset({OTHER, VPC, GROUP})

    assert left_over(before, after) == (GROUP,)
    assert appeared(before, after) == (GROUP, VPC)
    assert vanished(before, after) == ()
    assert vanished(after, before) == (GROUP, VPC)


@pytest.mark.parametrize(
    ("launched", "ended", "usd"),
    [
        (NOW - timedelta(hours=2), None, "2.0000"),
        (NOW - timedelta(hours=2), NOW - timedelta(hours=1), "1.0000"),
        (NOW - timedelta(seconds=6), NOW, "0.0167"),
    ],
    ids=["alive", "ended", "a minute at least"],
)
def test_a_machine_costs_its_time_at_the_highest_price(launched, ended, usd):
    machine = Machine(id="i-0a", launched_at=launched, ended_at=ended)

    assert cost_usd([machine], Decimal(1), NOW) == Decimal(usd)


def test_the_guard_breaks_off_below_five_dollars():
    guard(Decimal("4.4999"))
    with pytest.raises(TooDear, match=r"4\.5 USD are spent; the run is broken off at 4\.5 USD"):
        guard(Decimal("4.5"))


def test_the_budgets_of_all_jobs_are_four_dollars():
    assert sum(Decimal(budget.removesuffix(" USD")) for budget in run.BUDGETS.values()) == 4


def test_the_median_is_the_middle_one():
    assert median([170.0, 90.0, 120.0]) == 120.0


@pytest.mark.parametrize(
    ("reason", "moment"),
    [
        ("User initiated (2026-11-21 10:00:07 GMT)", datetime(2026, 11, 21, 10, 0, 7, tzinfo=timezone.utc)),
        ("", None),
    ],
)
def test_the_end_of_a_machine_is_read_from_ec2s_words(reason, moment):
    assert ended_at(reason) == moment


def test_the_refund_is_looked_up_with_one_command():
    command = refund_command("i-0b", date(2026, 11, 21))

    assert command.startswith("aws ce get-cost-and-usage-with-resources --time-period Start=2026-11-21,End=2026-11-23 ")
    assert '"RESOURCE_ID", "Values": ["i-0b"]' in command


def test_nothing_is_done_without_the_word(capsys):
    with pytest.raises(SystemExit) as left:
        run.main([])

    assert left.value.code == 2
    assert "--yes-spend-5-usd" in capsys.readouterr().err


def test_its_jobs_are_two_small_spot_machines_in_the_region(made, tmp_path):
    made(StandIn())
    spec = yaml.safe_load((tmp_path / "proof.yaml").read_text())

    assert spec["cloud"] == "aws"
    assert spec["resources"] == {
        "gpus": 1,
        "market": "spot",
        "nodes": 2,
        "regions": ["us-east-1"],
        "types": ["g4dn.xlarge"],
    }
    assert (tmp_path / "digits" / "train.py").is_file()


def test_the_whole_run_passes_where_all_goes_as_it_should(made, tmp_path, capsys):
    proof = made(StandIn())
    proof.whole()
    lines = capsys.readouterr().out.splitlines()
    told = {line.split()[1]: line.split()[2:] for line in lines if line.startswith("FIGURE ")}

    assert proof.figures.missed == []
    assert told["drill_notices_seen"] == ["1", ">=1", "pass"]
    assert told["notice_to_first_step_s"] == ["90", "-", "pass"]
    assert told["shut_off_lag_s"] == ["40", "<=300", "pass"]
    assert told["launch_instances"] == ["answers:ValidationError", "-", "pass"]
    assert told["host_key_path_own"] == ["allowed", "=allowed", "pass"]
    assert told["host_key_path_foreign"] == ["AccessDenied", "=AccessDenied", "pass"]
    assert told["left_after_down_base"] == ["none", "=none", "pass"]
    assert told["spent_usd"] == ["0", "<=5", "pass"]
    assert [words[0] for words in asked(tmp_path)] == [
        *("plan", "train", "down", "train", "down", "train", "down", "train", "down"),
        *("up", "ssh", "ssh", "ssh", "down", "down"),
    ]
    assert all(read_as_typed(words) for words in asked(tmp_path))
    assert asked(tmp_path)[-1] == ["down", "--base", "--region", "us-east-1", "--with-data", "--yes"]
    assert proof.jobs.started == []


def test_a_late_shut_off_is_a_miss(made):
    proof = made(StandIn(late=timedelta(seconds=301)))
    proof.one_machine()

    assert proof.figures.missed == ["shut_off_lag_s"]


def test_a_quota_that_is_too_small_ends_it_before_anything_is_made(made, tmp_path):
    with pytest.raises(SystemExit, match="gpucloud quota request"):
        made(StandIn(quota=4.0)).whole()

    assert not (tmp_path / "asked").exists()


def test_a_job_that_fails_is_still_ended(made, tmp_path):
    proof = made(StandIn(), codes={"train": 20})
    with pytest.raises(SystemExit, match="ended with 20"):
        proof.whole()
    proof.jobs.end_everything()

    assert asked(tmp_path)[-1] == ["down", str(tmp_path / "proof.yaml")]


def test_too_much_money_breaks_it_off_but_never_its_end(made, tmp_path):
    proof = made(StandIn(hours=8.0))
    with pytest.raises(TooDear):
        proof.whole()
    proof.jobs.started.append("lag")
    proof.jobs.end_everything()

    assert asked(tmp_path) == [["down", str(tmp_path / "lag.yaml")]]
