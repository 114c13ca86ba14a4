"""`pip` inside a layer: hands `pip install` to uv where uv does the same, and all else to pip itself.

This file is copied into the layer and run by its Python alone: it imports the standard library only.
"""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

# pip's options that mean the same to uv, and by what name; "" is left out: uv never does the thing.
_FLAGS = {
    **dict.fromkeys(("-U", "--upgrade"), "--upgrade"),
    **dict.fromkeys(("-q", "-qq", "-qqq", "--quiet"), "--quiet"),
    **dict.fromkeys(("-v", "-vv", "-vvv", "--verbose"), "--verbose"),
    "--no-deps": "--no-deps",
    "--force-reinstall": "--reinstall",
    "--no-cache-dir": "--no-cache",
    "--no-index": "--no-index",
    "--pre": "--prerelease=allow",
    "--require-hashes": "--require-hashes",
    "--no-build-isolation": "--no-build-isolation",
    **dict.fromkeys(
        ("--no-input", "--disable-pip-version-check", "--no-warn-script-location", "--break-system-packages"), ""
    ),
}
_VALUED = {
    **dict.fromkeys(("-r", "--requirement"), "-r"),
    **dict.fromkeys(("-c", "--constraint"), "-c"),
    **dict.fromkeys(("-e", "--editable"), "-e"),
    **dict.fromkeys(("-i", "--index-url"), "--default-index"),
    "--extra-index-url": "--index",
    **dict.fromkeys(("-f", "--find-links"), "-f"),
    "--only-binary": "--only-binary",
    "--no-binary": "--no-binary",
    **dict.fromkeys(("--timeout", "--default-timeout", "--retries", "--root-user-action", "--progress-bar"), ""),
}
# What a requirements file may say for uv too.
_IN_FILES = ("-r", "--requirement", "-c", "--constraint", "-e", "--editable", "-i", "--index-url", "-f", "--find-links")
# pip's settings (of its files, or PIP_… variables) that change nothing about what is installed.
_HARMLESS = {
    *("timeout", "default-timeout", "retries", "disable-pip-version-check", "no-input", "cache-dir", "progress-bar"),
    *("quiet", "verbose", "root-user-action", "no-warn-script-location", "break-system-packages", "require-virtualenv"),
    *("no-color", "config-file", "no-python-version-warning"),
}


def main(uv: str, arguments: list[str]) -> int:
    """Run the command and return its exit code; where uv fails, pip has the last word."""
    python = str(Path(sys.argv[0]).parent / "bin" / "python")
    made = for_uv(arguments, settings(os.environ))
    if made is not None:
        argv, variables = made
        kept = {name: value for name, value in os.environ.items() if name not in _OUTDATED or not variables}
        command = [uv, "pip", "install", "--python", python, *argv]
        code = subprocess.run(command, env={**kept, **variables}, check=False).returncode
        if code == 0 or not _has_pip(python):
            return code
        sys.stderr.write("uv could not; trying with pip\n")
    return subprocess.run([python, "-m", "pip", *arguments], check=False).returncode


_OUTDATED = ("UV_INDEX_URL", "UV_EXTRA_INDEX_URL")  # uv's older names: not beside the newer ones


def for_uv(arguments: list[str], found: Mapping[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """Return what follows `uv pip install`, and variables for it; None where only pip does what was asked.

    Addresses of `found` settings go into variables: they may hold passwords, and an argument list is public.
    """
    if arguments[:1] != ["install"]:
        return None
    translated = _variables(found)
    words = _words(arguments[1:])
    if translated is None or words is None or not all(_uv_reads(Path(file)) for file in _files(words)):
        return None
    argv = [part for option, value in words for part in _written(option, value)]
    if _truthy(found.get("no-index")):
        argv.append("--no-index")
    if any(option == "--index" for option, _ in words):
        translated["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return argv, translated


def _has_pip(python: str) -> bool:
    return subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode == 0


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return pip's settings for `install`: of its files, then of the environment, which wins."""
    found: dict[str, str] = {}
    parser = configparser.RawConfigParser()
    try:
        parser.read(_config_files(environ), encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError):
        return {"unreadable": "1"}
    for section in ("global", "install"):
        if parser.has_section(section):
            found.update({name.replace("_", "-"): value for name, value in parser.items(section)})
    for name, value in environ.items():
        if name.startswith("PIP_") and value:
            found[name[4:].lower().replace("_", "-")] = value
    return found


def _config_files(environ: Mapping[str, str]) -> list[str]:
    """As pip looks for them, on Linux."""
    if environ.get("PIP_CONFIG_FILE") == os.devnull:
        return []
    home = environ.get("HOME") or "~"
    shared = [f"{folder}/pip/pip.conf" for folder in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")]
    own = [f"{home}/.pip/pip.conf", f"{environ.get('XDG_CONFIG_HOME') or home + '/.config'}/pip/pip.conf"]
    here = [f"{environ['VIRTUAL_ENV']}/pip.conf"] if environ.get("VIRTUAL_ENV") else []
    named = [environ["PIP_CONFIG_FILE"]] if environ.get("PIP_CONFIG_FILE") else []
    return [*shared, "/etc/pip.conf", *own, *here, *named]


def _variables(found: Mapping[str, str]) -> dict[str, str] | None:
    """Return pip's settings as uv's variables; None when one of them has no counterpart."""
    made: dict[str, str] = {}
    for name, value in found.items():
        match name:
            case "index-url":
                made["UV_DEFAULT_INDEX"] = value
            case "extra-index-url":
                made.update(UV_INDEX=" ".join(value.split()), UV_INDEX_STRATEGY="unsafe-best-match")
            case "find-links":
                made["UV_FIND_LINKS"] = ",".join(value.split())
            case "constraint":
                made["UV_CONSTRAINT"] = " ".join(value.split())
            case "cert":
                made["SSL_CERT_FILE"] = value
            case "trusted-host":
                made["UV_INSECURE_HOST"] = " ".join(value.split())
            case "no-index":
                continue
            case _:
                if name not in _HARMLESS:
                    return None
    return made


def _words(arguments: list[str]) -> list[tuple[str | None, str]] | None:
    """Return uv's options with their values, None and a requirement; None for an option that uv may not know."""
    found: list[tuple[str | None, str]] = []
    rest = iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            found.append((None, word))
        elif word in _FLAGS:
            found.append((_FLAGS[word], ""))
        elif name in _VALUED:
            given = value if equals else next(rest, None)
            if given is None:
                return None
            found.append((_VALUED[name], given))
        elif word[:2] in _VALUED and not word.startswith("--"):
            found.append((_VALUED[word[:2]], word[2:]))
        else:
            return None
    listed = any(o in ("--only-binary", "--no-binary") and "," in v for o, v in found)
    return None if listed else found


def _written(option: str | None, value: str) -> Iterator[str]:
    if option is None:
        yield value
    elif option:
        yield from (option, value) if value else (option,)


def _files(words: Iterable[tuple[str | None, str]]) -> list[str]:
    return [value for option, value in words if option in ("-r", "-c")]


def _uv_reads(file: Path) -> bool:
    """Whether uv understands the requirements file; one that it would read in another way is left to pip."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    options = [line.replace("=", " ").split() for line in lines if line.lstrip().startswith("-")]
    inner = [words[1] for words in options if words[0] in ("-r", "--requirement", "-c", "--constraint") and words[1:]]
    known = all(words[0] in _IN_FILES for words in options)
    return known and all(_uv_reads(file.parent / name) for name in inner)


def _truthy(value: str | None) -> bool:
    return (value or "").lower() in ("1", "true", "yes", "on", "y", "t")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
