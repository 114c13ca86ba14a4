"""A drill of AWS's Fault Injection Service: what is a refusal, and what may have been begun all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError, ReadTimeoutError

from gpucloud.adapters.aws.faults import explained
from gpucloud.adapters.aws.nodes.arming import send_notice
from gpucloud.adapters.aws.nodes.listing import Place
from gpucloud.domain.errors import ProvisionError

PLACE = Place(region="us-east-1", cluster="job")
GROUP = {"AutoScalingGroupARN": "arn:aws:autoscaling:us-east-1:111111111111:autoScalingGroup:1"}
THROTTLED = ClientError({"Error": {"Code": "ThrottlingException", "Message": "slower"}}, "GetExperiment")
DENIED = ClientError({"Error": {"Code": "AccessDeniedException", "Message": "no"}}, "any")


class Fis:
    """Answers the next of `shown` at each look, the last one for ever."""

    def __init__(
        self, *shown: str | Exception, start: Exception | None = None, delete: Exception | None = None
    ) -> None:
        self.shown, self.start, self.delete = list(shown), start, delete
        self.begun, self.deleted = 0, 0

    @contextmanager
    def calling(self, _service: str, what: str, _region: str) -> Iterator[Fis]:
        with explained(what):
            yield self

    def create_experiment_template(self, **_: Any) -> dict[str, Any]:
        return {"experimentTemplate": {"id": "EXT1"}}

    def start_experiment(self, **_: Any) -> dict[str, Any]:
        if self.start is not None:
            raise self.start
        self.begun += 1
        return {"experiment": {"id": "EXP1"}}

    def get_experiment(self, **_: Any) -> dict[str, Any]:
        shown = self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]
        if isinstance(shown, Exception):
            raise shown
        return {"experiment": {"state": {"status": shown, "reason": "no target"}}}

    def delete_experiment_template(self, **_: Any) -> None:
        self.deleted += 1
        if self.delete is not None:
            raise self.delete


def drill(fis: Fis) -> str | None:
    return send_notice(fis, PLACE, GROUP, "i-1", lambda _: None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fis", "told"),
    [
        (Fis("initiating", "running"), None),
        (Fis("running", delete=DENIED), None),
        (Fis(THROTTLED, "pending", "completed"), None),
        (Fis("initiating"), "AWS has begun to take i-1, and does not say yet that it does"),
        (
            Fis(THROTTLED),
            "AWS has begun to take i-1, and cannot be asked whether it does (ThrottlingException)",
        ),
        (Fis("stopped"), "AWS has begun to take i-1, and does not say yet that it does"),
        (
            Fis("running", start=ReadTimeoutError(endpoint_url="fis")),
            "AWS did not answer whether it takes i-1",
        ),
    ],
)
def test_a_drill_that_may_be_begun_is_no_refusal(fis: Fis, told: str | None) -> None:
    assert (drill(fis), fis.deleted) == (told, 1)


@pytest.mark.parametrize(
    ("fis", "told", "may_pass"),
    [
        (Fis("initiating", "failed"), "the drill for i-1 failed: no target", False),
        (Fis("cancelled"), "the drill for i-1 cancelled: no target", False),
        (Fis("running", start=THROTTLED, delete=DENIED), "cannot interrupt i-1 for a drill: ", True),
        (Fis("running", start=ConnectTimeoutError(endpoint_url="fis")), "cannot interrupt i-1 for a drill: ", True),
    ],
)
def test_a_drill_that_was_not_begun_or_failed_is_refused(fis: Fis, told: str, may_pass: bool) -> None:
    with pytest.raises(ProvisionError) as refused:
        drill(fis)
    assert str(refused.value).startswith(told)
    assert (refused.value.may_pass, fis.deleted) == (may_pass, 1)
