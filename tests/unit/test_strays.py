"""What is a stray and what is not, and when it may be removed: rules over values."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from gpucloud.domain.strays import Claim, Owner, Thing, claim, is_owned, ripe, sighted, strays
from tests.unit.worlds import NOW, POOL, state

OWNER = Owner(account="123456789012", store="s3://jobs")
TAGS = {
    "gpucloud:managed": "true",
    "gpucloud:cluster": "gpucloud-digits",
    "gpucloud:job": "digits",
    "gpucloud:store": "s3://jobs",
}


def thing(name="i-1", kind="instance", region="us-east-2", account="123456789012", **tags):
    tags = {key.replace("_", ":"): value for key, value in tags.items()}
    return Thing(kind=kind, id=name, account=account, region=region, tags=tuple({**TAGS, **tags}.items()))


def test_what_bears_every_tag_to_the_letter_and_is_no_living_jobs_is_a_stray():
    assert strays((thing(),), (), OWNER) == (thing(),)
    assert strays((thing(),), (Claim(cluster="gpucloud-digits", regions=None),), OWNER) == ()


@pytest.mark.parametrize(
    "other",
    [
        thing(account="210987654321"),
        thing(gpucloud_managed="True"),
        thing(gpucloud_managed=""),
        thing(gpucloud_store="s3://jobs/other"),
        thing(gpucloud_job="digit"),
        thing(gpucloud_cluster="digits"),
        thing(gpucloud_cluster="gpucloud-", gpucloud_job=""),
        thing(gpucloud_cluster="Gpucloud-digits"),
        replace(thing(), tags=(("gpucloud:cluster", "gpucloud-digits"),)),
        replace(thing(), tags=()),
        replace(thing(), tags=tuple((key.upper(), value) for key, value in TAGS.items())),
    ],
)
def test_a_look_alike_and_what_is_anothers_is_no_stray(other):
    assert not is_owned(other, OWNER)
    assert strays((other,), (), OWNER) == ()


def test_a_living_job_has_the_region_of_its_pool_and_of_its_group_and_no_other():
    moving = state(group="eu-west-1/gpucloud-digits", pool=replace(POOL, zone="us-east-2a"))
    living = claim("gpucloud-digits", moving, regional=True)

    assert living is not None
    assert [living.covers(thing(region=region)) for region in ("us-east-2", "eu-west-1", "us-west-2")] == [
        True, True, False,
    ]  # fmt: skip
    assert not living.covers(thing(gpucloud_cluster="gpucloud-digits-2"))


def test_a_job_that_is_torn_down_or_was_never_there_has_nothing():
    assert claim("gpucloud-digits", state(torn_down=True), regional=True) is None
    assert claim("gpucloud-digits", None, regional=True) is None


def test_a_stray_keeps_its_first_sighting_until_it_is_none_any_more():
    before = {thing().key: NOW - timedelta(hours=1), thing("i-2").key: NOW}

    assert sighted((thing(), thing("i-3")), before, NOW) == {
        thing().key: NOW - timedelta(hours=1),
        thing("i-3").key: NOW,
    }


def test_a_cluster_may_be_removed_when_all_of_it_was_seen_a_minute_ago():
    both, first = (thing("i-1"), thing("i-2")), {thing("i-1").key: NOW - timedelta(seconds=60)}

    assert ripe(both, {**first, thing("i-2").key: NOW - timedelta(seconds=59)}, NOW) == ()
    (found,) = ripe(both, {**first, thing("i-2").key: NOW - timedelta(seconds=60)}, NOW)
    assert (found.cluster, found.region, found.things) == ("gpucloud-digits", "us-east-2", both)


def test_a_sighting_in_the_future_is_one_of_now():
    later = {thing().key: NOW + timedelta(hours=1)}

    assert sighted((thing(),), later, NOW) == {thing().key: NOW}
