"""Bad machines on the emulated AWS: their stand-in nvidia-smi lists one GPU less than is paid for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.standins.aws import Account, account

LESS = "3 GPUs, 4 expected"
JOB = """\
name: {name}
cloud: aws
code: code
run: sh work.sh
resources: {{nodes: 2, gpus: 4, types: [g4dn.12xlarge]}}
budget: 20 USD
"""


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    with account(tmp_path_factory.mktemp("bad")) as aws:
        yield aws


@pytest.fixture
def aws(standing: Account) -> Iterator[Account]:
    yield standing
    standing.lab.world.machines.lacking = 0
    standing.recover()


def job(aws: Account, name: str) -> str:
    code = aws.line.folder / "code"
    code.mkdir(exist_ok=True)
    (code / "work.sh").write_text("echo worked on $RANK\n")
    file = aws.line.folder / f"{name}.yaml"
    file.write_text(JOB.format(name=name))
    return str(file)


@pytest.mark.slow  # the embedded fleet quarantines in every run
def test_a_machine_that_lists_a_gpu_less_is_refused_replaced_and_the_job_ends_well(aws: Account) -> None:
    aws.lab.world.machines.lacking = 1
    answer = aws.line.run("train", job(aws, "one"), limit_s=500)
    assert answer.code == 0, answer.stderr
    report = aws.line.run("status", "one", "--json").json
    (bad,) = report["quarantined"]
    assert bad["why"] == LESS
    assert f"{bad['node']} is not used any more: {LESS}" in answer.stderr
    assert len(aws.ever("one")) == 3
    members = [line for line in answer.stderr.splitlines() if "attempt 1 starts on " in line]
    assert len(members) == 1
    assert bad["node"] not in members[0]
    assert f"{bad['node']}  " in aws.line.run("status", "one").stdout.partition("bad node")[2]
    assert aws.running == []


@pytest.mark.slow  # two pools of machines, one after the other
def test_where_all_machines_are_bad_two_pools_are_asked_and_the_job_stops_with_the_finding(aws: Account) -> None:
    aws.lab.world.machines.lacking = 99
    answer = aws.line.run("train", job(aws, "all"), "--json", limit_s=500)
    assert answer.code == 14, answer.stderr
    report = answer.json
    assert (report["status"], report["exit_reason"], report["attempts"]) == ("failed", "unprepared", [])
    assert "2 pools in a row had bad machines; g4dn.12xlarge spot in us-east-1" in report["message"]
    assert report["message"].endswith(LESS)
    zones = {aws.zone_of(machine) for machine in aws.ever("all")}
    assert len(zones) == 2
    assert 6 <= len(report["quarantined"]) <= len(aws.ever("all")) <= 8
    assert answer.stderr.count(" nodes in a row were bad") == 3  # of each pool, and at the end
    assert aws.running == []
