"""`gpucloud iam policy` as whoever has no rights yet calls it: without credentials, without a network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from gpucloud.__main__ import main
from gpucloud.adapters.aws.policy import boundary_arn, boundary_policy, node_policy, user_policy
from gpucloud.adapters.aws.session import Aws

JOB = """
name: digits
cloud: aws
resources: {{gpus: 1{regions}}}
run: "true"
budget: 5 USD
aws: {{{aws}}}
"""
FORMS = [
    ("file.yaml",), (), ("--ci", "file.yaml"), ("--no-boundary",), ("--boundary",), ("--boundary", "file.yaml"),
    ("--machines", "file.yaml"), ("--self-driving", "file.yaml"),
]  # fmt: skip
OURS = "111122223333"


class Shell:
    """Runs `gpucloud iam policy` in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys

    def __call__(self, *words: str) -> tuple[int, str, list[str]]:
        """Return the exit code, the answer and the story's lines."""
        self._monkeypatch.setattr("sys.argv", ["gpucloud", "iam", "policy", *words])
        with pytest.raises(SystemExit) as left:
            main()
        told = self._capsys.readouterr()
        return int(left.value.code or 0), told.out, told.err.splitlines()

    def file(self, regions: str = ", regions: [us-east-2]", aws: str = "") -> None:
        """Write the job's file."""
        (self._folder / "file.yaml").write_text(JOB.format(regions=regions, aws=aws))


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    names = ("PROFILE", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "REGION", "DEFAULT_REGION")
    for name in names:
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    shell = Shell(tmp_path, monkeypatch, capsys)
    shell.file()
    return shell


def placeholders(story: list[str]) -> list[str]:
    return [line for line in story if "is a placeholder" in line]


@pytest.mark.parametrize("words", FORMS, ids=" ".join)
def test_without_credentials_a_placeholder_stands_for_the_account_and_one_line_says_so(
    policy: Shell, words: tuple[str, ...]
):
    code, answer, story = policy(*words)
    assert (code, answer[0], answer[-2:]) == (0, "{", "}\n")
    json.loads(answer)
    assert "<ACCOUNT>" in answer
    assert set(re.findall(r"<\w+>", answer)) == {"<ACCOUNT>"}
    (line,) = placeholders(story)
    assert line.startswith("<ACCOUNT> is a placeholder: --account 123456789012 puts")
    assert "there are no AWS credentials" in line


@pytest.mark.parametrize("words", [words for words in FORMS if "file.yaml" in words], ids=" ".join)
def test_a_policy_is_of_all_regions_of_the_file_and_the_store_in_the_first(policy: Shell, words: tuple[str, ...]):
    regions = ("us-east-2", "us-west-2", "eu-west-1")
    policy.file(regions=f", regions: [{', '.join(regions)}]")
    code, answer, story = policy(*words, "--account", OURS)
    assert (code, json.loads(answer)) == (0, expected(words, regions))
    assert not [line for line in story if "us-west-2" in line]
    assert json.loads(policy(*words, "--account", OURS, "--region", "us-west-2")[1]) == expected(words, ("us-west-2",))


def test_a_job_without_a_region_has_a_placeholder_for_it_in_its_machines_policy(policy: Shell):
    policy.file(regions="")
    code, answer, story = policy("--machines", "file.yaml")
    assert code == 0
    assert "arn:aws:s3:::gpucloud-<ACCOUNT>-<REGION>/jobs/digits/*" in answer
    assert [line.split()[0] for line in placeholders(story)] == ["<REGION>", "<ACCOUNT>"]
    assert "--region us-east-1" in placeholders(story)[0]


@pytest.mark.parametrize("words", FORMS, ids=" ".join)
def test_with_an_account_nothing_is_asked_of_aws(
    policy: Shell, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
):
    def client(*asked: Any, **_: Any) -> None:
        raise AssertionError(f"AWS is asked: {asked}")

    monkeypatch.setattr(Aws, "client", client)
    code, answer, story = policy(*words, "--account", OURS, "--region", "eu-west-1")
    assert (code, placeholders(story)) == (0, [])
    assert "<" not in answer
    assert json.loads(answer) == expected(words, ("eu-west-1",))


