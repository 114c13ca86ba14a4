"""The account's bucket: made whole, made once, given back."""

from __future__ import annotations

import json
import mmap

import botocore.exceptions
import pytest
from moto.s3.models import s3_backends

from gpucloud.adapters.aws.bucket import ensure_bucket, lacking_rules, remove_bucket, what_stays
from gpucloud.adapters.aws.session import Aws
from gpucloud.domain.checkpoint.objects import PART_BYTES
from gpucloud.domain.errors import CredentialsError, ProvisionError, StoreError, UsageError
from gpucloud.store import Conflict, open_store
from tests.lab.aws import Lab

NAME = "gpucloud-123456789012-us-east-1"


@pytest.fixture
def lab(lab: Lab) -> Lab:
    s3_backends["123456789012"]["aws"].reset()
    return lab


def actions(lab: Lab) -> list[str]:
    return [call.action for call in lab.calls]


def test_the_bucket_is_hardened_and_tagged(lab: Lab):
    assert ensure_bucket(Aws(), "us-east-1") == NAME
    s3 = lab.client("s3")
    assert s3.get_bucket_versioning(Bucket=NAME)["Status"] == "Enabled"
    assert s3.get_public_access_block(Bucket=NAME)["PublicAccessBlockConfiguration"] == {
        "BlockPublicAcls": True,
        "IgnorePublicAcls": True,
        "BlockPublicPolicy": True,
        "RestrictPublicBuckets": True,
    }
    (encryption,) = s3.get_bucket_encryption(Bucket=NAME)["ServerSideEncryptionConfiguration"]["Rules"]
    assert encryption["ApplyServerSideEncryptionByDefault"] == {"SSEAlgorithm": "AES256"}
    tags = {tag["Key"]: tag["Value"] for tag in s3.get_bucket_tagging(Bucket=NAME)["TagSet"]}
    assert tags == {"gpucloud:managed": "true", "gpucloud:base": "us-east-1", "gpucloud:hardened": "1:AES256"}
    rules = s3.get_bucket_lifecycle_configuration(Bucket=NAME)["Rules"]
    assert rules[0]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    kept = {rule["Filter"]["Prefix"]: rule["NoncurrentVersionExpiration"]["NoncurrentDays"] for rule in rules[1:]}
    assert kept == {"terraform/": 30, "jobs/": 1, "clusters/": 1}


