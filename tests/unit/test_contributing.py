"""What contributors are told and what checks their changes: CONTRIBUTING, the workflow, the hooks, ARCHITECTURE."""

from __future__ import annotations

import re
import shlex
from collections import Counter

import pytest
import yaml

from gpucloud.adapters.terraform.program import TERRAFORM_VERSION
from gpucloud.domain import variables
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
    assert set(re.findall(r"tests\.check (--\w+)", GUIDE)) == {"--quick", "--changed", "--engines"}
    assert [link for link in re.findall(r"\]\(([^)]*)\)", GUIDE) if not (ROOT / ".github" / link).exists()] == []


NEW = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), maxsplit=2, flags=re.MULTILINE)[1]


def test_what_is_new_is_a_short_list_by_topic_that_says_nothing_twice():
    """A merge can bring lines back that were taken out: keep what main has, and put yours under its topic."""
    assert NEW.startswith("[Unreleased]\n")
    lines = [line for line in NEW.partition("\n### ")[2].splitlines()[1:] if line]

    assert [line for line in lines if not re.fullmatch(r"####? [A-Z].+|- .+[.]", line) or len(line) > 160] == []
    assert [line for line, times in Counter(lines).items() if times > 1 and line[:4] != "####"] == []
    assert "### Added\n\n- " not in NEW, "a line without a topic"
    assert len(NEW.splitlines()) <= 200


ARCHITECTURE = (ROOT / "gpucloud/ARCHITECTURE.md").read_text()
ROOMS = {path.stem for path in (ROOT / "gpucloud").iterdir()} | {"gpucloud", "tests", "terraform", "templates"}


def named_in_the_architecture():
    """Yield what it names with a path, below the repository or the package; files of a node or a store are JSON."""
    for name in re.findall(r"`([\w./-]+)`", ARCHITECTURE):
        if "/" in name and name.partition("/")[0] in ROOMS and not name.endswith((".json", ".jsonl", "/")):
            yield name


def is_there(name):
    """Whether that file, folder or module exists, and has the names that stand behind a dot: `domain/job/spec.Job`."""
    for root in (ROOT, ROOT / "gpucloud"):
        if (root / name).exists() or (root / f"{name}.py").exists():
            return True
        path, *names = name.split(".")
        module = root / f"{path}.py"
        if names and module.exists():
            text = module.read_text()
            return all(re.search(rf"^\s*(?:class |def )?{one}\b", text, re.MULTILINE) for one in names)
    return False


def test_what_the_architecture_names_is_there():
    assert [name for name in named_in_the_architecture() if not is_there(name)] == []
    assert len(list(named_in_the_architecture())) > 80


@pytest.mark.parametrize(
    "name", ["domain/job/gone", "gpucloud/gone.py", "domain/job/spec.Gone", "usecases/job/start.Starter.gone"]
)
def test_what_is_gone_would_be_found(name):
    assert not is_there(name)


def test_the_variables_that_the_architecture_names_are_used():
    sources = "".join(
        path.read_text() for path in (*(ROOT / "gpucloud").rglob("*.py"), *(ROOT / "terraform").rglob("*.tf"))
    )
    named = set(re.findall(r"`(GPUCLOUD_[A-Z_]+)`", ARCHITECTURE))

    assert sorted(name for name in named if not re.search(rf"\b{name}\b", sources)) == []
    assert set(re.findall(r"\bGPUCLOUD_[A-Z_]+\b", (ROOT / "gpucloud/resume/settings.py").read_text())) <= named


def test_every_variable_is_explained_to_users_or_in_the_architecture():
    declared = {name for name in vars(variables) if name.startswith("GPUCLOUD_")}
    pages = ARCHITECTURE + "".join(path.read_text() for path in (ROOT / "gpucloud/docs").glob("*.md"))

    assert declared - set(re.findall(r"\bGPUCLOUD_[A-Z_]+\b", pages)) == set()
