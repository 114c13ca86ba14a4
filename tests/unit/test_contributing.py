"""What contributors are told and what checks their changes: CONTRIBUTING, the workflow, the hooks, ARCHITECTURE."""

from __future__ import annotations

import re
import shlex

import yaml

from gpucloud.domain.node.pinned import TERRAFORM_VERSION
from tests.check import QUICK_FOLDERS, ROOT, STAGES

WORKFLOW = (ROOT / ".github/workflows/check.yml").read_text()
GUIDE = (ROOT / ".github/CONTRIBUTING.md").read_text()


def steps():
    return yaml.safe_load(WORKFLOW)["jobs"]["check"]["steps"]


def using(action):
    (found,) = (step for step in steps() if step.get("uses", "").startswith(f"{action}@"))
    return found["with"]


def test_the_workflow_runs_the_one_door_on_the_oldest_python_and_a_newer_one():
    job = yaml.safe_load(WORKFLOW)["jobs"]["check"]

    assert job["strategy"]["matrix"]["python"] == ["3.10", "3.12"]
    assert using("actions/setup-python")["python-version"] == "${{ matrix.python }}"
    assert steps()[-1] == {"run": ".ci/run"}


def test_the_workflow_may_only_read_and_its_actions_are_pinned():
    assert yaml.safe_load(WORKFLOW)["permissions"] == {"contents": "read"}
    used = [step["uses"] for step in steps() if "uses" in step]
    assert [action for action in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action)] == []


def test_the_workflow_has_the_terraform_that_gpucloud_installs_and_no_wrapper_around_it():
    assert using("hashicorp/setup-terraform") == {"terraform_version": TERRAFORM_VERSION, "terraform_wrapper": False}


def test_the_hooks_run_what_the_check_runs():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    checked = {name: argv[0] for name, argv in STAGES.items()}

    assert {hook["language"] for hook in local["hooks"]} == {"system"}
    for hook in local["hooks"]:
        assert shlex.split(hook["entry"])[0] == checked[hook["name"]]


def test_the_paths_and_options_that_contributors_are_told_exist():
    told = re.findall(r"`((?:gpucloud|tests|terraform|templates|\.ci)[\w./-]*)`", GUIDE)

    assert [path for path in told if "/" in path and not (ROOT / path).exists()] == []
    assert {"tests/unit", "tests/contract"} == set(QUICK_FOLDERS) <= set(told)
    assert set(re.findall(r"tests\.check (--\w+)", GUIDE)) == {"--quick", "--changed"}
    assert [link for link in re.findall(r"\]\(([^)]*)\)", GUIDE) if not (ROOT / ".github" / link).exists()] == []
