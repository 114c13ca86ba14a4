"""`gpucloud init` writes job files that read, and whole jobs that are their own documentation."""

import json
import re
from pathlib import Path

import pytest

from gpucloud.__main__ import main
from gpucloud.adapters.home import bundled
from gpucloud.adapters.jobfile import job_templates, read_job
from gpucloud.domain.errors import JobFileError

TEMPLATES = [
    "accelerate",
    "backoff",
    "chargpt",
    "dcp",
    "digits",
    "gpt",
    "hf-trainer",
    "images",
    "lightning",
    "sft-lora",
    "tensorparallel",
]


def gpucloud(monkeypatch, capsys, *words):
    """Return the exit code, the answer and the story."""
    monkeypatch.setattr("sys.argv", ["gpucloud", *words])
    with pytest.raises(SystemExit) as left:
        main()
    told = capsys.readouterr()
    return left.value.code or 0, told.out, told.err


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    place = tmp_path / "My Vision!"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def test_the_templates_are_listed_each_with_a_sentence(monkeypatch, capsys):
    code, told, _ = gpucloud(monkeypatch, capsys, "init", "--list")
    assert code == 0
    assert [line.split()[0] for line in told.splitlines()] == TEMPLATES
    assert all(re.fullmatch(r"[\w-]+ +[A-Z].*\.", line) for line in told.splitlines())
    _, told, _ = gpucloud(monkeypatch, capsys, "init", "--list", "--json")
    assert [one["name"] for one in json.loads(told)["templates"]] == TEMPLATES


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_becomes_a_job_that_reads_with_its_script(folder, monkeypatch, capsys, template):
    code, told, _ = gpucloud(monkeypatch, capsys, "init", "--template", template)
    assert (code, told.startswith(f"wrote gpucloud.yaml, {template}/")) == (0, True)
    job = read_job(folder / "gpucloud.yaml")
    assert (job.name, job.code) == ("my-vision", folder / template)
    assert (job.code / job.run.split()[0]).is_file()
    assert f"gpucloud train {template}.yaml" not in (folder / "gpucloud.yaml").read_text()
    # What is in the repository reads as well, under its own name.
    assert read_job(bundled("templates", "jobs", f"{template}.yaml")).name == template


def test_a_file_for_a_script_that_is_not_there_yet_says_so(folder, monkeypatch, capsys):
    code, told, _ = gpucloud(monkeypatch, capsys, "init")
    assert (code, told) == (
        0,
        "wrote gpucloud.yaml; `gpucloud train` runs it once this is mended:\n"
        'gpucloud.yaml:3:6: run: there is no script "train.py" in the code folder'
        " (`code:` names its folder; gpucloud init --list)\n",
    )
    (folder / "fit.py").touch()
    (folder / "sum.py").touch()
    told = gpucloud(monkeypatch, capsys, "init", "--force")[1]
    assert told.endswith('there is no script "train.py" in the code folder (there is fit.py, sum.py)\n')
    (folder / "train.py").touch()
    assert gpucloud(monkeypatch, capsys, "init", "--force")[1] == "wrote gpucloud.yaml; `gpucloud train` runs it\n"


def test_a_script_with_a_space_in_its_name_is_written_in_quotes_and_refused_without(folder, monkeypatch, capsys):
    (folder / "trän ing.py").touch()
    for words in ((), ("--run", "trän ing.py")):
        told = gpucloud(monkeypatch, capsys, "init", "--force", *words)[1]
        assert told == "wrote gpucloud.yaml; `gpucloud train` runs it\n"
        assert read_job(folder / "gpucloud.yaml").run == "'trän ing.py'"
    text = (folder / "gpucloud.yaml").read_text()
    (folder / "gpucloud.yaml").write_text(re.sub("(?m)^run: .*$", "run: trän ing.py --lr 1", text))
    code, _, story = gpucloud(monkeypatch, capsys, "plan")
    assert code == 2
    assert '"trän ing.py" is a script here, and without quotes "trän" is taken for a command' in story
    assert """(run: "'trän ing.py' --lr 1")""" in story
    (folder / "gpucloud.yaml").write_text(re.sub("(?m)^run: .*$", """run: "'trän in.py'" """, text))
    with pytest.raises(JobFileError, match=r'there is no script "trän in\.py"'):
        read_job(folder / "gpucloud.yaml")


def test_a_short_file_is_written_for_the_script_that_is_there_and_with_full_one_with_every_key(
    folder, monkeypatch, capsys
):
    (folder / "fit.py").touch()
    assert gpucloud(monkeypatch, capsys, "init")[0] == 0
    short = (folder / "gpucloud.yaml").read_text()
    job = read_job(folder / "gpucloud.yaml")
    assert (job.name, job.run, job.budget_usd, len(short.splitlines()) <= 20) == ("my-vision", "fit.py", 2, True)

    (folder / "my prog.py").touch()
    assert gpucloud(monkeypatch, capsys, "init", "--run", "'my prog.py' --lr 1", "--force")[0] == 0
    assert read_job(folder / "gpucloud.yaml").run == "'my prog.py' --lr 1"
    assert gpucloud(monkeypatch, capsys, "init", "--full", "--run", "fit.py", "--force")[0] == 0
    full = (folder / "gpucloud.yaml").read_text()
    assert (read_job(folder / "gpucloud.yaml").run, "#hold: 5min" in full) == ("fit.py", True)
    code, _, story = gpucloud(monkeypatch, capsys, "init", "--full", "--template", "gpt", "--force")
    assert (code, "--template brings its own script" in story) == (2, True)


def test_a_script_is_no_job_file_and_a_folder_has_its_own(folder, monkeypatch, capsys):
    (folder / "fit.py").touch()
    code, _, story = gpucloud(monkeypatch, capsys, "plan", "fit.py")
    assert (code, "hint: gpucloud init --run fit.py writes a job file for it" in story) == (2, True)
    gpucloud(monkeypatch, capsys, "init")
    assert gpucloud(monkeypatch, capsys, "plan", ".")[0] == 0


def test_nothing_is_overwritten_unless_asked_for(folder, monkeypatch, capsys):
    (folder / "images").mkdir()
    (folder / "images" / "train.py").write_text("mine")
    code, _, story = gpucloud(monkeypatch, capsys, "init", "--template", "images")
    assert (code, "images/train.py is there already" in story) == (2, True)
    assert not (folder / "gpucloud.yaml").exists()
    code, _, _ = gpucloud(monkeypatch, capsys, "init", "vision", "--template", "images", "--force")
    assert (code, (folder / "images" / "train.py").read_text() == "mine") == (0, False)
    assert read_job(folder / "gpucloud.yaml").name == "vision"
    code, _, story = gpucloud(monkeypatch, capsys, "init", "--template", "images")
    assert "gpucloud.yaml, images/train.py are there already" in story
    assert "hint: --force writes over all of them, what you have changed in them too" in story


def test_an_unknown_template_is_answered_with_those_there_are(folder, monkeypatch, capsys):
    code, _, story = gpucloud(monkeypatch, capsys, "init", "--template", "imags")
    assert (code, f"choose one of {', '.join(TEMPLATES)}" in story) == (2, True)
    assert list(folder.iterdir()) == []


def test_every_template_has_its_page_and_its_folder():
    folders = {path.name for path in bundled("templates", "jobs").iterdir() if path.is_dir()}
    assert folders == set(job_templates()) == set(TEMPLATES)
    for name in TEMPLATES:
        script = Path(bundled("templates", "jobs", name, "train.py")).read_text()
        assert script.startswith('"""torchrun --nproc-per-node=')
