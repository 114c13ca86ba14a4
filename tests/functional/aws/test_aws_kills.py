"""Ended anywhere, by SIGKILL or Ctrl-C: no machine is left that nobody knows, and the next command finishes it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpucloud.adapters.terraform import find_terraform
from tests.awsrig import (
    GROUP,
    INSTALL,
    SPEC,
    WHOLE,
    actions,
    changing,
    counts,
    end_everything_of,
    ids,
    instances,
    provisioner,
    quiet,
)
from tests.lab.aws import Lab
from tests.standins.aws import account

# Connections of clients that nobody closes: boto3 leaves that to the end of the process.
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")]

ROOT = Path(__file__).parents[3]
CALLER = """
import sys
from pathlib import Path
from tests.awsrig import SPEC, provisioner
try:
    provisioner(Path(sys.argv[1])).ensure(SPEC, story=lambda line: print(line, flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""
KILL, CTRL_C = pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGINT, id="interrupted")


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    assert find_terraform() is not None, INSTALL
    with Lab(tmp_path / "lab") as lab:
        for name, value in lab.settings.items():
            monkeypatch.setenv(name, value)
        yield lab


def end(process: subprocess.Popen[str], number: signal.Signals, lab: Lab, when: Callable[[list[str]], bool]) -> int:
    """Send the process the signal when its calls are so far; return its exit code."""
    before = len(lab.calls)
    while not when(actions(lab, before)) and process.poll() is None:
        time.sleep(0.005)
    if process.poll() is None:
        process.send_signal(number)
    return process.wait(timeout=120)


def ended(lab: Lab, home: Path, number: signal.Signals, when: Callable[[list[str]], bool]) -> int:
    """Run `ensure` in another process and end it when its calls are so far; what it says is in `<home>.said`."""
    with home.with_suffix(".said").open("w") as said:
        caller = subprocess.Popen(
            [sys.executable, "-c", CALLER, str(home)],
            cwd=ROOT,
            env=lab.env,
            stdout=said,
            stderr=said,
            start_new_session=True,
            text=True,
        )
    code = end(caller, number, lab, when)
    if number is signal.SIGKILL:
        end_everything_of(home)  # Terraform too: a machine that lost its power
    return code


def finishes(lab: Lab, home: Path) -> None:
    """The next run makes it whole; the one after that has nothing to do."""
    told: list[str] = []
    assert instances(lab) == []
    assert provisioner(home).ensure(SPEC, story=told.append) == GROUP
    assert counts(ids(lab)) == WHOLE, told
    before = len(lab.calls)
    provisioner(home).ensure(SPEC, story=quiet)
    assert changing(lab, before) == []
    assert instances(lab) == []


@pytest.mark.slow  # test_lab.py shows the rule's change alone
def test_a_rule_that_aws_made_is_taken_over_where_the_run_was_ended_before_it_removed_it(
    lab: Lab, tmp_path: Path
) -> None:
    """A new security group lets everything out; Terraform removes that rule, then makes its own."""
    lab.delays["RevokeSecurityGroupEgress"] = 2.0
    lab.faults.add("RevokeSecurityGroupEgress", times=9)
    ended(lab, tmp_path / "home", signal.SIGKILL, lambda calls: "CreateSecurityGroup" in calls)
    lab.delays.clear()
    lab.faults.clear()
    finishes(lab, tmp_path / "home")


@pytest.mark.slow
@pytest.mark.parametrize("number", [KILL, CTRL_C])
@pytest.mark.parametrize("at_call", range(15, 230, 18))
def test_a_run_that_was_ended_at_any_of_many_calls_is_finished_by_the_next_one(
    lab: Lab, tmp_path: Path, at_call: int, number: signal.Signals
) -> None:
    code = ended(lab, tmp_path / "home", number, lambda calls: len(calls) >= at_call)
    assert code in {0, 130, -signal.SIGKILL}, (tmp_path / "home.said").read_text()
    finishes(lab, tmp_path / "home")


@pytest.mark.parametrize(
    ("at", "number"),
    [
        pytest.param("PutBucketVersioning", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("CreateSubnet", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("CreateVpcEndpoint", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("ImportKeyPair", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("CreateAutoScalingGroup", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("PutScheduledUpdateGroupAction", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("LaunchInstances", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_up_goes_on_where_it_was_ended_and_down_leaves_the_base_alone(
    tmp_path: Path, at: str, number: signal.Signals
) -> None:
    with account(tmp_path) as aws:
        file, before = aws.job(), set(aws.lab.inventory())
        assert end(aws.line.start("up", file), number, aws.lab, lambda calls: at in calls) in {130, -signal.SIGKILL}
        again = aws.line.run("up", file, "--json")
        assert again.code == 0, again.stderr
        assert set(aws.running) == {node["id"] for node in again.json["nodes"]}
        down = aws.line.run("down", "small")
        assert down.code == 0, down.stderr
        assert aws.running == []
        left = set(aws.lab.inventory()) - before
        assert not [line for line in left if "gpucloud-small" in line]
        assert {line.split()[0] for line in left} == {
            *("bucket", "internet-gateway", "role", "route-table", "security-group", "subnet", "vpc", "vpc-endpoint")
        }
