"""The node record: what it holds, where a machine must stop, and that it comes back as it was written."""

from __future__ import annotations

import pytest

from gpucloud.domain.codec import Malformed, to_json
from gpucloud.domain.job.data import DataWanted
from gpucloud.domain.job.spec import ContainerRuntime
from gpucloud.domain.node.bootstrap.wanted import (
    Left,
    NodeRecord,
    StoredCode,
    StoredPackage,
    Wanted,
    code_key,
    first_left,
    package_key,
    parse_record,
    record_key,
    without_secrets,
)
from gpucloud.domain.node.container import ImageWanted


def wanted(**changes: object) -> Wanted:
    plain = {"package": "ab", "code": "", "setup": None, "setup_digest": "d", "env": (), "torchrun": True, "gpus": 1}
    return Wanted(**{**plain, "asks_for_gpus": True, **changes})  # type: ignore[arg-type]


def data(source: str) -> DataWanted:
    return DataWanted(key="k", source=source, target="/data", content="c", size=3, packed=b"\x00\xff packed")


def image(login: str | None) -> ImageWanted:
    return ImageWanted(reference="r.example.com/i:1", runtime=ContainerRuntime.AUTO, login=login)


CASES = [
    (wanted(), (), True, None),
    (wanted(), ("HF_TOKEN",), True, None),
    (wanted(setup="pip install x"), (), True, None),
    (wanted(setup="pip install x"), ("HF_TOKEN",), True, "setup"),
    (wanted(conda="env.yml"), ("HF_TOKEN",), True, "setup"),
    (wanted(setup="pip install x"), (), False, "setup"),
    (wanted(boto3=True), (), False, None),
    (wanted(boto3=True), ("HF_TOKEN",), True, None),
    (wanted(boto3=True), ("PIP_INDEX_URL",), True, "setup"),
    (wanted(), ("PIP_INDEX_URL",), True, None),
    (wanted(image=image(None)), ("HF_TOKEN",), True, None),
    (wanted(image=image("me:pa55")), ("LOGIN",), True, "image"),
    (wanted(data=(data("s3://b/p"),)), ("HF_TOKEN",), True, None),
    (wanted(data=(data("s3://b/p"),)), ("AWS_SECRET_ACCESS_KEY",), True, "data"),
    (wanted(data=(data("s3://b/p"), data("/home/me/set"))), (), True, "data"),
    (wanted(setup="x", data=(data("/home/me/set"),)), ("T",), True, "setup"),
]


@pytest.mark.parametrize(("want", "secrets", "has_code", "step"), CASES)
def test_a_machine_stops_before_what_it_cannot_do_alone(
    want: Wanted, secrets: tuple[str, ...], has_code: bool, step: str | None
) -> None:
    left = first_left(want, frozenset(secrets), has_code=has_code)
    assert (left.step if left else None) == step


def test_the_reason_names_the_secrets() -> None:
    left = first_left(wanted(setup="pip install x"), frozenset({"B_KEY", "A_KEY"}), has_code=True)
    assert left == Left(step="setup", why="`setup:` may use A_KEY, B_KEY, and secrets are not in the store")


def test_secrets_are_taken_out() -> None:
    full = wanted(env=(("EPOCHS", "3"), ("TOKEN", "s3cret")), image=image("me:pa55"))
    bare = without_secrets(full, frozenset({"TOKEN"}))
    assert bare.env == (("EPOCHS", "3"),)
    assert bare.image == image(None)
    assert "s3cret" not in to_json(bare)
    assert "pa55" not in to_json(bare)


def record(version: int = 1) -> NodeRecord:
    return NodeRecord(
        version=version,
        login="ubuntu",
        package=StoredPackage(key=package_key("gpucloud-d", "ab"), sha256="ab"),
        code=StoredCode(key=code_key("d", "cd"), tree="cd"),
        wanted=wanted(data=(data("s3://b/p"),)),
    )


def test_a_record_comes_back_as_it_was_written_packed_data_included() -> None:
    assert parse_record(to_json(record())) == record()
    assert record().wanted.data[0].packed == b"\x00\xff packed"


def test_a_record_of_another_version_is_refused() -> None:
    with pytest.raises(Malformed, match="a node record of version 2; this gpucloud knows 1"):
        parse_record(to_json(record(2)))


def test_base64_that_is_none_is_refused() -> None:
    torn = to_json(record()).replace('"packed":"', '"packed":"*')
    with pytest.raises(Malformed, match=r"NodeRecord.wanted.data\[0\].packed: expected base64"):
        parse_record(torn)


def test_keys_are_below_the_cluster_and_the_job() -> None:
    assert record_key("gpucloud-d") == "clusters/gpucloud-d/node.json"
    assert package_key("gpucloud-d", "ab") == "clusters/gpucloud-d/gpucloud-ab.zip"
    assert code_key("d", "cd") == "jobs/d/control/code/cd"
