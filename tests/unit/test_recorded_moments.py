"""The recording of moments on the embedded fleet: it is read whole, or said to be of another form."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from gpucloud.domain import codec
from tests.prove import moments
from tests.prove.one_decision import expected


def test_recording_of_another_version_names_the_command_that_remakes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "old.jsonl.gz"
    with gzip.open(old, "wt") as file:
        file.write(codec.to_json(moments.CapacityChoice(order_version=0, state_version=1)) + "\n")
    monkeypatch.setattr(moments, "RECORDED", old)
    with pytest.raises(ValueError, match="GPUCLOUD_PROVE_RECORD=1"):
        moments.of_fleet()


def test_recording_names_no_folder_and_nobody_of_the_machine_that_made_it() -> None:
    for moment in moments.of_fleet():
        assert moment.order.by == "me@here"
        assert moment.order.resolved.code == Path("/job/code")
        assert moment.snapshot.state.owner is None


def test_table_has_no_line_for_what_nobody_knows() -> None:
    assert expected("over | outside") == {"Done"}
    assert expected("to end | machine of AWS") == {"Done"}
    assert expected("asleep | outside") is None
