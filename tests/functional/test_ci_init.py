"""`gpucloud ci init` puts into a repository all that its CI installs, and nobody's edits are lost."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpucloud import __version__
from gpucloud.adapters import packaging
from gpucloud.adapters.packaging import wheel_of
from gpucloud.domain.errors import ToolMissing

ROOT = Path(__file__).resolve().parents[2]
WHEEL = f"gpucloud-{__version__}-py3-none-any.whl"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / ".git").mkdir()
    (tmp_path / "deep").mkdir()
    return tmp_path


def gpucloud(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpucloud", *words], cwd=folder, capture_output=True, text=True, timeout=60
    )


def test_everything_that_a_runner_installs_lies_in_the_repository(repository: Path) -> None:
    done = gpucloud(repository / "deep", "ci", "init", "--github", "--gitlab", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    folder = repository / ".gpucloud" / "ci"
    assert sorted(path.name for path in folder.iterdir()) == [
        "gitlab-ci.yml",
        WHEEL,
        "python_terraform-0.10.1-py3-none-any.whl",
        "requirements.lock",
        "written.json",
    ]
    assert (repository / ".github/workflows/gpucloud.yml").read_text() == (
        ROOT / "templates/ci/github-actions.yml"
    ).read_text()
    assert "local: .gpucloud/ci/gitlab-ci.yml" in (repository / ".gitlab-ci.yml").read_text()
    assert answer["sha256"] == hashlib.sha256((repository / answer["wheel"]).read_bytes()).hexdigest()
    assert gpucloud(repository, "ci", "init", "--github", "--gitlab", "--json").stdout.count('"written": []') == 1


def test_the_wheels_install_without_an_index_and_run(repository: Path) -> None:
    assert gpucloud(repository, "ci", "init", "--github").returncode == 0
    target = repository / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    done = subprocess.run(
        [*pip, *map(str, (repository / ".gpucloud/ci").glob("*.whl"))], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.replace("WARNING", "")) == (0, done.stderr), done.stderr
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import gpucloud, python_terraform\n"
        "from gpucloud.adapters.home import bundled\n"
        "from gpucloud.adapters.packaging import wheel_of\n"
        "assert bundled('terraform', 'aws').is_relative_to(sys.argv[1]), bundled('terraform', 'aws')\n"
        "sys.stdout.buffer.write(wheel_of('gpucloud').data)\n"
    )
    again = subprocess.run([sys.executable, "-c", script, str(target)], cwd="/", capture_output=True, env={})
    assert again.stderr == b""
    # Made again from what it was installed as; by sums, since pytest would tell megabytes of bytes apart for minutes.
    assert _sums(again.stdout) == _sums(wheel_of("gpucloud").data)
    assert hashlib.sha256(again.stdout).digest() == hashlib.sha256(wheel_of("gpucloud").data).digest()


def _sums(wheel: bytes) -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_a_wheel_names_all_that_is_in_it_by_its_hash(tmp_path: Path) -> None:
    wheel = wheel_of("gpucloud")
    assert wheel.name == WHEEL
    (tmp_path / wheel.name).write_bytes(wheel.data)
    with zipfile.ZipFile(tmp_path / wheel.name) as archive:
        names = archive.namelist()
        (record,) = [name for name in names if name.endswith(".dist-info/RECORD")]
        rows = {row[0]: row[1:] for row in csv.reader(archive.read(record).decode().splitlines())}
        sums = {
            name: base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
            for name in names
        }
    assert set(rows) == set(names)
    assert all(rows[name][0] == f"sha256={sums[name]}" for name in names if name != record)
    metadata = record.replace("RECORD", "")
    wanted = {
        "gpucloud/__init__.py",
        "gpucloud/py.typed",
        "gpucloud/bundled/templates/ci/requirements.lock",
        "gpucloud/docs/money.md",
    }
    assert wanted | {f"{metadata}METADATA", f"{metadata}WHEEL", f"{metadata}entry_points.txt"} <= set(names)
    assert [name for name in names if "__pycache__" in name or ".terraform/" in name or "direct_url" in name] == []
    assert wheel_of("gpucloud") == wheel


def test_what_was_changed_after_its_installation_is_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    (tmp_path / "w").mkdir()
    wheel = wheel_of("python-terraform")
    (tmp_path / "w" / wheel.name).write_bytes(wheel.data)
    subprocess.run([*pip, str(tmp_path / "w" / wheel.name)], check=True)
    (found,) = packaging.Distribution.discover(name="python-terraform", path=[str(tmp_path)])
    monkeypatch.setattr(packaging, "distribution", lambda _: found)
    assert wheel_of("python-terraform") == wheel
    with (tmp_path / "python_terraform" / "tfstate.py").open("a") as file:
        file.write("# mine\n")
    with pytest.raises(ToolMissing, match=r"tfstate\.py of python-terraform is not what was installed"):
        wheel_of("python-terraform")


def test_a_project_that_is_not_installed_has_no_wheel() -> None:
    with pytest.raises(ToolMissing, match="not-there is not installed"):
        wheel_of("not-there")


def test_edits_stay_and_what_both_changed_is_not_written_over(repository: Path) -> None:
    assert gpucloud(repository, "ci", "init", "--github").returncode == 0
    workflow, lock = repository / ".github/workflows/gpucloud.yml", repository / ".gpucloud/ci/requirements.lock"
    workflow.write_text(workflow.read_text().replace("JOB_FILE: gpucloud.yaml", "JOB_FILE: other.yaml"))

    done = gpucloud(repository, "ci", "init")
    assert (done.returncode, done.stdout.strip()) == (0, "")
    assert ".github/workflows/gpucloud.yml was edited here and stays" in done.stderr

    lock.write_text("# mine\n")
    record = repository / ".gpucloud/ci/written.json"
    record.write_text("{}")
    for path in (repository / ".gpucloud/ci").glob("*.whl"):
        path.unlink()
    done = gpucloud(repository, "ci", "init", "--github")
    assert done.returncode == 2
    assert "requirements.lock, .github/workflows/gpucloud.yml: not as gpucloud wrote it" in done.stderr
    assert "--force writes over it" in done.stderr
    assert lock.read_text() == "# mine\n"
    assert [*(repository / ".gpucloud/ci").glob("*.whl")] == []

    assert gpucloud(repository, "ci", "init", "--github", "--force").returncode == 0
    assert "other.yaml" not in workflow.read_text()
    assert "--hash" in lock.read_text()


def test_an_older_wheel_goes_when_a_newer_one_comes(repository: Path) -> None:
    assert gpucloud(repository, "ci", "init", "--github").returncode == 0
    folder = repository / ".gpucloud/ci"
    (folder / WHEEL).rename(folder / "gpucloud-0.0.1-py3-none-any.whl")
    text = (folder / "written.json").read_text()
    (folder / "written.json").write_text(text.replace(WHEEL, "gpucloud-0.0.1-py3-none-any.whl"))
    done = gpucloud(repository, "ci", "init")
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0)
    assert "removed .gpucloud/ci/gpucloud-0.0.1-py3-none-any.whl" in done.stdout
    assert [path.name for path in folder.glob("gpucloud-*.whl")] == [WHEEL]


def test_a_pipeline_of_ones_own_stays_and_the_lines_to_add_are_told(repository: Path) -> None:
    (repository / ".gitlab-ci.yml").write_text("own: {script: [make]}\n")
    done = gpucloud(repository, "ci", "init")
    assert done.returncode == 0
    assert (repository / ".gitlab-ci.yml").read_text() == "own: {script: [make]}\n"
    assert "- local: .gpucloud/ci/gitlab-ci.yml" in done.stderr


def test_outside_of_a_repository_and_without_a_word_whose_ci_nothing_is_written(tmp_path: Path) -> None:
    done = gpucloud(tmp_path, "ci", "init", "--github")
    assert (done.returncode, "is in no Git repository" in done.stderr) == (2, True)
    (tmp_path / ".git").mkdir()
    done = gpucloud(tmp_path, "ci", "init")
    assert (done.returncode, "gpucloud ci init --github, or --gitlab" in done.stderr) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == [".git"]
