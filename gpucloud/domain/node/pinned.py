"""The tools that a node, or a user's machine, may fetch for itself: one version each, one hash for each file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedFile:
    """A file that must have this SHA-256, wherever it comes from."""

    name: str
    sha256: str
    url: str = ""
    """Where it lies if nobody names another place; empty: whoever fetches it knows."""


UV_VERSION = "0.13.9"
PIP_VERSION = "26.3"
MICROMAMBA_VERSION = "2.9.0-0"

_PYPI_FILES = "https://files.pythonhosted.org/packages"
_MICROMAMBA = f"https://github.com/mamba-org/micromamba-releases/releases/download/{MICROMAMBA_VERSION}"
_UV = (
    f"uv-{UV_VERSION}-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    f"uv-{UV_VERSION}-py3-none-manylinux_2_28_aarch64.whl",
)

# By platform.machine(), for Linux. Hashes and addresses of wheels: PyPI, 2026-11.
UV_WHEELS = {
    "x86_64": PinnedFile(
        name=_UV[0],
        sha256="d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19",
        url=f"{_PYPI_FILES}/3d/aa/26d64642d808de4a652579ef950d7cd2d37f080a8babf9c67c6b75fc4c3f/{_UV[0]}",
    ),
    "aarch64": PinnedFile(
        name=_UV[1],
        sha256="ecb6028d79dc96fbeafffe5c8af62a7099487ebc05a701e76714eebcffd06375",
        url=f"{_PYPI_FILES}/fe/2f/51a5de367c602592c018a42a23d57fba5f2689fe6c3bf025dcf043b39c61/{_UV[1]}",
    ),
}
PIP_WHEEL = PinnedFile(
    name=f"pip-{PIP_VERSION}-py3-none-any.whl",
    sha256="f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13",
)
# As other public projects pin the same release's files (2026-11): a wrong hash is a refusal, never a wrong program.
MICROMAMBA = {
    "x86_64": PinnedFile(
        name="micromamba-linux-64",
        sha256="366cd9cd8be14df1ab8ed50352a82111082a36686b2d389fdb79a92c3fafb3e3",
        url=f"{_MICROMAMBA}/micromamba-linux-64",
    ),
    "aarch64": PinnedFile(
        name="micromamba-linux-aarch64",
        sha256="9f93b974adcb4d166996af969b6cd371287d1a3e52733704727884d9b74cb7a7",
        url=f"{_MICROMAMBA}/micromamba-linux-aarch64",
    ),
}

TERRAFORM_VERSION = "1.11.4"
# By Terraform's own names of platforms, as several public projects pin HashiCorp's archives (2026-11). The program in
# the first has the SHA-256 that they name for it: 268000fca5c6….
TERRAFORM = {
    "linux_amd64": PinnedFile(
        name=f"terraform_{TERRAFORM_VERSION}_linux_amd64.zip",
        sha256="1ce994251c00281d6845f0f268637ba50c0005657eb3cf096b92f753b42ef4dc",
    ),
    "linux_arm64": PinnedFile(
        name=f"terraform_{TERRAFORM_VERSION}_linux_arm64.zip",
        sha256="a43d1d0da9b9bab214a8305a39db0e40869572594ccf50c416a7756499143633",
    ),
    "darwin_amd64": PinnedFile(
        name=f"terraform_{TERRAFORM_VERSION}_darwin_amd64.zip",
        sha256="a56d5002b9f7647291faccc3dd1a70350e60fb61e4c45037629508b8fdc2575b",
    ),
    "darwin_arm64": PinnedFile(
        name=f"terraform_{TERRAFORM_VERSION}_darwin_arm64.zip",
        sha256="867e0808fa971217043e25b7a792b10720c79b1546f8a68479b74f138be73e18",
    ),
}
