"""Every way of provisioning keeps the same promises; the fake that other tests use keeps them too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.ports import ClusterSpec, Provisioner
from tests.fakes.provisioner import FakeProvisioner
from tests.terraform import StandIn, terraform_over

SPEC = ClusterSpec(
    name="digits",
    region="local-1",
    zones=("local-1a", "local-1b"),
    node_type="cpu.2",
    market=Market.SPOT,
    tags=(("gpucloud:job", "digits"), ("project", "vision")),
    public_key="ssh-ed25519 AAAA",
    store="/somewhere/store",
)


class Rig(Protocol):
    """A provisioner, what it has made, and a way to make the cloud refuse."""

    provisioner: Provisioner

    def clusters(self) -> dict[str, ClusterSpec]: ...

    def refuse(self, text: str | None) -> None: ...


class FakeRig:
    def __init__(self) -> None:
        self.provisioner = self.fake = FakeProvisioner()

    def clusters(self) -> dict[str, ClusterSpec]:
        return dict(self.fake.clusters)

    def refuse(self, text: str | None) -> None:
        self.fake.refusal = text


class TerraformRig:
    def __init__(self, folder: Path) -> None:
        self.stand_in = StandIn(folder)
        self.provisioner = terraform_over(self.stand_in)

    def clusters(self) -> dict[str, ClusterSpec]:
        return self.stand_in.clusters()

    def refuse(self, text: str | None) -> None:
        self.stand_in.refuse(text)


@pytest.fixture(params=["fake", "terraform"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return FakeRig() if request.param == "fake" else TerraformRig(tmp_path)


@pytest.fixture
def story() -> Callable[[str], None]:
    return [].append


def test_ensure_makes_what_was_asked_for_and_names_the_group(rig: Rig, story: Callable[[str], None]) -> None:
    assert rig.provisioner.ensure(SPEC, story=story) == "digits"
    assert rig.clusters() == {"digits": SPEC}


def test_ensure_may_be_repeated(rig: Rig, story: Callable[[str], None]) -> None:
    first = rig.provisioner.ensure(SPEC, story=story)
    assert rig.provisioner.ensure(SPEC, story=story) == first
    assert rig.clusters() == {"digits": SPEC}


def test_a_changed_setting_reaches_the_cloud(rig: Rig, story: Callable[[str], None]) -> None:
    rig.provisioner.ensure(SPEC, story=story)
    changed = replace(SPEC, node_type="cpu.4", tags=(("project", "speech"),))
    rig.provisioner.ensure(changed, story=story)
    assert rig.clusters() == {"digits": changed}


def test_clusters_do_not_touch_each_other(rig: Rig, story: Callable[[str], None]) -> None:
    other = replace(SPEC, name="words")
    rig.provisioner.ensure(SPEC, story=story)
    rig.provisioner.ensure(other, story=story)
    rig.provisioner.destroy("digits", story=story)
    assert rig.clusters() == {"words": other}


def test_destroy_removes_everything_and_may_be_repeated(rig: Rig, story: Callable[[str], None]) -> None:
    rig.provisioner.ensure(SPEC, story=story)
    rig.provisioner.destroy("digits", story=story)
    rig.provisioner.destroy("digits", story=story)
    assert rig.clusters() == {}


def test_destroying_what_was_never_made_is_no_error(rig: Rig, story: Callable[[str], None]) -> None:
    rig.provisioner.destroy("digits", story=story)
    assert rig.clusters() == {}


def test_the_clouds_own_words_reach_the_user_and_the_next_ensure_converges(
    rig: Rig, story: Callable[[str], None]
) -> None:
    rig.refuse("no address is free in 127.0.0.0/8")
    with pytest.raises(ProvisionError, match=r"no address is free in 127\.0\.0\.0/8") as caught:
        rig.provisioner.ensure(SPEC, story=story)
    assert caught.value.hint
    rig.refuse(None)
    assert rig.provisioner.ensure(SPEC, story=story) == "digits"
    assert rig.clusters() == {"digits": SPEC}


def test_a_destroy_that_fails_says_so_and_can_be_repeated(rig: Rig, story: Callable[[str], None]) -> None:
    rig.provisioner.ensure(SPEC, story=story)
    rig.refuse("the group still has a node")
    with pytest.raises(ProvisionError, match="the group still has a node"):
        rig.provisioner.destroy("digits", story=story)
    rig.refuse(None)
    rig.provisioner.destroy("digits", story=story)
    assert rig.clusters() == {}


def test_what_was_made_halfway_is_destroyed(rig: Rig, story: Callable[[str], None]) -> None:
    rig.refuse("halfway")
    with pytest.raises(ProvisionError):
        rig.provisioner.ensure(SPEC, story=story)
    rig.refuse(None)
    rig.provisioner.destroy("digits", story=story)
    assert rig.clusters() == {}
