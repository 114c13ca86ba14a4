"""What `doctor` says of a job's machines, and of AWS where nobody set credentials up."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest

from gpucloud.cli.commands import machines
from gpucloud.domain.errors import UsageError
from gpucloud.domain.node.gate.report import Checked, Report, fail
from gpucloud.domain.node.hardware import Gpu
from gpucloud.domain.node.node import NodeState
from gpucloud.usecases.machines import Examined, aws_check, examine
from gpucloud.wiring.found import _has_credentials
from tests.unit.worlds import node, state

GPU = Gpu(index=0, uuid="GPU-1", name="NVIDIA L4", memory_mib=23034, driver="570.172.08")
FIT = Checked(report=Report(at=datetime(2026, 11, 21, tzinfo=timezone.utc), gpus=(GPU,)), findings=())
BROKEN = replace(FIT, findings=(fail("count", "0 GPUs, 1 expected", "replace the machine"),))
UP, BOOTS = node("a"), replace(node("b"), state=NodeState.PENDING, address="")
BOOTING = Examined(node=BOOTS, error="it is still being started", is_up=False)


def doctor(monkeypatch, found, *, as_json, full=False):
    closed = []
    services = SimpleNamespace(shell=SimpleNamespace(close=lambda: closed.append(True)))
    cloud = SimpleNamespace(
        machine_key=lambda _: None,
        ordered=lambda _: SimpleNamespace(newest=lambda: None),
        services=lambda *_args, **_: services,
    )
    monkeypatch.setattr(machines, "Gpucloud", lambda: cloud)
    monkeypatch.setattr(machines, "known_job", lambda *_: SimpleNamespace(name="digits"))
    monkeypatch.setattr(machines, "asker_of", lambda *_: SimpleNamespace(state=state))
    monkeypatch.setattr(machines, "access_to", lambda *_: SimpleNamespace(require_key=lambda _: None))
    monkeypatch.setattr(machines, "examine", lambda *_, **__: found)
    return machines.doctor("digits", full=full, as_json=as_json)


@pytest.mark.parametrize(
    ("found", "fit", "code"),
    [
        ((Examined(node=UP, checked=FIT),), True, 0),
        ((Examined(node=UP, checked=FIT), BOOTING), None, 14),
        ((Examined(node=UP, checked=BROKEN), BOOTING), False, 14),
        ((Examined(node=UP, error="a does not answer"),), False, 14),
    ],
)
def test_a_job_is_called_fit_only_where_all_its_machines_were_looked_at(monkeypatch, capsys, found, fit, code):
    assert doctor(monkeypatch, found, as_json=True) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["fit"] is fit
    assert [(one["id"], one["error"]) for one in answer["nodes"]] == [(one.node.id, one.error) for one in found]


def test_machines_that_are_still_being_started_are_named_and_what_a_quick_look_leaves_out_is_told(monkeypatch, capsys):
    found = (Examined(node=UP, checked=FIT), BOOTING)
    doctor(monkeypatch, found, as_json=False)
    said = capsys.readouterr()
    assert said.out.endswith(f"b ({BOOTS.pool.instance_type})\nnot examined: it is still being started\n")
    assert said.err == "compute, memory and NVLink were not tried: gpucloud doctor digits --full\n"
    doctor(monkeypatch, found, as_json=False, full=True)
    assert capsys.readouterr().err == ""


def test_without_a_machine_that_is_up_none_is_examined(monkeypatch):
    with pytest.raises(UsageError, match="has no machine that is up: 1 is still being started"):
        doctor(monkeypatch, (BOOTING,), as_json=True)


def test_a_machine_without_a_host_key_is_not_asked():
    unknown = replace(UP, host_key=None)
    group = SimpleNamespace(describe=lambda _: SimpleNamespace(alive=(unknown, BOOTS)))
    services = SimpleNamespace(group=group, shell=nullcontext())
    assert examine(services, state(), full=False) == (replace(BOOTING, node=unknown), BOOTING)


def test_where_nothing_is_set_up_for_aws_a_machines_own_role_is_said_to_be_unasked(monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    assert not _has_credentials()
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/v2/credentials")  # ECS, CodeBuild
    assert _has_credentials()
    monkeypatch.delenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
    (tmp_path / "config").write_text("[default]\n")
    assert _has_credentials()

    told = aws_check(None)
    assert (told.ok, told.text) == (
        None,
        "no credentials are set up here, and a machine's own role is not asked; needed for cloud: aws only",
    )
