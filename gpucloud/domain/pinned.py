"""The tools that a node may fetch for itself: one version each, one hash for each file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedFile:
    """A file that must have this SHA-256, wherever it comes from."""

    name: str
    sha256: str


UV_VERSION = "0.13.9"
PIP_VERSION = "26.3"
MICROMAMBA_VERSION = "2.9.0-0"
MICROMAMBA_FOLDER = f"https://github.com/mamba-org/micromamba-releases/releases/download/{MICROMAMBA_VERSION}"

# By platform.machine(), for Linux. Hashes of wheels: PyPI, 2026-11.
UV_WHEELS = {
    "x86_64": PinnedFile(
        name=f"uv-{UV_VERSION}-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        sha256="d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19",
    ),
    "aarch64": PinnedFile(
        name=f"uv-{UV_VERSION}-py3-none-manylinux_2_28_aarch64.whl",
        sha256="ecb6028d79dc96fbeafffe5c8af62a7099487ebc05a701e76714eebcffd06375",
    ),
}
PIP_WHEEL = PinnedFile(
    name=f"pip-{PIP_VERSION}-py3-none-any.whl",
    sha256="f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13",
)
# As other public projects pin the same release's files (2026-11): a wrong hash is a refusal, never a wrong program.
MICROMAMBA = {
    "x86_64": PinnedFile(
        name="micromamba-linux-64", sha256="366cd9cd8be14df1ab8ed50352a82111082a36686b2d389fdb79a92c3fafb3e3"
    ),
    "aarch64": PinnedFile(
        name="micromamba-linux-aarch64", sha256="9f93b974adcb4d166996af969b6cd371287d1a3e52733704727884d9b74cb7a7"
    ),
}
