"""Which tests `python -m tests.check --changed` runs for a change."""

from __future__ import annotations

import pytest

from tests.check import left_out
from tests.choosing import Choice, choose, files_of, uses_of

SPEC, PLAN, CLI = "gpucloud/domain/spec.py", "gpucloud/domain/plan.py", "gpucloud/cli/app.py"
TEST_SPEC, TEST_PLAN, TEST_CLI = "tests/unit/test_spec.py", "tests/unit/test_plan.py", "tests/functional/test_cli.py"
USES = {
    SPEC: set(),
    PLAN: {SPEC},
    CLI: {PLAN},
    "tests/line.py": {CLI},
    TEST_SPEC: {SPEC},
    TEST_PLAN: {PLAN},
    TEST_CLI: {"tests/line.py"},
    "tests/prove/budget.py": {PLAN},
}
FILES = (
    "README.md",
    "gpucloud/__init__.py",
    "gpucloud/__main__.py",
    "gpucloud/agent/__init__.py",
    "gpucloud/agent/daemon.py",
    "gpucloud/prices/catalog.json",
    "gpucloud/prices/catalog.py",
    "gpucloud/smi.py",
    "templates/jobs/digits.yaml",
    "templates/jobs/digits/train.py",
    "tests/data/smi/h200.xml",
    "tests/functional/aws/conftest.py",
    "tests/running.py",
)
HEAD = "gpucloud/__init__.py"


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ([SPEC], (TEST_CLI, TEST_PLAN, TEST_SPEC)),
        ([PLAN], (TEST_CLI, TEST_PLAN)),
        ([CLI], (TEST_CLI,)),
        (["tests/line.py"], (TEST_CLI,)),
        ([TEST_SPEC], (TEST_SPEC,)),
        ([TEST_SPEC, CLI], (TEST_CLI, TEST_SPEC)),
        (["gpucloud/gone.py", "LICENSE"], ()),
        ([], ()),
        (["pyproject.toml"], (TEST_CLI, TEST_PLAN, TEST_SPEC)),
    ],
)
def test_a_change_runs_the_tests_that_use_it_however_far_away(changed, tests):
    choice = choose(USES, changed)

    assert choice.tests == tests
    assert set(choice.unreached) == {TEST_CLI, TEST_PLAN, TEST_SPEC} - set(tests)


def test_two_files_that_use_each_other_reach_the_same_tests():
    assert choose(USES | {SPEC: {PLAN}}, [PLAN]).tests == (TEST_CLI, TEST_PLAN, TEST_SPEC)


def test_a_test_that_is_gone_is_not_run():
    assert choose(USES, ["tests/unit/test_gone.py"]).tests == ()


@pytest.mark.parametrize(
    ("path", "text", "used"),
    [
        ("tests/a.py", "from gpucloud import smi", {HEAD, "gpucloud/smi.py"}),
        ("tests/a.py", "import gpucloud.smi as s", {HEAD, "gpucloud/smi.py"}),
        ("tests/a.py", "def f():\n    from gpucloud.smi import query", {HEAD, "gpucloud/smi.py"}),
        ("tests/a.py", "from tests.running import words_of", {"tests/running.py"}),
        ("tests/a.py", "patch('gpucloud.smi.query', 1)", {HEAD, "gpucloud/smi.py"}),
        ("tests/a.py", "SCRIPT = 'import os\\nfrom gpucloud import smi'", {HEAD, "gpucloud/smi.py"}),
        ("tests/a.py", "run([python, '-m', 'gpucloud', 'status'])", {HEAD, "gpucloud/__main__.py"}),
        ("tests/a.py", "run('python -m gpucloud status')", {HEAD, "gpucloud/__main__.py"}),
        (
            "tests/a.py",
            "run([python, '-m', 'gpucloud.agent.daemon'])",
            {HEAD, "gpucloud/agent/__init__.py", "gpucloud/agent/daemon.py"},
        ),
        ("tests/a.py", "(ROOT / 'README.md').read_text()", {"README.md"}),
        ("tests/a.py", "DATA / 'smi' / f'{name}.xml'; DATA = HERE / 'data'", {"tests/data/smi/h200.xml"}),
        (
            "tests/a.py",
            "train(ROOT / 'templates/jobs/digits.yaml')",
            {"templates/jobs/digits.yaml", "templates/jobs/digits/train.py"},
        ),
        ("tests/a.py", "write('code/train.py')", set()),
        ("tests/functional/aws/test_a.py", "", {"tests/functional/aws/conftest.py"}),
        ("tests/a.py", '"""It is like gpucloud.smi, and README.md says so."""', set()),
        ("gpucloud/prices/catalog.py", "", {"gpucloud/prices/catalog.json"}),
        ("gpucloud/prices/catalog.py", "say('call gpucloud.smi.query first')", {"gpucloud/prices/catalog.json"}),
        ("gpucloud/smi.py", "NAME = 'gpucloud'", set()),
        ("gpucloud/smi.py", "bundled('templates', 'jobs')", {"templates/jobs/digits.yaml"}),
        ("gpucloud/smi.py", "write('README.md')", set()),
    ],
)
def test_a_file_uses_what_it_imports_starts_and_reads(path, text, used):
    assert uses_of(path, text, FILES) == used


def test_a_test_that_looks_at_every_module_uses_them_all():
    assert uses_of("tests/a.py", "sorted(PACKAGE.rglob('*.py'))", FILES) == {
        path for path in FILES if path.startswith("gpucloud/") and path.endswith(".py")
    }


def test_a_name_of_a_function_stands_for_its_module():
    assert files_of("gpucloud.agent.daemon.main", FILES) == {
        HEAD,
        "gpucloud/agent/__init__.py",
        "gpucloud/agent/daemon.py",
    }


def test_what_is_left_out_is_said_with_the_command_that_runs_it():
    choice = Choice(
        tests=("tests/functional/aws/test_a.py", "tests/functional/test_a.py", "tests/unit/test_a.py"),
        unreached=("tests/unit/test_b.py",),
        proofs=("tests/prove/goal.py", "tests/prove/one_decision.py"),
    )

    assert list(left_out(choice, ["tests/unit/test_a.py"])) == [
        "tests that the change reaches, 1 files in tests/functional, 1 files in tests/functional/aws: "
        "python -m tests.check --changed",
        "proofs that the change reaches: python -m tests.prove --short one-decision",
        "1 test files that it does not reach: python -m tests.check",
    ]
    assert list(left_out(Choice(tests=(), unreached=(), proofs=()), [])) == []
