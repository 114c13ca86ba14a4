"""`data:`, `outputs:` and `cp` through the real command line, on the embedded fleet, with an S3 server on loopback."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from pathlib import Path

import pytest

from gpucloud.domain.untrusted import STAGING
from tests.commandline import command_line, until
from tests.standins.bucket import serving

FILES = {f"part-{n}": os.urandom(100_000) for n in range(5)}

READER = """\
import hashlib, os, pathlib
sets = [pathlib.Path(os.environ[f"GPUCLOUD_DATA_{n}"]) for n in (1, 2)]
assert os.environ["GPUCLOUD_DATA"] == str(sets[0])
out = pathlib.Path("results")
(out / "deep").mkdir(parents=True, exist_ok=True)
for number, folder in enumerate(sets):
    with (out / f"seen-{number}").open("w") as file:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                file.write(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\\n")
(out / "deep" / "large").write_bytes(b"0123456789abcdef" * (3 << 20))
(out / "newest").unlink(missing_ok=True)
(out / "newest").symlink_to("deep/large")
(out / "elsewhere").unlink(missing_ok=True)
(out / "elsewhere").symlink_to("/etc/hostname")
pathlib.Path("a.log").write_text("a")
pathlib.Path("b.log").write_text("b")
pathlib.Path("empty").touch()
"""

READING = """\
name: small
code: code
run: python3 read.py
resources: {{nodes: 2}}
budget: 1 USD
data: {{s3://sets/tiny: /data, mine: /sets/mine}}
outputs: [results/, "*.log", empty, never-made]
env: {env}
"""


@pytest.fixture
def s3():
    with serving() as server:
        server.put({f"tiny/{path}": data for path, data in FILES.items()})
        yield server


@pytest.fixture
def line(tmp_path, s3):
    with command_line(tmp_path, **s3.environment) as found:
        (tmp_path / "mine" / "sub").mkdir(parents=True)
        (tmp_path / "mine" / "sub" / "x").write_text("of my own")
        (tmp_path / "mine" / "y").write_bytes(b"y" * 40_000_000)
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / "read.py").write_text(READER)
        (tmp_path / "small.yaml").write_text(READING.format(env=json.dumps(s3.environment)))
        yield found


def seen(files):
    return "".join(f"{path} {hashlib.sha256(data).hexdigest()}\n" for path, data in sorted(files.items()))


@pytest.mark.slow
def test_both_kinds_of_sets_are_on_every_node_and_results_come_home(line, s3):
    answer = line.run("train", "small.yaml", "--keep")
    assert answer.code == 0, answer.stderr
    assert "data: s3://sets/tiny: 5 files, 0.5 MB, staged on every node" in answer.stderr
    assert answer.stderr.count(" data: /data: 0.5 MB in ") == 2
    assert answer.stderr.count(" data: /sets/mine: 40.0 MB, 2 files") == 2
    assert sorted(path for path, _ in s3.reads) == sorted(f"sets/tiny/{path}" for path in [*FILES, *FILES])

    home = line.folder / "outputs" / "small"
    assert (home / "results" / "seen-0").read_text() == seen(FILES)
    assert (home / "results" / "seen-1").read_text() == seen({"sub/x": b"of my own", "y": b"y" * 40_000_000})
    assert (home / "results" / "deep" / "large").stat().st_size == 48 << 20
    assert (home / "results" / "newest").readlink() == Path("deep/large")
    assert (home / "results" / "elsewhere").read_text() == Path("/etc/hostname").read_text()
    assert not (home / "results" / "elsewhere").is_symlink()
    assert [(home / name).read_text() for name in ("a.log", "b.log", "empty")] == ["a", "b", ""]
    assert answer.stderr.count("brought home: ") == 4
    _copies_go_both_ways(line)


def _copies_go_both_ways(line):
    """In the machines that the test before has left up: starting some more would take longer than all of this."""
    here = line.folder
    assert line.run("cp", "small:results/deep/large", "fetched").stdout == "1 file, 48 MiB copied\n"
    assert (here / "fetched").read_bytes() == b"0123456789abcdef" * (3 << 20)
    assert line.run("cp", "small:results/deep/large", "fetched", "--json").json["bytes"] == 0

    (here / "folder").mkdir()
    (here / "folder" / "big").write_bytes(os.urandom(40_000_000))
    (here / "folder" / "with space $HOME").write_text("kept")
    (here / "folder" / "link").symlink_to("big")
    refused = line.run("cp", "folder", "small:results/")
    assert (refused.code, "hint: gpucloud cp -r folder small:results/" in refused.stderr) == (2, True)
    assert line.run("cp", "-r", "folder", "small:results/").code == 0
    assert line.run("cp", "-r", "small:results/folder", "back").code == 0
    assert (here / "back" / "big").read_bytes() == (here / "folder" / "big").read_bytes()
    assert (here / "back" / "with space $HOME").read_text() == "kept"
    assert (here / "back" / "link").readlink() == Path("big")

    one, other = line.nodes()
    assert line.run("cp", "code/read.py", "small:only-here", "--node", other).code == 0
    wrong = line.run("cp", "small:only-her", ".", "--node", other)
    assert (wrong.code, "hint: did you mean small:only-here?" in wrong.stderr) == (2, True)
    assert line.run("cp", "small:only-here", ".", "--node", one).code == 2
    assert line.run("cp", "fetche", "small:.").stderr.endswith("did you mean fetched?\n")
    assert line.run("cp", "small:a", "small:b").code == 2

    assert line.run("cp", "small:@store/control/spec.yaml", "spec").code == 0
    assert (here / "spec").read_text() == (here / "small.yaml").read_text()
    assert "did you mean small:@store/control/spec.yaml?" in line.run("cp", "small:@store/control/spec.yam", "x").stderr
    _a_copy_that_was_killed_goes_on(line)


def _a_copy_that_was_killed_goes_on(line):
    here = line.folder
    (here / "huge").write_bytes(os.urandom(200_000_000))
    sending = line.start("cp", "huge", "small:huge")
    arrived = lambda: [  # noqa: E731
        path for path in line.home.rglob(".huge.*.part") if 16 << 20 <= path.stat().st_size < 200_000_000
    ]
    until(arrived, "some of it has arrived")
    sending.send_signal(signal.SIGKILL)
    sending.wait()
    rest = line.run("cp", "huge", "small:huge", "--json")
    assert 0 < rest.json["bytes"] <= 200_000_000 - (16 << 20)

    fetching = line.start("cp", "small:huge", "home-again")
    landed = lambda: [  # noqa: E731
        path for path in here.glob(f"{STAGING}*/*") if 16 << 20 <= path.stat().st_size < 200_000_000
    ]
    until(landed, "some of it is here")
    fetching.send_signal(signal.SIGKILL)
    fetching.wait()
    rest = line.run("cp", "small:huge", "home-again", "--json")
    assert 0 < rest.json["bytes"] <= 200_000_000 - (16 << 20)
    assert (here / "home-again").read_bytes() == (here / "huge").read_bytes()
    assert list(here.glob(f"{STAGING}*")) == []
    assert line.run("down", "small").code == 0


@pytest.mark.slow
def test_a_second_attempt_reads_nothing_on_a_node_that_stays(line, s3):
    env = json.dumps(s3.environment)
    job = line.job(extra=f"data: {{s3://sets/tiny: /data}}\nenv: {env}\n")
    answer = line.run("train", job, "--drill", "--json")
    assert answer.code == 0, answer.stderr
    assert len(answer.json["attempts"]) == 2
    assert len(s3.reads) == 3 * len(FILES)  # two nodes, and the one that took the place of the one that was taken


def test_data_that_cannot_be_read_is_said_before_a_machine_is_paid(line):
    (line.folder / "small.yaml").write_text((line.folder / "small.yaml").read_text().replace("sets/tiny", "sets/none"))
    answer = line.run("train", "small.yaml")
    assert answer.code == 2
    assert "there is nothing at s3://sets/none" in answer.stderr
    assert line.nodes() == []
