"""What a node's first boot says to AWS, and that nothing secret is in it or comes out of it."""

from __future__ import annotations

import importlib.util
import json
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import botocore.auth
import botocore.awsrequest
import botocore.credentials
import pytest

from gpucloud.adapters.aws.machine import USER_DATA_BYTES, user_data
from gpucloud.adapters.home import bundled
from gpucloud.domain.errors import UsageError

KEYS = {"Code": "Success", "AccessKeyId": "ASIAX", "SecretAccessKey": "very-secret", "Token": "session-token"}
ID = "i-0123456789abcdef0"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    for name in ("AWS_ENDPOINT_URL", "AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("first_boot", bundled("templates", "node", "first_boot.py"))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "watch_for_agent", lambda *_: None)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "first_boot.py"))
    monkeypatch.setattr(module, "make_fit", lambda store, cluster, region: None)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("GPUCLOUD_HOST_KEY_FILE", str(bundled("templates", "node", "first_boot.py")))
    return module


class Aws:
    """Answers the script's requests; `s3` are the answers to its writes, the last one for ever."""

    def __init__(self, *s3: tuple[int, dict[str, str], str], roles: tuple[str, ...] = ("role",)) -> None:
        self.asked: list[tuple[str, str]] = []
        self._s3 = list(s3)
        self._roles = list(roles)

    def send(self, method: str, url: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        status, told, text = self.answer(method, url)
        return status, told, text.encode()

    def answer(self, method: str, url: str) -> tuple[int, dict[str, str], str]:
        self.asked.append((method, url))
        if url.endswith("/latest/api/token"):
            return 200, {}, "token"
        if url.endswith("/security-credentials/"):
            name = self._roles.pop(0) if len(self._roles) > 1 else self._roles[0]
            return (200, {}, name) if name else (404, {}, "")
        if "/security-credentials/" in url:
            return 200, {}, json.dumps(KEYS)
        if url.endswith("/instance-id"):
            return 200, {}, ID
        if "sts." in url:
            return 200, {}, f"<GetCallerIdentityResult><UserId>AROAX:{ID}</UserId></GetCallerIdentityResult>"
        return self._s3.pop(0) if len(self._s3) > 1 else self._s3[0]

    @property
    def outside(self) -> list[tuple[str, str]]:
        return [(method, url) for method, url in self.asked if "169.254.169.254" not in url]


OK = (200, {}, "")


@pytest.mark.parametrize(
    ("method", "url", "body", "scope"),
    [
        ("PUT", "https://b.s3.eu-west-1.amazonaws.com/p/clusters/c/hosts/AROAX%3Ai-0a", b"key\n", ("eu-west-1", "s3")),
        ("POST", "https://sts.cn-north-1.amazonaws.com.cn/", b"Action=GetCallerIdentity", ("cn-north-1", "sts")),
    ],
)
def test_a_request_is_signed_as_botocore_signs_it(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, method: str, url: str, body: bytes, scope: tuple[str, str]
) -> None:
    now = datetime(2026, 11, 21, 10, 20, 30, tzinfo=timezone.utc)
    ours = script.signed(method, url, body, KEYS, scope, now)
    theirs = _by_botocore(monkeypatch, now, method, url, body, scope, ours)
    assert ours["authorization"] == theirs


def _by_botocore(monkeypatch: pytest.MonkeyPatch, now: datetime, *rest: Any) -> str:
    method, url, body, (region, service), ours = rest
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: now.replace(tzinfo=None))
    credentials = botocore.credentials.Credentials("ASIAX", "very-secret", "session-token")
    kind = botocore.auth.S3SigV4Auth if service == "s3" else botocore.auth.SigV4Auth
    left = {k: v for k, v in ours.items() if k in {"content-type", "x-amz-content-sha256"}}
    request = botocore.awsrequest.AWSRequest(method, url, headers=left, data=body)
    kind(credentials, service, region).add_auth(request)
    return str(request.headers["Authorization"])


@pytest.mark.parametrize(
    ("store", "region", "host"),
    [
        ("s3://gpucloud-1-eu-west-1/x", "eu-west-1", "gpucloud-1-eu-west-1.s3.eu-west-1.amazonaws.com/x"),
        ("s3://b", "cn-north-1", "b.s3.cn-north-1.amazonaws.com.cn"),
        ("s3://my.dotted.bucket/x/y/", "us-east-1", "s3.us-east-1.amazonaws.com/my.dotted.bucket/x/y"),
    ],
)
def test_the_key_goes_below_the_store_in_the_partition_s_domain(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, store: str, region: str, host: str
) -> None:
    aws = Aws(OK)
    monkeypatch.setattr(script, "send", aws.send)
    assert script.main(store, "gpucloud-digits", region) == 0
    domain = "amazonaws.com.cn" if region == "cn-north-1" else "amazonaws.com"
    assert aws.outside == [
        ("POST", f"https://sts.{region}.{domain}/"),
        ("PUT", f"https://{host}/clusters/gpucloud-digits/hosts/AROAX%3A{ID}"),
    ]


def test_a_bucket_of_another_region_is_written_there(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    aws = Aws((301, {"x-amz-bucket-region": "eu-west-1"}, "<Code>PermanentRedirect</Code>"), OK)
    monkeypatch.setattr(script, "send", aws.send)
    assert script.main("s3://b", "c", "us-east-1") == 0
    assert aws.outside[-1] == ("PUT", f"https://b.s3.eu-west-1.amazonaws.com/clusters/c/hosts/AROAX%3A{ID}")


def test_a_role_that_is_not_known_everywhere_yet_is_tried_again(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = (403, {}, "<Error><Code>AccessDenied</Code></Error>")
    aws = Aws(denied, (503, {}, "<Code>SlowDown</Code>"), OK, roles=("", "", "role"))
    monkeypatch.setattr(script, "send", aws.send)
    assert script.main("s3://b", "c", "us-east-1") == 0
    assert [method for method, _ in aws.outside] == ["POST", "PUT"] * 3


def test_giving_up_names_the_reason_and_no_secret(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leaky = f"<Error><Code>SignatureDoesNotMatch</Code><StringToSign>{KEYS['Token']}</StringToSign></Error>"
    monkeypatch.setattr(script, "send", Aws((403, {}, leaky)).send)
    monkeypatch.setenv("GPUCLOUD_PUBLISH_S", "0")
    assert script.main("s3://b", "c", "us-east-1") == 1
    said = capsys.readouterr().out
    assert said == "gpucloud: the host key is not published: S3 answered 403 SignatureDoesNotMatch\n"


def test_another_instance_s_keys_are_not_used(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    aws = Aws(OK)
    monkeypatch.setattr(script, "send", aws.send)
    monkeypatch.setattr(script, "caller", lambda keys, region: "AROAX:somebody")
    monkeypatch.setenv("GPUCLOUD_PUBLISH_S", "0")
    assert script.main("s3://b", "c", "us-east-1") == 1
    assert aws.outside == []


def test_user_data_is_a_script_that_ec2_takes() -> None:
    text = user_data(store_url="s3://b/it's", cluster="gpucloud-digits", region="us-east-1")
    assert text.startswith("#!/bin/sh\numask 077\n")
    assert text.endswith("\nexec python3 -I \"$d/first_boot.py\" 's3://b/it'\"'\"'s' gpucloud-digits us-east-1\n")
    longest = user_data(store_url="s3://" + 63 * "b" + "/" + 900 * "p", cluster=64 * "c", region="ap-southeast-1")
    assert len(longest.encode()) < USER_DATA_BYTES
    assert text == user_data(store_url="s3://b/it's", cluster="gpucloud-digits", region="us-east-1")


def test_a_store_that_machines_cannot_reach_is_refused() -> None:
    with pytest.raises(UsageError, match="machines on AWS cannot write there"):
        user_data(store_url="file:///tmp/store", cluster="c", region="us-east-1")


class Group:
    """Answers Auto Scaling, and S3 with the job's state."""

    def __init__(self, state: str, *answers: tuple[int, str]) -> None:
        self.lowered: list[str] = []
        self._state, self._answers = state, list(answers)

    def send(self, method: str, url: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        if "autoscaling" not in url:
            return (200, {}, self._state.encode()) if "/jobs/digits/state.json" in url else (404, {}, b"")
        self.lowered.append(f"{method} {url} {body.decode()} {headers['authorization'].split(',')[0][-40:]}")
        status, said = self._answers.pop(0) if self._answers else (200, "")
        return status, {}, said.encode()


@pytest.mark.parametrize(
    ("state", "lowers"),
    [
        ('{"paid_until": "2020-01-01T00:00:00+00:00"}', True),
        ('{"paid_until": "2099-01-01T00:00:00Z"}', False),  # it was only not told: its peers are paid for, and work on
        ('{"paid_until": null}', True),
        ("", True),
    ],
)
def test_a_machine_lowers_its_group_before_it_ends_unless_that_is_paid_for(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, state: str, *, lowers: bool
) -> None:
    group = Group(state)
    monkeypatch.setattr(script, "send", group.send)
    monkeypatch.setattr(script, "own_keys", lambda: (KEYS, ID))
    assert script.end("s3://b/team", "gpucloud-digits", "eu-west-1") == 0
    assert [line.split(" ")[:3] for line in group.lowered] == (
        [
            [
                "POST",
                "https://autoscaling.eu-west-1.amazonaws.com/",
                "Action=SetDesiredCapacity&Version=2011-01-01&DesiredCapacity=0&HonorCooldown=false"
                "&AutoScalingGroupName=gpucloud-digits",
            ]
        ]
        if lowers
        else []
    )
    assert all("/eu-west-1/autoscaling/aws4_request" in line for line in group.lowered)


@pytest.mark.parametrize("until", ["2099-01-01T00:00:00", "tomorrow", "9999-99-99", ""])
def test_a_time_that_cannot_be_read_lowers_no_group_and_keeps_no_machine_from_its_end(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, until: str
) -> None:
    """Machines of a job that drives itself may write its state."""
    group = Group(json.dumps({"paid_until": until}))
    monkeypatch.setenv("GPUCLOUD_END_S", "0")
    monkeypatch.setattr(script, "send", group.send)
    monkeypatch.setattr(script, "own_keys", lambda: (KEYS, ID))
    monkeypatch.setattr(script.time, "sleep", lambda _: None)
    said = script.end("s3://b", "gpucloud-digits", "eu-west-1")
    assert (said, len(group.lowered)) == ((0, 1) if until == "" else (1, 0))


def test_a_group_that_is_busy_is_lowered_later_and_a_refusal_is_final(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "own_keys", lambda: (KEYS, ID))
    busy = Group("", (503, ""), (400, "<Code>Throttling</Code>"))
    monkeypatch.setattr(script, "send", busy.send)
    assert (script.end("s3://b", "gpucloud-digits", "eu-west-1"), len(busy.lowered)) == (0, 3)
    refused = Group("", (403, "<Code>AccessDenied</Code>"))
    monkeypatch.setattr(script, "send", refused.send)
    assert (script.end("s3://b", "gpucloud-digits", "eu-west-1"), len(refused.lowered)) == (1, 1)
