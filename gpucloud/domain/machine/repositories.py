"""NVIDIA's own package repositories: the key is pinned by its fingerprint, the key's file by what apt is told."""

from __future__ import annotations

from dataclasses import dataclass

from gpucloud.domain.machine.apt import write
from gpucloud.domain.machine.decisions import Download, MachineStep, Run
from gpucloud.domain.machine.facts import MachineFacts

SUPPORTED = (("ubuntu", "22.04"), ("ubuntu", "24.04"))
"""Where gpucloud installs system software; elsewhere it only looks."""

_ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "sbsa"}  # NVIDIA's names for them
# What NVIDIA's own package for its CUDA repository puts there, so that it may come later and finds itself.
_KEYRING = "/usr/share/keyrings/cuda-archive-keyring.gpg"
_CUDA_KEY = "EB693B3035CD5710E231E123A4B469963BF863CC"
_CUDA = "https://developer.download.nvidia.com/compute/cuda/repos"
_PREFERENCE = "Package: *\nPin: release l=NVIDIA CUDA\nPin-Priority: 600\n"
_TOOLKIT_KEYRING = "/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg"
_TOOLKIT_KEY = "C95B321B61E88C1809C4F759DDCAE044F796ECB0"
_TOOLKIT = "https://nvidia.github.io/libnvidia-container"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repository:
    name: str
    key_url: str
    fingerprint: str
    keyring: str
    list_path: str
    line: str
    preference: str = ""


def cuda(facts: MachineFacts) -> MachineStep | None:
    """Return the step that adds NVIDIA's repository of drivers; None when apt knows it.

    Source: NVIDIA, "Driver installation guide", Ubuntu, network repository.
    """
    if any("developer.download.nvidia.com/compute/cuda/repos" in source.text for source in facts.sources):
        return None
    distribution = f"ubuntu{facts.release.replace('.', '')}"
    architecture = _ARCHITECTURES[facts.arch]
    place = f"{_CUDA}/{distribution}/{architecture}"
    repository = _Repository(
        name="nvidia-repository",
        key_url=f"{place}/3bf863cc.pub",
        fingerprint=_CUDA_KEY,
        keyring=_KEYRING,
        list_path=f"/etc/apt/sources.list.d/cuda-{distribution}-{architecture}.list",
        line=f"deb [signed-by={_KEYRING}] {place}/ /\n",
        preference=_PREFERENCE,
    )
    return _added(repository, "Ubuntu's archive has no driver that fits")


def toolkit(facts: MachineFacts) -> MachineStep | None:
    """Return the step that adds NVIDIA's repository of the container toolkit; None when apt knows it.

    Source: NVIDIA, "Container Toolkit", installation guide.
    """
    if any("libnvidia-container" in source.text for source in facts.sources):
        return None
    repository = _Repository(
        name="toolkit-repository",
        key_url=f"{_TOOLKIT}/gpgkey",
        fingerprint=_TOOLKIT_KEY,
        keyring=_TOOLKIT_KEYRING,
        list_path="/etc/apt/sources.list.d/nvidia-container-toolkit.list",
        line=f"deb [signed-by={_TOOLKIT_KEYRING}] {_TOOLKIT}/stable/deb/$(ARCH) /\n",
    )
    return _added(repository, "no NVIDIA container toolkit")


def _added(repository: _Repository, why: str) -> MachineStep:
    key = f"{repository.name}.gpg"
    preference = (write("/etc/apt/preferences.d/cuda-repository-pin-600", repository.preference),)
    return MachineStep(
        name=repository.name,
        why=why,
        downloads=(Download(url=repository.key_url, name=key, fingerprint=repository.fingerprint),),
        commands=(
            Run(argv=("install", "-D", "-m", "644", f"{{folder}}/{key}", repository.keyring)),
            *(preference if repository.preference else ()),
            # The source comes last: with it apt knows the repository, and needs all of the above.
            write(repository.list_path, repository.line),
        ),
    )
