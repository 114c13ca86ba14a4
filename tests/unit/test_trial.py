"""Trials: two short jobs out of one, and what the script is told."""

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.adapters.scripts import imports_resume
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job import Job
from gpucloud.domain.trial import Trial, read_trial
from gpucloud.usecases.trials import two_jobs

JOB = Job(name="digits", run="train.py", budget_usd=Decimal(3), source=Path("/j.yaml"), code=Path("/c"), outputs=("o",))


def test_both_runs_together_stay_inside_the_budget_and_bring_nothing_home():
    calm, killed = two_jobs(JOB, 8, token="ab12")
    assert (calm.name, calm.trial, calm.budget_usd, calm.outputs) == ("digits-ab12-calm", "8", Decimal("1.5"), ())
    assert (killed.name, killed.trial, killed.budget_usd) == ("digits-ab12-killed", "8:5", Decimal("1.5"))
    assert (killed.checkpoint.every_steps, killed.checkpoint.keep) == (2, 8)


@pytest.mark.parametrize("steps", range(4, 40))
def test_the_step_of_the_kill_comes_after_a_save_is_lost_and_has_steps_after_it(steps):
    trial = read_trial(two_jobs(JOB, steps)[1].trial)
    assert 2 < trial.killed_at < steps
    assert trial.killed_at % 2 == 1


def test_a_long_name_is_shortened_to_what_a_job_may_be_called():
    calm, killed = two_jobs(replace(JOB, name="a" * 40), 8)
    assert (len(calm.name), len(killed.name)) == (40, 40)


@pytest.mark.parametrize("steps", [0, 3, 1001])
def test_too_few_or_too_many_steps_are_refused(steps):
    with pytest.raises(UsageError, match="prove nothing"):
        two_jobs(JOB, steps)


@pytest.mark.parametrize(("text", "trial"), [("", None), ("8", Trial(steps=8)), ("8:5", Trial(steps=8, killed_at=5))])
def test_a_trial_is_read_as_it_was_written(text, trial):
    assert read_trial(text) == trial
    assert str(trial or "") == text


@pytest.mark.parametrize("text", ["x", "8:x", ":5", "-1"])
def test_other_words_are_refused(text):
    with pytest.raises(UsageError, match="no trial"):
        read_trial(text)


@pytest.mark.parametrize(
    ("text", "imports"),
    [
        ("import gpucloud.resume as resume\n", True),
        ("def f():\n    from gpucloud import resume\n", True),
        ("from gpucloud.resume import init\n", True),
        ("# see gpucloud.resume\nimport torch\n", False),
    ],
)
def test_whether_a_script_uses_the_library_is_seen_in_its_code(tmp_path, text, imports):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "train.py").write_text(text)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "other.py").write_text("import gpucloud.resume\n")
    assert imports_resume(tmp_path) is imports
