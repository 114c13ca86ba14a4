"""The pipelines in `templates/ci` do what they say: without a cloud, on recorded answers."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gpucloud.adapters.keys import KeyRing, generate_key
from tests.unit.real_commands import read_as_typed

CI = Path(__file__).resolve().parents[2] / "templates" / "ci"
GITHUB, GITLAB = CI / "github-actions.yml", CI / "gitlab-ci.yml"

ANSWER = {
    "version": 1,
    "job": "digits-2",
    "status": "succeeded",
    "exit_reason": "succeeded",
    "message": None,
    "supervisor": None,
    "signed_by": "own",
    "attempts": [
        {"number": 1, "reason": "interrupted", "first_step": 1, "last_step": 157, "started_at": "", "ended_at": ""},
        {"number": 2, "reason": "succeeded", "first_step": 158, "last_step": 330, "started_at": "", "ended_at": ""},
    ],
    "interruptions": [
        {"node": "i-0dae", "kind": "notice", "attempt": 1, "noticed_at": "", "resumed_at": ""},
        {"node": "i-0daf", "kind": "notice", "attempt": None, "noticed_at": "", "resumed_at": None},
    ],
    "last_step": 330,
    "missing_outputs": [
        {"path": "metrics/", "why": "is not there", "nearest": "metric", "brought_by": None},
        {
            "path": "*.pt",
            "why": "came without a.pt, which leads elsewhere or is no file",
            "nearest": None,
            "brought_by": None,
        },
    ],
    "checkpoint": {"step": 330, "sha256": "d9e9"},
    "spend": {
        "spent_usd": "0.3712",
        "promised_usd": "0",
        "left_usd": "3.6288",
        "budget_usd": "4",
        "forecast_usd": None,
    },
    "paid_until": None,
    "nodes": [],
}
TABLE = """\
| gpucloud | |
|---|---|
| job | digits-2 |
| result | succeeded |
| spent | 0.3712 USD of 4 USD |
| left | 3.6288 USD |
| attempts | 2, interrupted 1 times |
| last step | 330 |
| machines alive | none |
| missing output | metrics/ is not there; nearest: metric |
| missing output | *.pt came without a.pt, which leads elsewhere or is no file |
"""
REFUSED = {
    "version": 1,
    "error": {
        "code": "budget",
        "exit_code": 10,
        "message": "the budget | is\ntoo small",
        "hint": None,
        "problems": [],
    },
}
REFUSED_TABLE = """\
| gpucloud | |
|---|---|
| result | failed |
| message | the budget \\| is too small |
"""
NO_ANSWER_TABLE = """\
| gpucloud | |
|---|---|
| result | failed |
| message | no answer: see the log of the run |
"""


def github():
    return yaml.safe_load(GITHUB.read_text())


def gitlab():
    return yaml.safe_load(GITLAB.read_text())


def github_steps():
    return [step for job in github()["jobs"].values() for step in job["steps"]]


def scripts():
    """Return every piece of shell, with where it stands."""
    found = [(f"github {step.get('name')}", step["run"]) for step in github_steps() if "run" in step]
    for name, job in gitlab().items():
        if isinstance(job, dict):
            pieces = [piece for part in ("before_script", "script", "after_script") for piece in job.get(part, ())]
            found += [(f"gitlab {name} {number}", piece) for number, piece in enumerate(pieces)]
    return found


def commands():
    """Return every call of gpucloud that a pipeline makes or names in a comment."""
    shell = [line.strip() for _, script in scripts() for line in script.splitlines()]
    called = [line for line in shell if line.startswith("gpucloud ")]
    named = re.findall(r"`(gpucloud [^`]+)`", GITHUB.read_text() + GITLAB.read_text())
    return [re.split(r" (?:\|\||>|#) ", line.replace("   #", " #"))[0].strip() for line in called] + named


def run_shell(script, folder, environment):
    # The pipelines' `python` is the one that runs this.
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    if not (programs / "python").exists():
        (programs / "python").symlink_to(sys.executable)
    path = f"{programs}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env={"PATH": path, "JOB_FILE": "gpucloud.yaml", **environment},
        capture_output=True,
        text=True,
    )


def stand_in(folder, **codes):
    """Put a `gpucloud` on the path that answers each command with a code, and writes down what it was asked."""
    programs = folder / "programs"
    programs.mkdir()
    cases = "".join(f"{command}) exit {code} ;;\n" for command, code in codes.items())
    program = programs / "gpucloud"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> asked\n[ "$1" = status ] && cat answer\ncase "$1" in\n{cases}esac\nexit 0\n'
    )
    program.chmod(0o755)


def step(name):
    (found,) = [s["run"] for s in github_steps() if s.get("name") == name]
    return found


def train_of(where):
    return step("Train") if where == "github" else gitlab()["train"]["script"][0]


def down_of(where):
    return step("End what is left") if where == "github" else gitlab()["end"]["script"][0]


def reconcile_of(where):
    return step("Make one pass, if the job is not over") if where == "github" else gitlab()["reconcile"]["script"][0]


both = pytest.mark.parametrize("where", ["github", "gitlab"])


@pytest.mark.parametrize(("place", "script"), scripts())
def test_every_piece_of_shell_parses(place, script):
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)

    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.parametrize(("place", "script"), scripts())
def test_shellcheck_finds_nothing_where_it_is_installed(place, script):
    if shutil.which("shellcheck"):
        done = subprocess.run(
            ["shellcheck", "--shell=bash", "--severity=warning", "-"], input=script, capture_output=True, text=True
        )

        assert done.stdout == ""


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_every_command_is_one_that_gpucloud_has(line):
    read_as_typed(shlex.split(line)[1:])


def test_the_commands_are_found():
    assert {shlex.split(line)[1] for line in commands()} == {
        "train",
        "down",
        "status",
        "reconcile",
        "iam",
        "tools",
        "ci",
        "keys",
    }


def test_jobs_on_github_have_the_least_permissions():
    jobs = github()["jobs"]

    assert github()["permissions"] == {}
    assert jobs["train"]["permissions"] == {"id-token": "write", "contents": "read"}
    assert jobs["reconcile"]["permissions"] == {"id-token": "write", "contents": "read"}
    assert jobs["comment"]["permissions"] == {"pull-requests": "write"}


def test_a_fork_spends_nothing():
    assert "head.repo.full_name == github.repository" in github()["jobs"]["train"]["if"]
    assert "pull_request_target" not in GITHUB.read_text()


def test_every_action_is_pinned_by_commit():
    used = [s["uses"] for s in github_steps() if "uses" in s]

    assert used
    assert all(re.fullmatch(r"[a-z-]+/[a-z-]+@[0-9a-f]{40}", action) for action in used)


@pytest.mark.parametrize("file", [GITHUB, GITLAB])
def test_no_stored_key_of_aws_is_named(file):
    text = file.read_text()

    assert not re.search(r"secret_?access_?key|access_?key_?id|session_?token|AKIA", text, re.IGNORECASE)
    assert set(re.findall(r"secrets\.(\w+)", text)) == ({"GPUCLOUD_SSH_KEY"} if file == GITHUB else set())


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbg==\n-----END OPENSSH PRIVATE KEY-----\n"


def test_runners_on_github_take_the_key_that_they_share(tmp_path):
    takers = [s for s in github_steps() if s.get("name") == "Take the SSH key of every runner"]
    where = tmp_path / "gpucloud-key"

    done = run_shell(
        takers[0]["run"],
        tmp_path,
        {"SSH_KEY": KEY.rstrip(), "RUNNER_TEMP": str(tmp_path), "GITHUB_ENV": str(tmp_path / "env")},
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert takers[0] == takers[1]
    assert takers[0]["env"] == {"SSH_KEY": "${{ secrets.GPUCLOUD_SSH_KEY }}"}
    assert (tmp_path / "env").read_text() == f"GPUCLOUD_SSH_KEY={where}\n"
    assert where.read_text() == KEY
    assert where.stat().st_mode & 0o777 == 0o600


def test_a_runner_on_github_without_the_key_goes_on(tmp_path):
    (taker, _) = [s["run"] for s in github_steps() if s.get("name") == "Take the SSH key of every runner"]

    done = run_shell(taker, tmp_path, {"SSH_KEY": "", "RUNNER_TEMP": str(tmp_path), "GITHUB_ENV": "env"})

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "env").exists()


def test_runners_on_gitlab_take_the_key_that_they_share(tmp_path):
    (tmp_path / "given").write_text(KEY)
    where = tmp_path / "gpucloud-key"
    named = {"SSH_KEY": str(tmp_path / "given"), "GPUCLOUD_SSH_KEY": str(where)}

    done = run_shell(gitlab()[".gpucloud"]["before_script"][1], tmp_path, named)

    assert (done.returncode, done.stderr) == (0, "")
    assert where.read_text() == KEY
    assert where.stat().st_mode & 0o777 == 0o600


def test_a_runner_on_gitlab_without_the_key_goes_on(tmp_path):
    done = run_shell(
        gitlab()[".gpucloud"]["before_script"][1], tmp_path, {"GPUCLOUD_SSH_KEY": str(tmp_path / "gpucloud-key")}
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "gpucloud-key").exists()


def github_runner(tmp_path, key):
    """Return what a runner's step adds to the environment of `gpucloud`, beside that of the whole workflow."""
    (taker, _) = [s["run"] for s in github_steps() if s.get("name") == "Take the SSH key of every runner"]
    tmp_path.mkdir()
    run_shell(taker, tmp_path, {"SSH_KEY": key, "RUNNER_TEMP": str(tmp_path), "GITHUB_ENV": str(tmp_path / "env")})
    written = tmp_path / "env"
    return dict(line.split("=", 1) for line in written.read_text().splitlines()) if written.exists() else {}


