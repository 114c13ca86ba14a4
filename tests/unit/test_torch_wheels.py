from __future__ import annotations

import pytest

from gpucloud.domain.node.layer import names_torch, torch_index, torch_url, why_no_gpu


@pytest.mark.parametrize(
    ("driver", "names", "index"),
    [
        (None, (), "cpu"),
        ("610.57.04", ("NVIDIA B200",), "cu130"),
        ("580.159.04", ("NVIDIA H200",), "cu130"),
        ("580.65.06", ("Tesla T4",), "cu130"),
        ("580.65.05", ("Tesla T4",), "cu128"),
        ("570.172.08", ("NVIDIA H100 80GB HBM3",), "cu128"),
        ("535.261.03", ("NVIDIA A10G",), "cu128"),
        ("525.60.13", ("NVIDIA A100-SXM4-40GB",), "cu128"),
        ("525.60.12", ("NVIDIA A100-SXM4-40GB",), "cu126"),
        ("470.256.02", ("Tesla T4",), "cu126"),
        ("580.159.04", ("Tesla V100-SXM2-16GB",), "cu126"),
        ("535.261.03", ("Tesla P100-PCIE-16GB",), "cu126"),
        ("580.159.04", ("Tesla M60",), "cu126"),
        ("580.159.04", ("NVIDIA GeForce GTX 1080 Ti",), "cu126"),
        ("580.159.04", ("Quadro RTX 6000",), "cu130"),
        ("580.159.04", ("NVIDIA L40S",), "cu130"),
    ],
)
def test_the_index_of_torchs_wheels_follows_driver_and_kind_of_gpu(driver, names, index):
    assert torch_index(driver, names) == index


@pytest.mark.parametrize(
    ("index", "mirror", "machine", "url"),
    [
        ("cu130", None, "x86_64", None),
        ("cu130", None, "aarch64", "https://download.pytorch.org/whl/cu130"),
        ("cu128", None, "x86_64", "https://download.pytorch.org/whl/cu128"),
        ("cpu", None, "x86_64", "https://download.pytorch.org/whl/cpu"),
        ("cu130", "https://mirror.example/whl/", "x86_64", "https://mirror.example/whl/cu130"),
    ],
)
def test_torch_comes_from_pypi_where_that_is_the_build_and_there_is_no_mirror(index, mirror, machine, url):
    assert torch_url(index, mirror, machine) == url


@pytest.mark.parametrize(
    ("torch", "cuda", "driver", "reason"),
    [
        ("2.13.0", "13.0", "580.159.04", None),
        ("2.11.0+cu128", "12.8", "535.261.03", None),
        ("3.0", "14.0", "580.159.04", None),
        (
            "2.13.0", "13.0", "570.172.08",
            "torch 2.13.0 is built for CUDA 13.0, which needs driver 580.65.06; the node has 570.172.08",
        ),
        (
            "2.13.0+cpu", None, "580.159.04",
            "torch 2.13.0+cpu is built for the CPU, and the node has NVIDIA GPUs (driver 580.159.04)",
        ),
    ],
)  # fmt: skip
def test_a_torch_that_would_leave_the_gpus_unused_is_named_with_both_versions(torch, cuda, driver, reason):
    assert why_no_gpu(torch, cuda, driver) == reason


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("pip install torch", True),
        ("pip install 'torch==2.6.*' numpy", True),
        ("torch>=2.6\nnumpy\n", True),
        ("pip install torch[opt] x", True),
        ("dependencies:\n  - pytorch=2.5\n", True),
        ('dependencies = ["torch>=2"]', True),
        ("pip install wheels/torch-2.13.0-cp311-cp311-linux_x86_64.whl", True),
        ("pip install git+https://github.com/pytorch/vision", False),
        ("pip install x --index-url https://download.pytorch.org/whl/cu126", False),
        ("pip install torchvision lightning", False),
        ("pip install pytorch-lightning", False),
        ("# torch comes from the image\nnumpy", False),
        ("pip install -r torch.txt", False),
        ("", False),
    ],
)
def test_a_text_that_installs_torch_by_name_is_told_apart(text, names):
    assert names_torch(text) is names
