from __future__ import annotations

import errno

import pytest

from gpucloud.agent.attempt import files
from gpucloud.agent.attempt.files import Inbox, Outbox
from gpucloud.domain.node.status import (
    AttemptStatus,
    Desired,
    Progress,
    RunState,
    Status,
    Stop,
    desired_to_json,
    status_from_json,
)


def status(step=None, epoch=1):
    progress = None
    if step is not None:
        progress = Progress(
            step=step, first_step=0, total_steps=None, loss=None, phase="train", committed_step=None,
            step_seconds=None, age_s=0.0,
        )  # fmt: skip
    attempt = AttemptStatus(
        attempt=1, state=RunState.RUNNING, outcome=None, exit_code=None, progress=progress, failed_rank=None
    )
    return Status(heartbeat=0, epoch=epoch, boot_id="b", notice=None, attempt=attempt)


def written(folder):
    return status_from_json((folder / "status.json").read_text())


def full_disk(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_news_is_written_at_once_and_nothing_new_only_as_a_heartbeat(tmp_path):
    outbox = Outbox(tmp_path, heartbeat_s=0.5)
    heartbeats = []
    for now_s, seen in [
        (0, status()),
        (0.01, status()),
        (0.02, status(epoch=2)),
        (0.3, status(epoch=2)),
        (0.6, status(epoch=2)),
    ]:
        outbox.publish(seen, now_s=now_s)
        heartbeats.append(written(tmp_path).heartbeat)
    assert heartbeats == [1, 1, 2, 2, 3]


def test_steps_are_written_ten_times_a_second_at_most(tmp_path):
    outbox = Outbox(tmp_path, heartbeat_s=10)
    for step in range(1000):  # one second of very short steps
        outbox.publish(status(step=step), now_s=step / 1000)
    assert 5 <= written(tmp_path).heartbeat <= 11


def test_the_beat_goes_on_where_an_earlier_agent_ended(tmp_path):
    Outbox(tmp_path).publish(status(), now_s=0)
    Outbox(tmp_path).publish(status(), now_s=0)
    assert written(tmp_path).heartbeat == 2


def test_on_a_full_disk_the_status_is_written_in_place(tmp_path, monkeypatch):
    outbox = Outbox(tmp_path)
    outbox.publish(status(), now_s=0)
    monkeypatch.setattr(files, "write_whole", full_disk)
    outbox.publish(status(step=1234567, epoch=2), now_s=1)
    assert written(tmp_path) == Status(
        heartbeat=2, epoch=2, boot_id="b", notice=None, attempt=status(step=1234567).attempt
    )


def test_a_full_disk_at_the_very_first_status_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "write_whole", full_disk)
    Outbox(tmp_path).publish(status(), now_s=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_full", [False, True])
def test_the_highest_epoch_is_obeyed_and_a_lower_one_is_not(tmp_path, monkeypatch, is_full):
    if is_full:
        monkeypatch.setattr(files, "write_whole", full_disk)
    inbox = Inbox(tmp_path)
    for epoch in (2, 7, 6):
        desired = Desired(epoch=epoch, launch=None, stop=Stop.NO, paid_until=None)
        (tmp_path / "desired.json").write_text(desired_to_json(desired) + " " * epoch)
        inbox.poll()
    assert (inbox.epoch, inbox.desired.epoch) == (7, 7)
    assert Inbox(tmp_path).epoch == (0 if is_full else 7)