def gitlab_runner(tmp_path, key):
    """Return what the shell of a job adds to the environment of `gpucloud`."""
    tmp_path.mkdir()
    (tmp_path / "given").write_text(key)
    named = {"SSH_KEY": str(tmp_path / "given")} if key else {}
    made = private(tmp_path, **named)
    run_shell(gitlab()[".gpucloud"]["before_script"][1], tmp_path, {**made, **named})
    return {"GPUCLOUD_SSH_KEY": made["GPUCLOUD_SSH_KEY"]} if "GPUCLOUD_SSH_KEY" in made else {}


@pytest.mark.parametrize("runner", [github_runner, gitlab_runner])
def test_runners_that_share_the_key_and_a_laptop_with_it_are_one_person_and_without_it_none_knows_the_other(
    tmp_path, runner
):
    key = tmp_path / "key"
    generate_key(key)
    first, second = (KeyRing(tmp_path / f"{n}home", runner(tmp_path / n, key.read_text())) for n in "ab")
    laptop = KeyRing(tmp_path / "laptop", {"GPUCLOUD_SSH_KEY": str(key)})
    strange, other = (KeyRing(tmp_path / f"{n}home", runner(tmp_path / n, "")) for n in "cd")
    signer = first.signer()

    for ring, knows in ((second, "own"), (laptop, "own"), (strange, None), (other, None)):
        assert ring.trust().verify(b"order", signer.key_id, signer.sign(b"order")) == knows
    assert strange.signer().key_id != other.signer().key_id
    trusting = KeyRing(tmp_path / "home", {"GPUCLOUD_TRUSTED_KEYS": f"{strange.signer().line} anna\n"})
    assert trusting.trust().verify(b"x", strange.signer().key_id, strange.signer().sign(b"x")) == "anna"