def expected(words: tuple[str, ...], regions: tuple[str, ...]) -> Any:
    who: dict[str, Any] = {"partition": "aws", "account": OURS, "regions": regions}
    if words[:1] in {("--machines",), ("--self-driving",)}:
        bucket = f"gpucloud-{OURS}-{regions[0]}"
        return node_policy(**who, cluster="gpucloud-digits", bucket=bucket, unattended=words[0] == "--self-driving")
    if words[:1] == ("--boundary",):
        return boundary_policy(**who)
    boundary = None if words == ("--no-boundary",) else boundary_arn("aws", OURS)
    return user_policy(**who, boundary=boundary, makes_roles=words[:1] != ("--ci",))


def test_an_account_that_cannot_be_reached_is_a_placeholder_too(policy: Shell, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    code, answer, story = policy("file.yaml")
    assert (code, len(placeholders(story))) == (0, 1)
    assert "gpucloud-<ACCOUNT>-us-east-2" in answer


@pytest.mark.parametrize("regions", ["", ", regions: [us-east-2]"])
def test_a_profile_that_this_machine_does_not_have_is_no_hindrance(policy: Shell, regions: str):
    policy.file(regions=regions, aws="profile: research")
    code, answer, story = policy("file.yaml")
    assert (code, len(placeholders(story))) == (0, 1)
    assert "research" in placeholders(story)[0]
    assert "gpucloud-<ACCOUNT>-" in answer


@pytest.mark.parametrize("words", [(), ("--account", OURS)])
def test_the_role_of_an_own_profile_is_a_placeholder_where_aws_is_not_asked(policy: Shell, words: tuple[str, ...]):
    policy.file(aws="instance_profile: nodes")
    code, answer, story = policy("--ci", "file.yaml", *words)
    account = words[-1] if words else "<ACCOUNT>"
    assert code == 0
    passed = [one for one in json.loads(answer)["gpucloud-account"]["Statement"] if one["Sid"] == "PassRole"]
    assert [one["Resource"] for one in passed] == [[f"arn:aws:iam::{account}:role/<ROLE>"]]
    assert f"arn:aws:iam::{account}:instance-profile/nodes" in answer
    assert sum("<ROLE> is a placeholder" in line and "nodes" in line for line in story) == 1


def test_a_stores_key_that_is_named_is_in_the_machines_policy_too(policy: Shell):
    policy.file(aws="kms_key: mrk-1")
    code, answer, _ = policy("--machines", "file.yaml", "--account", OURS, "--kms-key", "mrk-2", "--kms-key", "mrk-1")
    (statement,) = (one for one in json.loads(answer)["Statement"] if one["Sid"] == "StoreKey")
    assert (code, statement["Resource"]) == (0, [f"arn:aws:kms:us-east-2:{OURS}:key/mrk-{n}" for n in (1, 2)])


@pytest.mark.parametrize(
    ("types", "access", "channels", "remarks"),
    [
        ("p4d.24xlarge", "public", True, ["p4d.24xlarge has no public address"]),
        ("p4d.24xlarge, g5.xlarge", "public", True, ["p4d.24xlarge has no public address"]),
        ("p4d.24xlarge, p5.48xlarge", "public", True, ["p4d.24xlarge and 1 more have no public address"]),
        ("p4d.24xlarge", "private", False, []),
        ("g5.xlarge", "public", False, []),
        ("g5.xlarge", "session_manager", True, []),
    ],
)
def test_machines_without_a_public_address_have_the_channels_of_sessions_in_their_policy(
    policy: Shell, types: str, access: str, *, channels: bool, remarks: list[str]
):
    policy.file(regions=f", nodes: 2, regions: [us-east-2], types: [{types}]", aws=f"access: {access}")
    code, answer, story = policy("--machines", "file.yaml", "--account", OURS)
    assert (code, "ssmmessages:OpenControlChannel" in answer) == (0, channels)
    assert [line.partition(":")[0] for line in story if "public address" in line] == remarks


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--account", "1234"), "--account 1234 is no AWS account number, which has 12 digits"),
        (("--account", "<ACCOUNT>"), "has 12 digits"),
        (("--account", OURS, "--region", "us-east1"), "did you mean us-east-1?"),
        (("--region", "nowhere"), "nowhere is no AWS region"),
        (("--account", OURS, "--region", "us-eats-1"), "us-eats-1 is no AWS region"),
        (("--region", "cn-north-1"), "cn-north-1 is in aws-cn; gpucloud rents in AWS's commercial regions only"),
    ],
)
def test_no_account_and_no_region_is_said_with_the_right_thing(policy: Shell, words: tuple[str, ...], said: str):
    code, answer, story = policy(*words)
    assert (code, answer) == (2, "")
    assert said in "\n".join(story)
    assert any(line.startswith("hint: ") for line in story)
