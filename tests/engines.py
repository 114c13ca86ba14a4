"""What some tests need as it is, which no extra of pip brings, and how it is installed.

A test says so with `@pytest.mark.engine(name="openmpi")`, is `slow` too, and fails where the engine is missing.
`python -m tests.check --engines` runs these tests, and says what is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent
_SYSTEM = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Programs of the system and modules of Python, each with the package that brings it."""

    shows: str
    """What its tests show with it."""
    programs: Mapping[str, str] = field(default_factory=dict)
    """By apt."""
    modules: Mapping[str, str] = field(default_factory=dict)
    """By pip."""
    tools: Mapping[str, str] = field(default_factory=dict)
    """Programs written in Python, each in an environment of its own."""

    def missing(self) -> str | None:
        """Return the commands that install what is missing; None where all is here."""
        apt = [package for program, package in self.programs.items() if not _is_program(program)]
        pip = [package for module, package in self.modules.items() if importlib.util.find_spec(module) is None]
        tools = [package for program, package in self.tools.items() if not _is_program(program)]
        kinds = {"apt-get install -y": apt, "pip install": pip, "pipx install": tools}
        return " && ".join(f"{how} {' '.join(dict.fromkeys(names))}" for how, names in kinds.items() if names) or None


ENGINES = {
    "openssh": Engine(shows="jobs and files over OpenSSH's own server", programs={"sshd": "openssh-server"}),
    "openmpi": Engine(shows="jobs under mpirun", programs={"mpirun": "openmpi-bin"}),
    "shells": Engine(
        shows="the line that login shells are given",
        programs={shell: shell for shell in ("bash", "zsh", "fish", "csh", "tcsh")},
    ),
    "debootstrap": Engine(
        shows="the machine's steps in a real Ubuntu; needs root and the archive of packages",
        programs={"debootstrap": "debootstrap", "gcc": "gcc", "dpkg-deb": "dpkg"},
    ),
    "frameworks": Engine(
        shows="scripts of Hugging Face and Lightning, unchanged",
        modules={
            "transformers": "transformers",
            "accelerate": "accelerate",
            "pytorch_lightning": "pytorch-lightning",
        },
    ),
    "checkov": Engine(shows="what an auditor says of the Terraform modules", tools={"checkov": "checkov"}),
}


def files_with(name: str) -> list[str]:
    """Return the test files that name the engine in a mark."""
    return sorted(str(path) for path in TESTS.rglob("test_*.py") if f'engine(name="{name}")' in path.read_text())


def _is_program(name: str) -> bool:
    return shutil.which(name, path=_SYSTEM) is not None