def test_runners_on_github_are_told_whom_they_trust_and_where_nobody_is_named_that_is_no_fault(tmp_path):
    assert github()["env"]["GPUCLOUD_TRUSTED_KEYS"] == "${{ vars.GPUCLOUD_TRUSTED_KEYS }}"
    assert KeyRing(tmp_path, {"GPUCLOUD_TRUSTED_KEYS": "", "GPUCLOUD_SSH_KEY": ""}).listed() == ()


@pytest.mark.parametrize("file", [GITHUB, GITLAB])
def test_what_a_scheduled_pass_brings_home_outlives_its_runner(file):
    if file == GITHUB:
        step = github()["jobs"]["reconcile"]["steps"][-1]
        assert (step["uses"].partition("@")[0], step["if"]) == ("actions/upload-artifact", "always()")
        assert step["with"]["path"] == "outputs/"
    else:
        assert gitlab()["reconcile"]["artifacts"] == {"when": "always", "paths": ["outputs/"]}


@pytest.mark.parametrize("file", [GITHUB, GITLAB])
def test_the_trust_policy_lets_one_branch_of_one_repository_in(file):
    lines = [line.removeprefix("#").removeprefix("      ") for line in file.read_text().splitlines() if "#" in line[:1]]
    text = "\n".join(lines)
    policy, _ = json.JSONDecoder().raw_decode(text[text.index('{\n  "Version"') :])
    (statement,) = policy["Statement"]
    subjects = {key: value for key, value in statement["Condition"]["StringEquals"].items() if key.endswith(":sub")}

    assert statement["Action"] == "sts:AssumeRoleWithWebIdentity"
    assert [*subjects.values()] in (
        ["repo:OWNER/REPOSITORY:ref:refs/heads/main"],
        ["project_path:GROUP/PROJECT:ref_type:branch:ref:main"],
    )
    assert len(statement["Condition"]["StringEquals"]) == 2


