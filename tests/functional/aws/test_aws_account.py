"""Who the caller is, over sockets: in time, and with the next step."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from gpucloud.adapters.aws.account import AwsAccount
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.errors import CredentialsError, ProvisionError
from gpucloud.domain.market.catalog import Caller
from tests.lab.aws import Lab


def test_the_caller_is_told_with_account_and_region(lab: Lab):
    caller = AwsAccount(Aws()).caller()
    assert caller == Caller(account="123456789012", arn=caller.arn, profile=None, region="us-east-1", partition="aws")
    assert caller.arn.startswith("arn:aws:sts::123456789012:")


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidClientTokenId", "SignatureDoesNotMatch"])
def test_a_caller_that_aws_does_not_know_hears_profile_and_region(lab: Lab, tmp_path: Path, code: str, monkeypatch):
    profiles = tmp_path / "credentials"
    profiles.write_text("[team]\naws_access_key_id = AKIATEST\naws_secret_access_key = test\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profiles))
    lab.faults.add(action="GetCallerIdentity", code=code, status=403)
    with pytest.raises(CredentialsError, match=r"cannot log in to AWS \(profile team, region eu-west-1\)") as caught:
        AwsAccount(Aws("team", "eu-west-1")).caller()
    assert code in caught.value.message
    assert "aws " in (caught.value.hint or "")


def test_a_caller_whom_a_busy_aws_puts_off_is_told_in_the_end(lab: Lab):
    lab.faults.add("GetCallerIdentity", code="Throttling", status=400, times=2)
    assert AwsAccount(Aws()).caller().account == "123456789012"


def test_a_caller_without_credentials_hears_how_to_get_some(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(CredentialsError, match="there are no AWS credentials") as caught:
        AwsAccount(Aws()).caller()
    assert "aws configure" in (caught.value.hint or "")


def test_an_aws_that_says_nothing_is_given_up_within_three_seconds(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        aws = Aws()
        aws.client("sts", quick=True)  # reads botocore's files, which a busy machine takes its time for
        account = AwsAccount(aws)
        begun = time.monotonic()
        with pytest.raises(ProvisionError, match="AWS did not answer in time"):
            account.caller()
    assert time.monotonic() - begun < 3.0 + 2.0  # a busy machine takes its time


def test_an_aws_that_is_not_there_is_said_at_once(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ProvisionError, match="AWS cannot be reached") as caught:
        AwsAccount(Aws()).caller()
    assert caught.value.hint == "check the network and AWS_ENDPOINT_URL, then the same command"
