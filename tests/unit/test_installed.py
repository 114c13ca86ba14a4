from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from gpucloud.agent.layer.environment import freeze, installed_version, torch_cuda

# As torch 2.13 writes it; its CPU build says `cuda: _Optional[str] = None`.
VERSION = """\
from typing import Optional as _Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '2.13.0'
debug = False
cuda: _Optional[str] = {}
git_version = 'cf30153c0eeffbcd1c7d5183c6baf45eb6c4a1f3'
hip: _Optional[str] = None
"""


def test_the_first_of_a_name_on_the_path_counts_however_it_is_spelt(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    for name in ("Typing_Extensions-4.1.dist-info", "torch-2.13.0+cu126.dist-info"):
        (first / name).mkdir(parents=True)
    for name in ("typing-extensions-3.0.dist-info", "torchvision-0.20.dist-info", "old-1.0-py3.11.egg-info"):
        (second / name).mkdir(parents=True)
    path = [str(tmp_path / "none.zip"), str(first), str(second)]
    assert freeze(path) == ("old==1.0", "torch==2.13.0+cu126", "torchvision==0.20", "Typing_Extensions==4.1")
    assert installed_version("torch", path) == "2.13.0+cu126"
    assert installed_version("numpy", path) is None


@pytest.mark.parametrize(("written", "cuda"), [("'13.0'", "13.0"), ("'12.8'", "12.8"), ("None", None)])
def test_the_cuda_of_a_torch_is_read_from_its_version_file(tmp_path, written, cuda):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(VERSION.format(written))
    assert torch_cuda([str(tmp_path / "elsewhere"), str(tmp_path)]) == cuda


def test_the_installed_torch_is_read_as_it_says_itself():
    place = sysconfig.get_path("purelib")
    assert (Path(place) / "torch" / "version.py").is_file()
    assert torch_cuda([place]) == torch.version.cuda
    assert installed_version("torch", [place]) == torch.__version__
