"""A job's SSH key opens its own machines only; the key that the user named is in no store and on no machine."""

from __future__ import annotations

import stat
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_ssh_private_key,
)

from gpucloud.adapters.home import Home
from gpucloud.adapters.keys import derive_key, generate_key
from gpucloud.domain.errors import CredentialsError
from gpucloud.domain.job.spec import KnownJob, Market
from gpucloud.domain.offer import Pool
from gpucloud.usecases.job.ordered import Access
from gpucloud.usecases.supervise.agents import NodeRecords
from gpucloud.usecases.supervise.needs import JobData
from gpucloud.usecases.supervise.prepare import Bootstrapper
from gpucloud.wiring import Gpucloud
from tests.unit.worlds import state


def text_of(key, how=PrivateFormat.OpenSSH, encryption=None):
    return key.private_bytes(Encoding.PEM, how, encryption or NoEncryption())


def derived(source, name, folder):
    derive_key(source, name, folder / name)
    return generate_key(folder / name)


def test_each_cluster_has_a_key_of_its_own_and_the_same_one_everywhere(tmp_path):
    own = tmp_path / "id_ed25519"
    generate_key(own)

    here = {derived(own, name, tmp_path / "here") for name in ("a", "b", "c")}
    there = {derived(own, name, tmp_path / "there") for name in ("a", "b", "c")}

    assert here == there
    assert len(here | {generate_key(own)}) == 4
    assert stat.S_IMODE((tmp_path / "here" / "a").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "here").stat().st_mode) == 0o700


def test_a_key_that_is_there_is_not_written_again_unless_it_is_another_or_others_may_read_it(tmp_path):
    for name in ("one", "two"):
        generate_key(tmp_path / name)
    derive_key(tmp_path / "one", "a", tmp_path / "a")
    first = (tmp_path / "a").stat().st_ino
    derive_key(tmp_path / "one", "a", tmp_path / "a")
    assert (tmp_path / "a").stat().st_ino == first  # as on a full disk it must be
    (tmp_path / "a").chmod(0o644)
    derive_key(tmp_path / "one", "a", tmp_path / "a")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    before = generate_key(tmp_path / "a")
    derive_key(tmp_path / "two", "a", tmp_path / "a")
    assert generate_key(tmp_path / "a") != before


def test_a_key_written_another_way_is_the_same_key(tmp_path):
    key = Ed25519PrivateKey.generate()
    (tmp_path / "one").write_bytes(text_of(key))
    (tmp_path / "two").write_bytes(text_of(key, PrivateFormat.PKCS8).strip())

    assert derived(tmp_path / "one", "a", tmp_path / "x") == derived(tmp_path / "two", "a", tmp_path / "y")


def test_another_kind_of_key_serves_too(tmp_path):
    (tmp_path / "ec").write_bytes(text_of(generate_private_key(SECP256R1())))

    assert derived(tmp_path / "ec", "a", tmp_path / "x").startswith("ssh-ed25519 ")


def test_another_named_key_gives_another_cluster_key(tmp_path):
    generate_key(tmp_path / "one")
    generate_key(tmp_path / "two")

    assert derived(tmp_path / "one", "a", tmp_path / "x") != derived(tmp_path / "two", "a", tmp_path / "x")


def test_a_named_key_that_is_missing_is_said_and_never_made(tmp_path):
    with pytest.raises(CredentialsError, match="there is no file") as caught:
        derive_key(tmp_path / "new" / "key", "a", tmp_path / "a")

    assert "ssh-keygen" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [b"rubbish", text_of(Ed25519PrivateKey.generate(), encryption=BestAvailableEncryption(b"x"))],
    ids=["rubbish", "with a passphrase"],
)
def test_a_key_that_cannot_be_read_is_said(tmp_path, text):
    (tmp_path / "key").write_bytes(text)

    with pytest.raises(CredentialsError, match="without a passphrase"):
        derive_key(tmp_path / "key", "a", tmp_path / "a")


@pytest.mark.parametrize("named", [True, False])
def test_no_object_of_a_self_driving_job_holds_the_users_key(tmp_path, monkeypatch, named):
    own = tmp_path / "id_ed25519"
    generate_key(own)
    monkeypatch.delenv("GPUCLOUD_SSH_KEY", raising=False)
    if named:
        monkeypatch.setenv("GPUCLOUD_SSH_KEY", str(own))
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "job.yaml").write_text("name: digits\nbudget: 1USD\nrun: train.py\n")
    (tmp_path / "code" / "train.py").write_text("")
    cloud = Gpucloud(Home(tmp_path / "home"))
    job = replace(cloud.read_job(tmp_path / "code" / "job.yaml"), store=str(tmp_path / "store"))
    world = cloud.services(job, "digits", unattended=timedelta(hours=8))

    data = JobData(job=job, jobs=world.jobs, sets=None, story=print)
    bootstrapper = Bootstrapper(
        services=world, watcher=None, pool=None, syncs=None, data=data, records=None, agent_writer=None
    )

    pool = Pool(instance_type="local.p3.2xlarge", zone="us-east-2a", market=Market.SPOT)
    NodeRecords(world).publish(bootstrapper.needs, pool, None, lambda _: None)

    stored = [path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()]
    raw = load_ssh_private_key(own.read_bytes(), password=None).private_bytes_raw()
    drive = world.key
    assert any(b'"key":' in data for data in stored)  # the order, with the cluster's own key
    assert drive != own.read_bytes()
    for data in stored:
        assert own.read_bytes() not in data
        assert raw not in data
        assert own.read_text().splitlines()[2].encode() not in data
    assert world.public_key != generate_key(own)


def test_a_machine_without_the_key_says_so_before_anything_else(tmp_path, monkeypatch):
    monkeypatch.delenv("GPUCLOUD_SSH_KEY", raising=False)
    cloud = Gpucloud(Home(tmp_path / "home"))
    known = KnownJob(name="digits", store=str(tmp_path / "store"), file=tmp_path / "job.yaml")
    here = SimpleNamespace(known=known, host=lambda: "", orders=SimpleNamespace(clock=cloud.clock))
    access = Access(
        ordered=here, key=lambda: cloud.machine_key(known), services=cloud.services, fleet_elsewhere=lambda _: None
    )

    with pytest.raises(CredentialsError, match="SSH key is not here"):
        access.require_key(state())

    monkeypatch.setenv("GPUCLOUD_SSH_KEY", str(tmp_path / "missing"))
    with pytest.raises(CredentialsError, match="SSH key is not here"):
        access.require_key(state())

    generate_key(tmp_path / "missing")
    access.require_key(state())