def private(tmp_path, **given):
    """Run what makes the private folder, as the shell of a job; return what a later shell knows of it."""
    (tmp_path / ".git").mkdir(exist_ok=True)
    begins = gitlab()[".gpucloud"]["before_script"][0]
    done = run_shell(f"{begins}\nenv", tmp_path, {"AWS_TOKEN": "a 'token'", "TMPDIR": str(tmp_path), **given})
    assert (done.returncode, done.stderr) == (0, "")
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def test_token_and_key_lie_on_gitlab_where_nobody_else_can_have_put_a_link(tmp_path):
    first, second = private(tmp_path), private(tmp_path)
    token = Path(second["AWS_WEB_IDENTITY_TOKEN_FILE"])

    assert first["PRIVATE"] != second["PRIVATE"]
    assert token.read_text() == "a 'token'"
    assert (token.parent.stat().st_mode & 0o777, token.stat().st_mode & 0o777) == (0o700, 0o600)
    assert "GPUCLOUD_SSH_KEY" not in second
    shared = private(tmp_path, SSH_KEY="a file")
    assert shared["GPUCLOUD_SSH_KEY"] == f"{shared['PRIVATE']}/key"
    assert not re.search(r"[:\s'\"=]/tmp\b", GITLAB.read_text())


@pytest.mark.parametrize("job", [".gpucloud", "train"])
def test_the_shell_after_a_job_on_gitlab_knows_the_private_folder_and_removes_it(tmp_path, job):
    made = private(tmp_path)
    pieces = [piece for piece in gitlab()[job]["after_script"] if "PRIVATE" in piece or "gpucloud-ci" in piece]
    shown = ['echo "$AWS_WEB_IDENTITY_TOKEN_FILE" > known'] if len(pieces) > 1 else []

    done = run_shell("\n".join([pieces[0], *shown, *pieces[1:]]), tmp_path, {})
    again = run_shell("\n".join(pieces), tmp_path, {})

    assert (done.returncode, done.stderr, again.returncode) == (0, "", 0)
    assert not Path(made["PRIVATE"]).exists()
    assert not (tmp_path / ".git" / "gpucloud-ci").exists()
    assert not shown or (tmp_path / "known").read_text() == made["AWS_WEB_IDENTITY_TOKEN_FILE"] + "\n"


def installs():
    on_github = [s["run"] for s in github_steps() if s.get("name") == "Install gpucloud"]
    return [*on_github, gitlab()[".gpucloud"]["before_script"][2]]


def test_runners_ask_no_index_for_gpucloud_and_take_everything_else_by_its_hash(tmp_path):
    packages = tmp_path / ".gpucloud" / "ci"
    packages.mkdir(parents=True)
    names = ("gpucloud-0.1.0-py3-none-any.whl", "python_terraform-0.10.1-py3-none-any.whl", "requirements.lock")
    for name in names:
        (packages / name).touch()
    stand_in(tmp_path)
    (tmp_path / "programs" / "pip").write_text('#!/bin/sh\necho pip "$@" >> asked\n')
    (tmp_path / "programs" / "pip").chmod(0o755)
    assert len({re.sub(r" *#.*", "", script).strip() for script in installs()}) == 1
    assert {github()["env"]["PACKAGES"], gitlab()["variables"]["PACKAGES"]} == {".gpucloud/ci"}

    done = run_shell(installs()[0], tmp_path, {"PACKAGES": ".gpucloud/ci"})

    assert (done.returncode, done.stderr) == (0, "")
    wheels = " ".join(f".gpucloud/ci/{name}" for name in names[:2])
    assert (tmp_path / "asked").read_text() == (
        "pip install --quiet --no-deps --only-binary :all: --require-hashes -r .gpucloud/ci/requirements.lock\n"
        f"pip install --quiet --no-deps --no-index {wheels}\n"
        "tools install\n"
    )
    assert not re.search(r"pip install\b(?!.*(--require-hashes|--no-index))", GITHUB.read_text() + GITLAB.read_text())


