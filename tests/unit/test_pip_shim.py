from __future__ import annotations

import pytest

from gpucloud.agent.layer.pipshim import for_uv, settings


@pytest.mark.parametrize(
    ("arguments", "argv"),
    [
        (["install", "numpy", "torch>=2"], ["numpy", "torch>=2"]),
        (["install", "-q", "-U", "a"], ["--quiet", "--upgrade", "a"]),
        (["install", "--no-deps", "--force-reinstall", "a"], ["--no-deps", "--reinstall", "a"]),
        (["install", "--no-cache-dir", "--timeout", "5", "a"], ["--no-cache", "a"]),
        (["install", "-e", ".[dev]"], ["-e", ".[dev]"]),
        (["install", "--find-links=w", "--no-index", "a"], ["-f", "w", "--no-index", "a"]),
        (["install", "-i", "https://x/simple", "a"], ["--default-index", "https://x/simple", "a"]),
        (["install", "-fw", "a"], ["-f", "w", "a"]),
        (["install", "--only-binary", ":all:", "a"], ["--only-binary", ":all:", "a"]),
        (["install", "a @ git+https://x/y"], ["a @ git+https://x/y"]),
    ],
)
def test_what_uv_does_in_the_same_way_goes_to_uv(arguments, argv):
    assert for_uv(arguments, {}) == (argv, {})


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["list"],
        ["uninstall", "-y", "a"],
        ["--version"],
        ["install", "-I", "a"],
        ["install", "--user", "a"],
        ["install", "--target", "x", "a"],
        ["install", "--upgrade-strategy", "eager", "a"],
        ["install", "--no-binary", "a,b", "c"],
        ["install", "-r"],
        ["install", "-r", "no-such-file.txt"],
    ],
)
def test_what_only_pip_does_stays_with_pip(arguments):
    assert for_uv(arguments, {}) is None


def test_a_requirements_file_is_read_for_options_that_uv_does_not_know(tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text("numpy\n-c more.txt\n--find-links w  # here\n")
    (tmp_path / "more.txt").write_text("torch<3\n")
    assert for_uv(["install", "-r", str(plain)], {}) == (["-r", str(plain)], {})
    (tmp_path / "more.txt").write_text("--pre\ntorch<3\n")
    assert for_uv(["install", "-r", str(plain)], {}) is None


def test_a_second_index_is_asked_as_pip_asks_it():
    best = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    assert for_uv(["install", "--extra-index-url", "https://x", "a"], {}) == (["--index", "https://x", "a"], best)
    found = {"extra-index-url": "https://x\nhttps://y"}
    assert for_uv(["install", "a"], found) == (["a"], {"UV_INDEX": "https://x https://y", **best})


def test_pips_settings_become_variables_and_never_arguments():
    found = {
        "index-url": "https://me:secret@x/simple", "find-links": "/w /v", "cert": "/c.pem", "timeout": "9",
        "trusted-host": "x", "no-index": "true", "constraint": "/c.txt\n/d.txt",
    }  # fmt: skip
    argv, variables = for_uv(["install", "a"], found)
    assert argv == ["a", "--no-index"]
    assert variables == {
        "UV_DEFAULT_INDEX": "https://me:secret@x/simple",
        "UV_FIND_LINKS": "/w,/v",
        "SSL_CERT_FILE": "/c.pem",
        "UV_INSECURE_HOST": "x",
        "UV_CONSTRAINT": "/c.txt /d.txt",
    }


def test_a_setting_that_uv_has_no_counterpart_for_leaves_all_to_pip():
    assert for_uv(["install", "a"], {"proxy": "http://p"}) is None
    assert for_uv(["install", "a"], {"unreadable": "1"}) is None


def test_settings_come_from_pips_files_and_variables_win(tmp_path):
    text = "[global]\nindex-url = https://file/simple\ncert = /c\n[install]\nno_index = 0\n[list]\nformat = json\n"
    (tmp_path / "pip.conf").write_text(text)
    environ = {"HOME": "/no/home", "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    found = settings({**environ, "PIP_INDEX_URL": "https://variable/simple", "PIP_CERT": ""})
    assert {name: found[name] for name in ("index-url", "cert", "no-index")} == {
        "index-url": "https://variable/simple",
        "cert": "/c",
        "no-index": "0",
    }
    assert "format" not in found


def test_settings_in_a_file_that_cannot_be_read_leave_all_to_pip(tmp_path):
    (tmp_path / "pip.conf").write_text("index-url = without a section\n")
    found = settings({"HOME": "/no/home", "PIP_CONFIG_FILE": str(tmp_path / "pip.conf")})
    assert for_uv(["install", "a"], found) is None
