"""What is noticed on the emulated AWS without a notice: frozen machines, failed status checks, a hint of risk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commandline import command_line, until, weights
from tests.standins.aws import Account, account

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LIMIT_S = 400.0
STEPS = 160


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[Account]:
    with account(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run that nothing happened to."""
    with command_line(tmp_path_factory.mktemp("plain")) as line:
        assert line.run("train", line.job(steps=STEPS, step_s=0.0)).code == 0
        return weights(line)


def reasons(aws: Account) -> list[str]:
    return [attempt["reason"] for attempt in aws.state("small")["attempts"]]


def ended(aws: Account) -> set[str]:
    """The machines whose end was asked for before the job's own."""
    asked = [str(call.params) for call in aws.lab.calls if call.action.startswith("Terminate") and call.status == 200]
    return {machine for machine in aws.ever("small") if any(machine in said for said in asked)}


def test_a_frozen_machine_at_which_its_peer_knocks_in_vain_is_replaced(aws: Account, undisturbed: str) -> None:
    """SSH server, agent and ranks are stopped; AWS goes on saying that it runs."""
    train = aws.line.start("train", aws.job(steps=STEPS, step_s=0.1))
    until(lambda: aws.step("small") >= 15, "step 15", LIMIT_S)
    peer, frozen = aws.alive("small")
    aws.lab.freeze(frozen)

    assert train.wait(LIMIT_S) == 0, aws.story
    assert reasons(aws) == ["lost", "succeeded"]
    assert aws.state("small")["attempts"][1]["first_step"] > 1
    assert frozen in ended(aws)
    assert peer not in ended(aws)
    assert len(aws.ever("small")) == 3
    assert aws.running == []
    assert f"{frozen} does not answer, and nothing else shows that it lives: it is given up" in aws.story
    assert weights(aws.line) == undisturbed


def test_where_all_are_silent_nothing_is_done_before_aws_itself_says_that_they_are_impaired(
    aws: Account, undisturbed: str
) -> None:
    train = aws.line.start("train", aws.job(steps=STEPS, step_s=0.1))
    until(lambda: aws.step("small") >= 15, "step 15", LIMIT_S)
    frozen = aws.alive("small")
    for machine in frozen:
        aws.lab.freeze(machine)
    before = aws.passes("small")
    until(lambda: aws.passes("small") >= before + 50, "longer than a machine may be silent", LIMIT_S)
    assert aws.alive("small") == frozen
    assert ended(aws) == set()
    scaling = aws.lab.client("autoscaling")
    for machine in frozen:
        scaling.set_instance_health(InstanceId=machine, HealthStatus="Unhealthy")

    assert train.wait(LIMIT_S) == 0, aws.story
    assert reasons(aws) == ["lost", "succeeded"]
    assert len(aws.ever("small")) == 4
    assert aws.running == []
    assert weights(aws.line) == undisturbed


def test_a_hint_of_risk_brings_an_early_checkpoint_and_nothing_else(aws: Account, undisturbed: str) -> None:
    train = aws.line.start("train", aws.job(steps=STEPS, step_s=0.1, every="1000 steps"))
    until(lambda: aws.step("small") >= 5, "step 5", LIMIT_S)
    assert aws.commits("small") == 0
    machine = aws.alive("small")[-1]
    aws.lab.world.machines.recommend_rebalance(machine)
    until(lambda: aws.commits("small") == 1, "an early checkpoint", LIMIT_S)
    assert aws.step("small") < STEPS

    assert train.wait(LIMIT_S) == 0, aws.story
    assert reasons(aws) == ["succeeded"]
    assert len(aws.ever("small")) == 2
    assert aws.story.count(f"the cloud recommends to leave {machine}: ") == 1
    assert weights(aws.line) == undisturbed
