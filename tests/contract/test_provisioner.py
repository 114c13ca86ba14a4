"""Every way of provisioning keeps the same promises; the fake that other tests use keeps them too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from gpucloud.adapters.hosts.cloud import SshProvisioner
from gpucloud.adapters.hosts.group import Asking, SshNodeGroup
from gpucloud.adapters.hosts.records import Recollection
from gpucloud.domain.errors import ProvisionError
from gpucloud.domain.job.spec import Market
from gpucloud.ports import ClusterSpec, Provisioner
from gpucloud.store import open_store
from gpucloud.system.retries import SystemClock
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
    """A provisioner, and which of the groups `digits` and `words` are there."""

    provisioner: Provisioner

    def names(self) -> set[str]: ...


class MakingRig(Rig, Protocol):
    """A provisioner that makes something in a cloud, what it has made, and a way to make the cloud refuse."""

    def clusters(self) -> dict[str, ClusterSpec]: ...

    def refuse(self, text: str | None) -> None: ...


class FakeRig:
    def __init__(self) -> None:
        self.provisioner = self.fake = FakeProvisioner()

    def names(self) -> set[str]:
        return set(self.clusters())

    def clusters(self) -> dict[str, ClusterSpec]:
        return dict(self.fake.clusters)

    def refuse(self, text: str | None) -> None:
        self.fake.refusal = text


class TerraformRig:
    def __init__(self, folder: Path) -> None:
        self.stand_in = StandIn(folder)
        self.provisioner = terraform_over(self.stand_in)

    def names(self) -> set[str]:
        return set(self.clusters())

    def clusters(self) -> dict[str, ClusterSpec]:
        return self.stand_in.clusters()

    def refuse(self, text: str | None) -> None:
        self.stand_in.refuse(text)


class HostsRig:
    """Own hosts: nothing is made but a record, and no host is asked for an empty group."""

    def __init__(self, folder: Path) -> None:
        self.records = Recollection(open_store(str(folder / "store")), SystemClock())
        group = SshNodeGroup(self.records, Asking(lambda: pytest.fail("a host was asked")), lambda: ())
        self.provisioner = SshProvisioner(self.records, group)

    def names(self) -> set[str]:
        return {name for name in ("digits", "words") if self.records.read(name) is not None}


def fake(folder: Path) -> MakingRig:
    del folder
    return FakeRig()


MAKING = [fake, TerraformRig]


@pytest.fixture(params=[*MAKING, HostsRig], ids=["fake", "terraform", "hosts"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return request.param(tmp_path)


@pytest.fixture(params=MAKING, ids=["fake", "terraform"])
def making(request: pytest.FixtureRequest, tmp_path: Path) -> MakingRig:
    return request.param(tmp_path)


@pytest.fixture
def story() -> Callable[[str], None]:
    return [].append


def test_ensure_names_the_group_which_is_then_there(rig: Rig, story: Callable[[str], None]) -> None:
    assert rig.provisioner.ensure(SPEC, story=story) == "digits"
    assert rig.names() == {"digits"}


def test_ensure_may_be_repeated(rig: Rig, story: Callable[[str], None]) -> None:
    first = rig.provisioner.ensure(SPEC, story=story)
    assert rig.provisioner.ensure(SPEC, story=story) == first
    assert rig.names() == {"digits"}


def test_what_was_asked_for_is_made_once(making: MakingRig, story: Callable[[str], None]) -> None:
    for _ in range(2):
        making.provisioner.ensure(SPEC, story=story)
        assert making.clusters() == {"digits": SPEC}


def test_a_changed_setting_reaches_the_cloud(making: MakingRig, story: Callable[[str], None]) -> None:
    making.provisioner.ensure(SPEC, story=story)
    changed = replace(SPEC, node_type="cpu.4", tags=(("project", "speech"),))
    making.provisioner.ensure(changed, story=story)
    assert making.clusters() == {"digits": changed}


def test_clusters_do_not_touch_each_other(rig: Rig, story: Callable[[str], None]) -> None:
    other = replace(SPEC, name="words")
    rig.provisioner.ensure(SPEC, story=story)
    rig.provisioner.ensure(other, story=story)
    rig.provisioner.destroy("digits", story=story)
    assert rig.names() == {"words"}


def test_destroy_removes_everything_and_may_be_repeated(rig: Rig, story: Callable[[str], None]) -> None:
    rig.provisioner.ensure(SPEC, story=story)
    rig.provisioner.destroy("digits", story=story)
    rig.provisioner.destroy("digits", story=story)
    assert rig.names() == set()


def test_destroying_what_was_never_made_is_no_error(rig: Rig, story: Callable[[str], None]) -> None:
    rig.provisioner.destroy("digits", story=story)
    assert rig.names() == set()


def test_the_clouds_own_words_reach_the_user_and_the_next_ensure_converges(
    making: MakingRig, story: Callable[[str], None]
) -> None:
    making.refuse("no address is free in 127.0.0.0/8")
    with pytest.raises(ProvisionError, match=r"no address is free in 127\.0\.0\.0/8") as caught:
        making.provisioner.ensure(SPEC, story=story)
    assert caught.value.hint
    making.refuse(None)
    assert making.provisioner.ensure(SPEC, story=story) == "digits"
    assert making.clusters() == {"digits": SPEC}


def test_a_destroy_that_fails_says_so_and_can_be_repeated(making: MakingRig, story: Callable[[str], None]) -> None:
    making.provisioner.ensure(SPEC, story=story)
    making.refuse("the group still has a node")
    with pytest.raises(ProvisionError, match="the group still has a node"):
        making.provisioner.destroy("digits", story=story)
    making.refuse(None)
    making.provisioner.destroy("digits", story=story)
    assert making.clusters() == {}


def test_what_was_made_halfway_is_destroyed(making: MakingRig, story: Callable[[str], None]) -> None:
    making.refuse("halfway")
    with pytest.raises(ProvisionError):
        making.provisioner.ensure(SPEC, story=story)
    making.refuse(None)
    making.provisioner.destroy("digits", story=story)
    assert making.clusters() == {}