def test_two_runs_of_a_job_wait_for_each_other_and_a_waiting_pass_pushes_no_run_out():
    jobs = github()["jobs"]
    groups = [jobs[name]["concurrency"] for name in ("train", "reconcile")]

    assert groups == [
        {"group": "${{ github.workflow }}-train", "cancel-in-progress": False},
        {"group": "${{ github.workflow }}-reconcile", "cancel-in-progress": False},
    ]
    assert [gitlab()[name]["resource_group"] for name in ("train", "reconcile")] == [
        "gpucloud-train",
        "gpucloud-reconcile",
    ]


def test_the_schedule_is_every_ten_minutes():
    # YAML 1.1 reads the key `on` as true.
    assert github()[True]["schedule"] == [{"cron": "*/10 * * * *"}]


def test_the_end_comes_always():
    (end,) = [s for s in github_steps() if s.get("name") == "End what is left"]

    assert end["if"].startswith("always() && ")
    assert gitlab()["end"]["rules"] == [
        {"if": '$CI_PIPELINE_SOURCE == "web" || $CI_PIPELINE_SOURCE == "merge_request_event"', "when": "always"}
    ]


@pytest.mark.parametrize(
    ("answer", "table"),
    [(json.dumps(ANSWER), TABLE), (json.dumps(REFUSED), REFUSED_TABLE), ("", NO_ANSWER_TABLE), (None, NO_ANSWER_TABLE)],
    ids=["trained", "refused", "killed", "never run"],
)
def test_the_spend_is_a_table_on_github(tmp_path, answer, table):
    if answer is not None:
        (tmp_path / "result.json").write_text(answer)
    files = {name: str(tmp_path / name) for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}

    done = run_shell(step("Say what it cost"), tmp_path, files)

    assert done.stderr == ""
    assert (tmp_path / "GITHUB_STEP_SUMMARY").read_text() == table
    output = (tmp_path / "GITHUB_OUTPUT").read_text()
    assert re.fullmatch(rf"table<<([0-9a-f]{{32}})\n{re.escape(table)}\1\n", output)


@pytest.mark.parametrize(
    ("answer", "table"),
    [(json.dumps(ANSWER), TABLE), (json.dumps(REFUSED), REFUSED_TABLE), ("", NO_ANSWER_TABLE), (None, NO_ANSWER_TABLE)],
    ids=["trained", "refused", "killed", "never run"],
)
def test_the_spend_is_the_same_table_on_gitlab(tmp_path, answer, table):
    if answer is not None:
        (tmp_path / "result.json").write_text(answer)

    done = run_shell(gitlab()["train"]["after_script"][2], tmp_path, {})

    assert (done.stdout, done.stderr) == (table, "")
    assert (tmp_path / "summary.md").read_text() == table


def test_machines_that_live_and_a_message_are_in_the_table(tmp_path):
    answer = {**ANSWER, "status": "failed", "exit_reason": "budget", "message": "spent"}
    answer |= {"nodes": [{"id": "i-0a"}], "missing_outputs": []}
    (tmp_path / "result.json").write_text(json.dumps(answer))

    done = run_shell(gitlab()["train"]["after_script"][2], tmp_path, {})

    assert "| result | budget |" in done.stdout
    assert done.stdout.endswith("| machines alive | i-0a |\n| message | spent |\n")


@both
@pytest.mark.parametrize(
    ("code", "told"),
    [
        (4, "another supervisor holds the job"),
        (10, "the budget is spent"),
        (11, "no machines of that kind now"),
        (12, "the time is up"),
        (14, "exit code 14"),
        (20, "the training script failed"),
        (30, "MACHINES MAY STILL COST MONEY"),
    ],
)
def test_exit_codes_are_told_apart_and_passed_on(tmp_path, where, code, told):
    stand_in(tmp_path, train=code)
    (tmp_path / "gpucloud.yaml").write_text("name: digits\ncloud: aws  # real\n")

    done = run_shell(train_of(where), tmp_path, {"GITHUB_OUTPUT": "output"})

    assert done.returncode == code
    assert told in done.stdout
    assert (tmp_path / "asked").read_text() == "train gpucloud.yaml --again --adopt --json\n"


