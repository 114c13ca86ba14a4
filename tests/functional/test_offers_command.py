"""`gpucloud offers` as it is called: without an account, without a network, and with a job file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpucloud.__main__ import main

JOB = """
name: look
cloud: aws
resources: {gpus: 8, gpu: H100, market: spot, regions: [us-west-2]}
run: "true"
budget: 5 USD
"""


class Shell:
    """Runs command lines in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """Return the exit code, the answer and the story."""
        self._monkeypatch.setattr("sys.argv", ["gpucloud", "offers", *words])
        with pytest.raises(SystemExit) as left:
            main()
        told = self._capsys.readouterr()
        return int(left.value.code or 0), told.out, told.err


@pytest.fixture
def offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("GPUCLOUD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return Shell(monkeypatch, capsys)


def test_without_credentials_the_packages_prices_are_shown_with_their_age(offers: Shell):
    code, answer, story = offers("--gpu", "H100", "--gpus", "8", "--region", "us-east-1")
    assert code == 0
    assert [line.split()[0] for line in answer.splitlines()] == ["machine", "p5.48xlarge"]
    assert "spot prices are not those of now: cannot log in to AWS" in story
    assert "on demand: list prices of 2026-07-20 (" in story
    assert "as AWS's Spot Instance advisor had them on 2025-06-28 (" in story


def test_offline_nobody_is_asked(offers: Shell):
    code, answer, story = offers("--offline", "--json", "--nvlink", "--sort", "tflops-price")
    listed = json.loads(answer)
    assert (code, listed["version"]) == (0, 1)
    assert {one["gpu"] for one in listed["offers"]} == {"V100", "A100", "H100", "H200", "B200", "B300"}
    assert "cannot log in" not in story


def test_a_jobs_resources_are_asked_for_and_options_win(offers: Shell, tmp_path: Path):
    (tmp_path / "look.yaml").write_text(JOB)
    _, answer, _ = offers("look.yaml", "--offline", "--json")
    asked = json.loads(answer)["query"]
    assert (asked["gpu"], asked["gpus"], asked["market"], asked["regions"]) == (["H100"], 8, "spot", ["us-west-2"])
    _, answer, _ = offers("look.yaml", "--offline", "--json", "--gpu", "a100", "--market", "auto")
    asked = json.loads(answer)["query"]
    assert (asked["gpu"], asked["gpus"], asked["market"], asked["regions"]) == (["A100"], 8, "auto", ["us-west-2"])


def test_the_table_is_as_long_as_is_asked(offers: Shell):
    _, answer, story = offers("--offline", "--limit", "3")
    assert len(answer.splitlines()) == 4
    assert "more: --limit 0 lists all" in story
    _, answer, story = offers("--offline", "--limit", "0", "--region", "us-east-1")
    assert len(answer.splitlines()) == 65
    assert "more:" not in story


def test_machines_that_jobs_do_not_run_on_come_last_and_say_why(offers: Shell):
    _, answer, _ = offers("--offline", "--limit", "0", "--region", "us-east-1")
    last = [line.split() for line in answer.splitlines()[-11:]]
    assert {line[0].split(".")[0] for line in last} == {"g5g", "g6f", "gr6f"}
    assert all(line[-1] in {"arm64", "GPU"} for line in last)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpu", "H10"), "the catalog has no GPU 'H10'\nhint: did you mean H100?"),
        (("--region", "us-west2"), "the catalog has no region 'us-west2'\nhint: did you mean us-west-2?"),
        (("--max-price", "cheap"), 'is not a sum of money: write it like "20 USD" or "0.5 USD"'),
        (("none.yaml",), "there is no file none.yaml"),
    ],
)
def test_what_is_not_understood_is_said_in_one_error(offers: Shell, words: tuple[str, ...], said: str):
    code, answer, story = offers("--offline", *words)
    assert (code, answer) == (2, "")
    assert said in story


def test_nothing_that_fits_is_an_answer_too(offers: Shell):
    code, answer, story = offers("--offline", "--gpu", "H100", "--max-price", "1")
    assert (code, answer, story) == (0, "no machine in the catalog fits\n", "")