def test_its_policy_wants_tls_and_a_condition_on_a_jobs_state(lab: Lab):
    ensure_bucket(Aws(), "us-east-1")
    tls, state = json.loads(lab.client("s3").get_bucket_policy(Bucket=NAME)["Policy"])["Statement"]
    assert tls["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert state["Resource"] == f"arn:aws:s3:::{NAME}/jobs/*/state.json"
    assert state["Condition"] == {"Null": {"s3:if-match": "true", "s3:if-none-match": "true"}}


def test_a_key_of_the_users_own_encrypts_it(lab: Lab):
    key = "arn:aws:kms:us-east-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    ensure_bucket(Aws(), "us-east-1", kms_key=key)
    (rule,) = lab.client("s3").get_bucket_encryption(Bucket=NAME)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"] == {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": key}


def test_a_bucket_that_stands_costs_two_reads(lab: Lab):
    ensure_bucket(Aws(), "us-east-1")
    before = len(lab.calls)
    assert ensure_bucket(Aws(), "us-east-1") == NAME
    assert actions(lab)[before:] == ["GetCallerIdentity", "GetBucketTagging"]


def test_a_bucket_in_another_region_gets_its_region(lab: Lab):
    assert ensure_bucket(Aws(), "eu-west-1") == "gpucloud-123456789012-eu-west-1"
    place = lab.client("s3").get_bucket_location(Bucket="gpucloud-123456789012-eu-west-1")
    assert place["LocationConstraint"] == "eu-west-1"


@pytest.mark.parametrize(
    "action",
    [
        "CreateBucket",
        "PutPublicAccessBlock",
        "PutBucketVersioning",
        "PutBucketEncryption",
        "PutBucketLifecycleConfiguration",
        "PutBucketPolicy",
        "PutBucketTagging",
    ],
)
def test_whatever_step_fails_the_next_call_completes_it(lab: Lab, action: str):
    lab.faults.add(action=action, code="AccessDenied", status=403, times=1)
    with pytest.raises(ProvisionError):
        ensure_bucket(Aws(), "us-east-1")
    ensure_bucket(Aws(), "us-east-1")
    s3 = lab.client("s3")
    assert s3.get_bucket_versioning(Bucket=NAME)["Status"] == "Enabled"
    assert s3.get_bucket_policy(Bucket=NAME)["Policy"]
    before = len(lab.calls)
    ensure_bucket(Aws(), "us-east-1")
    assert actions(lab)[before:] == ["GetCallerIdentity", "GetBucketTagging"]


def test_tags_that_somebody_added_are_kept(lab: Lab):
    s3 = lab.client("s3")
    s3.create_bucket(Bucket=NAME)
    s3.put_bucket_tagging(Bucket=NAME, Tagging={"TagSet": [{"Key": "cost-centre", "Value": "7"}]})
    ensure_bucket(Aws(), "us-east-1")
    tags = {tag["Key"]: tag["Value"] for tag in s3.get_bucket_tagging(Bucket=NAME)["TagSet"]}
    assert tags["cost-centre"] == "7"
    assert tags["gpucloud:managed"] == "true"


def test_a_name_that_belongs_to_another_account_is_said(lab: Lab):
    lab.faults.add(action="GetBucketTagging", code="AccessDenied", status=403, times=9)
    with pytest.raises(ProvisionError, match="belongs to another account than 123456789012") as caught:
        ensure_bucket(Aws(), "us-east-1")
    assert "store: s3://" in (caught.value.hint or "")


def test_expired_credentials_end_it_as_credentials(lab: Lab):
    lab.faults.add(action="GetCallerIdentity", code="ExpiredToken", status=403, times=9)
    with pytest.raises(CredentialsError, match="the credentials have expired"):
        ensure_bucket(Aws(), "us-east-1")


def test_a_job_keeps_its_state_in_it_by_compare_and_swap(lab: Lab):
    store = open_store(f"s3://{ensure_bucket(Aws(), 'us-east-1')}")
    version = store.put("jobs/digits/state.json", b"one", if_absent=True)
    store.put("jobs/digits/state.json", b"two", if_version=version)
    with pytest.raises(Conflict):
        store.put("jobs/digits/state.json", b"three", if_version=version)
    with pytest.raises(StoreError, match="AccessDenied"):
        store.put("jobs/digits/state.json", b"blindly")
    store.put("jobs/digits/logs/1/node.log", b"blindly")


@pytest.mark.parametrize("name", ["state.json", "run/state.json"])
def test_what_a_job_makes_may_be_called_as_its_state_is_however_often_it_is_written(lab: Lab, name: str):
    """IAM's star passes slashes: the bucket takes every such name below a job for a state."""
    store, key = open_store(f"s3://{ensure_bucket(Aws(), 'us-east-1')}"), f"jobs/digits/outputs/files/{name}"
    versions = [store.put(key, data) for data in (b"one", b"two", b"two", b"large" * (PART_BYTES // 4))]
    assert len(set(versions)) == 3
    assert lab.client("s3").head_object(Bucket=NAME, Key=key)["ContentLength"] == 5 * (PART_BYTES // 4)


def test_what_is_called_as_a_state_is_never_too_large_to_be_held_in_memory(lab: Lab) -> None:
    store, key = open_store(f"s3://{ensure_bucket(Aws(), 'us-east-1')}"), "jobs/digits/outputs/files/state.json"
    with pytest.raises(StoreError, match=r"state\.json has 257 MiB: of that name, 256 MiB is the most"):
        store.put(key, memoryview(mmap.mmap(-1, 257 << 20)))
    assert store.get(key) is None


def test_two_writers_of_what_is_called_as_a_state_do_not_hinder_each_other(lab: Lab):
    store, key = open_store(f"s3://{ensure_bucket(Aws(), 'us-east-1')}"), "jobs/digits/outputs/files/state.json"
    lab.faults.add("PutObject", code="PreconditionFailed", status=412, times=2)
    assert store.put(key, b"one")
    stored = store.get(key)
    assert stored is not None
    assert stored.data == b"one"


def test_parts_of_a_state_are_refused_as_the_whole_of_it_is(lab: Lab):
    """S3 asks for `s3:PutObject` for each (Mapping of S3 API operations to permissions)."""
    ensure_bucket(Aws(), "us-east-1")
    with pytest.raises(botocore.exceptions.ClientError, match="AccessDenied"):
        lab.client("s3").create_multipart_upload(Bucket=NAME, Key="jobs/digits/outputs/state.json")


def test_a_bucket_with_jobs_is_not_removed_unless_asked_for(lab: Lab):
    store = open_store(f"s3://{ensure_bucket(Aws(), 'us-east-1')}")
    store.put("jobs/digits/state.json", b"one", if_absent=True)
    store.put("jobs/moons/state.json", b"one", if_absent=True)
    with pytest.raises(UsageError, match="holds the checkpoints, results and records of digits, moons"):
        remove_bucket(Aws(), "us-east-1", with_data=False)
    assert store.get("jobs/digits/state.json") is not None


def test_every_version_and_part_goes_with_the_bucket(lab: Lab):
    store = open_store(f"s3://{ensure_bucket(Aws(), 'us-east-1')}")
    version = store.put("jobs/digits/state.json", b"one", if_absent=True)
    store.put("jobs/digits/state.json", b"two", if_version=version)
    store.put("terraform/base/terraform.tfstate", b"{}")
    store.delete("terraform/base/terraform.tfstate")
    lab.client("s3").create_multipart_upload(Bucket=NAME, Key="jobs/digits/part")
    assert remove_bucket(Aws(), "us-east-1", with_data=True)
    assert lab.client("s3").list_buckets()["Buckets"] == []


def test_a_bucket_without_jobs_is_removed(lab: Lab):
    ensure_bucket(Aws(), "us-east-1")
    assert remove_bucket(Aws(), "us-east-1", with_data=False)
    assert not remove_bucket(Aws(), "us-east-1", with_data=False)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("data/imagenet/a.tar", "what is not gpucloud's own: data/"),
        ("experiments/jobs/moons/checkpoints/commit/000001/000000010.json", "what is not gpucloud's own: experiments/"),
        ("notes.txt", "what is not gpucloud's own: notes.txt"),
    ],
)
def test_a_bucket_in_which_other_things_lie_is_not_removed_unless_asked_for(lab: Lab, key: str, told: str):
    store = open_store(f"s3://{ensure_bucket(Aws(), 'us-east-1')}")
    store.put("terraform/base/terraform.tfstate", b"{}")
    store.put("clusters/gpucloud-digits/node.json", b"{}")
    store.put(key, b"one")
    with pytest.raises(UsageError, match=f"the bucket {NAME} holds {told}$"):
        remove_bucket(Aws(), "us-east-1", with_data=False)
    store.delete(key)
    if "/" in key:  # a folder of which old versions are left: deleted by mistake, it can be fetched back
        with pytest.raises(UsageError, match=told):
            remove_bucket(Aws(), "us-east-1", with_data=False)
    assert remove_bucket(Aws(), "us-east-1", with_data=True)


def test_of_many_things_that_keep_a_bucket_some_are_named(lab: Lab):
    store = open_store(f"s3://{ensure_bucket(Aws(), 'us-east-1')}")
    store.put("jobs/digits/state.json", b"one", if_absent=True)
    for number in range(10):
        store.put(f"set-{number}/a.tar", b"one")
    names = ", ".join(f"set-{number}/" for number in range(8))
    with pytest.raises(UsageError, match=f"records of digits and what is not gpucloud's own: {names} and 2 more$"):
        remove_bucket(Aws(), "us-east-1", with_data=False)


OLD = {"NoncurrentVersionExpiration": {"NoncurrentDays": 1}}
BROKEN = {"AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}
WANTS_OLD = "NoncurrentVersionExpiration {NoncurrentDays: 1}"
WANTS_BROKEN = "AbortIncompleteMultipartUpload {DaysAfterInitiation: 1}"


@pytest.mark.parametrize(
    ("rules", "versioned", "lacking"),
    [
        ([], True, (WANTS_OLD, WANTS_BROKEN)),
        ([], False, (WANTS_BROKEN,)),
        ([{"Status": "Enabled", "Filter": {"Prefix": ""}, **OLD, **BROKEN}], True, ()),
        ([{"Status": "Enabled", "Filter": {}, **OLD}, {"Status": "Enabled", "Prefix": "team/", **BROKEN}], True, ()),
        ([{"Status": "Disabled", "Filter": {"Prefix": ""}, **OLD, **BROKEN}], True, (WANTS_OLD, WANTS_BROKEN)),
        ([{"Status": "Enabled", "Filter": {"Prefix": "jobs/"}, **OLD, **BROKEN}], True, (WANTS_OLD, WANTS_BROKEN)),
        (
            [{"Status": "Enabled", "Filter": {"Tag": {"Key": "a", "Value": "b"}}, **OLD}],
            True,
            (WANTS_OLD, WANTS_BROKEN),
        ),
        (
            [
                {"Status": "Enabled", "Filter": {}, "NoncurrentVersionExpiration": {"NewerNoncurrentVersions": 3}},
                {"Status": "Enabled", "Filter": {}, **BROKEN},
            ],
            True,
            (WANTS_OLD,),
        ),
    ],
)
def test_a_rule_counts_that_is_for_all_below_the_jobs(rules, versioned, lacking):
    assert lacking_rules(rules, "team/jobs/", versioned=versioned) == lacking


def test_a_bucket_of_the_users_own_that_keeps_what_is_deleted_is_told_with_the_rule_to_set(lab: Lab):
    s3 = lab.client("s3")
    s3.create_bucket(Bucket="mine")
    assert what_stays(Aws(), "s3://mine/team") == (
        "warning: the bucket mine keeps what came of uploads that broke off for ever, and it is charged: give it a"
        f" lifecycle rule for team/jobs/ with {WANTS_BROKEN} (gpucloud docs money)"
    )
    s3.put_bucket_versioning(Bucket="mine", VersioningConfiguration={"Status": "Enabled"})
    told = what_stays(Aws(), "s3://mine/team") or ""
    assert "mine keeps each checkpoint that is deleted and what came of uploads that broke off for ever" in told
    assert f" for team/jobs/ with {WANTS_OLD} and {WANTS_BROKEN} " in told
    rule = {"ID": "gpucloud", "Status": "Enabled", "Filter": {"Prefix": "team/jobs/"}, **OLD, **BROKEN}
    s3.put_bucket_lifecycle_configuration(Bucket="mine", LifecycleConfiguration={"Rules": [rule]})
    assert what_stays(Aws(), "s3://mine/team") is None
    lab.faults.add("GetBucketVersioning", code="AccessDenied", status=403, times=9)
    assert what_stays(Aws(), "s3://mine") is None


def test_the_accounts_own_bucket_lacks_no_rule(lab: Lab):
    assert what_stays(Aws(), f"s3://{ensure_bucket(Aws(), 'us-east-1')}") is None