@both
def test_with_a_key_of_all_runners_only_their_own_runs_are_gone_on_with_and_ended(tmp_path, where):
    stand_in(tmp_path)
    (tmp_path / "gpucloud.yaml").write_text("name: digits\ncloud: aws\n")
    (tmp_path / "started").touch()
    for script in (train_of(where), down_of(where)):
        run_shell(script, tmp_path, {"GITHUB_OUTPUT": "output", "GPUCLOUD_SSH_KEY": "key"})
    assert (tmp_path / "asked").read_text() == "train gpucloud.yaml --again --json\ndown gpucloud.yaml\n"


@both
def test_a_job_file_for_another_cloud_is_refused_before_anything(tmp_path, where):
    stand_in(tmp_path)
    (tmp_path / "gpucloud.yaml").write_text("name: digits\ncloud: local\n")

    done = run_shell(train_of(where), tmp_path, {"GITHUB_OUTPUT": "output"})

    assert done.returncode == 2
    assert not (tmp_path / "asked").exists()


@both
@pytest.mark.parametrize(
    ("trained", "down", "why", "code"),
    [
        (0, 0, None, 0),
        (20, 0, None, 0),
        (0, 30, None, 30),
        (2, 2, "never_started", 0),
        (2, 2, "job_file", 2),  # which may have had machines since before it was edited
        (0, 2, "usage", 2),
        (3, 3, "strangers_run", 3),
        (None, 0, None, 0),
    ],
)
def test_an_end_that_is_incomplete_fails_the_pipeline(tmp_path, where, trained, down, why, code):
    stand_in(tmp_path, down=down, status=2)
    (tmp_path / "answer").write_text(json.dumps({"version": 1, "error": {"code": why}}))
    (tmp_path / "started").touch()
    if trained is not None:
        (tmp_path / "code").write_text(f"{trained}\n")

    done = run_shell(down_of(where), tmp_path, {"TRAINED": "" if trained is None else str(trained)})

    assert done.returncode == code
    assert (tmp_path / "asked").read_text().splitlines()[0] == "down gpucloud.yaml --adopt"
    assert ("MACHINES MAY STILL COST MONEY" in done.stdout) == (code != 0)


def test_a_job_that_another_supervisor_holds_is_not_ended(tmp_path):
    (end,) = [s for s in github_steps() if s.get("name") == "End what is left"]
    stand_in(tmp_path)
    (tmp_path / "started").touch()
    (tmp_path / "code").write_text("4\n")

    done = run_shell(down_of("gitlab"), tmp_path, {})

    assert "steps.train.outputs.code != '4'" in end["if"]
    assert done.stdout == "nothing was started here\n"
    assert not (tmp_path / "asked").exists()


@both
@pytest.mark.parametrize(
    ("status", "asked"),
    [
        ("running", "status gpucloud.yaml --json\nreconcile gpucloud.yaml\n"),
        ("waiting", "status gpucloud.yaml --json\nreconcile gpucloud.yaml\n"),
        ("succeeded", "status gpucloud.yaml --json\n"),
        ("stopped", "status gpucloud.yaml --json\n"),
    ],
)
def test_a_pass_is_made_only_for_a_job_that_is_not_over(tmp_path, where, status, asked):
    stand_in(tmp_path)
    (tmp_path / "answer").write_text(json.dumps({"version": 1, "status": status}))

    done = run_shell(reconcile_of(where), tmp_path, {})

    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "asked").read_text() == asked


@both
@pytest.mark.parametrize(
    ("codes", "error", "code"),
    [
        ({"status": 2}, "never_started", 0),
        ({"status": 2}, "job_file", 2),  # nobody sees to its machines until that is mended
        ({"status": 3}, "credentials", 3),
        ({"reconcile": 4}, None, 0),
        ({"reconcile": 10}, None, 10),
        ({"reconcile": 30}, None, 30),
    ],
)
def test_a_pass_fails_only_where_somebody_must_look(tmp_path, where, codes, error, code):
    stand_in(tmp_path, **codes)
    answer = {"status": "running"} if error is None else {"error": {"code": error}}
    (tmp_path / "answer").write_text(json.dumps({"version": 1, **answer}))

    done = run_shell(reconcile_of(where), tmp_path, {})

    assert done.returncode == code
