"""Trials: two short jobs out of one, and what the script is told."""

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from gpucloud.adapters.scripts import imports_resume
from gpucloud.cli.commands.verifying import hint_of, verdict_json, verdict_text
from gpucloud.domain.checkpoint.manifest import Commit
from gpucloud.domain.checkpoint.protection import LossGap, Outcome, Trial, Verdict, first_gap, judged, read_trial
from gpucloud.domain.errors import UsageError
from gpucloud.domain.job.spec import Job
from gpucloud.usecases.checkpoint.comparing import two_jobs

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
        ("from gpucloud.frameworks.huggingface import resumable\n", True),
        ("import gpucloud.frameworks.lightning\n", True),
        ("# see gpucloud.resume\nimport torch\n", False),
    ],
)
def test_whether_a_script_uses_the_library_is_seen_in_its_code(tmp_path, text, imports):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "train.py").write_text(text)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "other.py").write_text("import gpucloud.resume\n")
    assert imports_resume(tmp_path) is imports


NAN = float("nan")
GAP = LossGap(step=3, rank=1, calm=0.5, killed=0.25)


@pytest.mark.parametrize(
    ("calm", "killed", "gap"),
    [
        ({0: [1.0, 0.5], 1: [1.0, 0.5]}, {0: [1.0, 0.5], 1: [1.0, 0.5]}, None),
        ({0: [1.0, 0.5, 0.4], 1: [1.0, 0.5, 0.5]}, {0: [1.0, 0.5, 0.3], 1: [1.0, 0.5, 0.25]}, (3, 0)),
        ({0: [1.0, 0.5, 0.4], 1: [1.0, 0.5]}, {0: [1.0, 0.5, 0.3], 1: [1.0, 0.5000000000000001]}, (2, 1)),
        ({0: [NAN, None]}, {0: [NAN, None]}, None),
        ({0: [0.0]}, {0: [-0.0]}, (1, 0)),
        ({0: [None]}, {0: [0.5]}, (1, 0)),
        ({}, {}, None),
    ],
)
def test_the_first_loss_that_differs_in_any_bit_is_found_over_all_ranks(calm, killed, gap):
    found = first_gap(calm, killed)
    assert (found and (found.step, found.rank)) == gap


@pytest.mark.parametrize(
    ("parts", "gap", "outcome"),
    [
        ((), None, "equal"),
        (("model.w",), None, "different"),
        ((), GAP, "different"),
        (("model.w",), LossGap(step=2, rank=0, calm=1.0, killed=2.0), "not_deterministic"),
    ],
)
def test_a_loss_that_differs_counts_as_the_state_does(parts, gap, outcome):
    assert judged(4, parts, gap, Commit(1, 2)) == outcome
    assert judged(4, parts, gap, None) is Outcome.NOT_RESUMED


def test_what_differs_is_told_with_the_first_loss_and_a_hint():
    parts = tuple(f"model.{n}" for n in range(12))
    verdict = Verdict(outcome=Outcome.DIFFERENT, step=4, resumed_from=2, compared=40, parts=parts, loss=GAP)
    first, gap = verdict_text(verdict).splitlines()
    assert first == (
        "not equal: resumed from step 2; step 4 is the first saved one that differs, in 12 of 40 parts:"
        " model.0 and 11 more of its kind"
    )
    assert gap == "the loss differs from step 3 on: 0.5 undisturbed, 0.25 resumed (rank 1)"
    assert "resume.init()" in hint_of(verdict)
    assert verdict_json(verdict)["loss"] == {"step": 3, "rank": 1, "calm": 0.5, "killed": 0.25}


def test_generators_that_differ_are_told_in_one_line_and_each_in_json():
    parts = tuple(f"rank {rank}: randomness.{name}" for rank in range(5) for name in ("torch", "python.0", "python.1"))
    parts = ("model.w", *parts, "optimizer.a", "optimizer.b", "epoch", "rank 1: loader.at")
    verdict = Verdict(outcome=Outcome.DIFFERENT, step=4, resumed_from=2, compared=40, parts=parts)
    assert verdict_text(verdict).partition("parts: ")[2] == (
        "model.w, the random generators of rank 0, 1, 2, … (torch, python), optimizer.a and 1 more of its kind, 2 more"
    )
    assert verdict_json(verdict)["different"] == list(parts)


@pytest.mark.parametrize(
    ("outcome", "parts", "says", "hinted"),
    [
        ("equal", (), "equal: killed and resumed from step 2, all 40 parts of the state at step 8", None),
        ("different", (), "at step 8 are the same to the bit, but not every loss is", "resume.init"),
        ("not_deterministic", (), "before the resume from step 2 already; all 40 parts", "use_deterministic"),
        ("not_deterministic", ("w",), "the state at step 8 differs in 1 of 40 parts: w", "use_deterministic"),
        ("not_resumed", (), "ended after step 8, before it was killed", "--verify-steps"),
    ],
)
def test_every_verdict_is_a_sentence(outcome, parts, says, hinted):
    verdict = Verdict(outcome=Outcome(outcome), step=8, resumed_from=2, compared=40, parts=parts)
    assert says in verdict_text(verdict)
    assert (hinted or "") in (hint_of(verdict) or "")
    assert (hint_of(verdict) is None) == (hinted is None)
