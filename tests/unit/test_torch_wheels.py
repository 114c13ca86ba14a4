from __future__ import annotations

import pytest

from gpucloud.domain.node.layer import names_torch, torch_backend, why_no_gpu


@pytest.mark.parametrize(
    ("names", "backend"),
    [
        ((), "cpu"),
        (("NVIDIA B200",), "auto"),
        (("Tesla T4",), "auto"),
        (("NVIDIA A100-SXM4-40GB",), "auto"),
        (("Quadro RTX 6000",), "auto"),
        (("NVIDIA L40S",), "auto"),
        (("Tesla V100-SXM2-16GB",), "cu126"),
        (("Tesla P100-PCIE-16GB",), "cu126"),
        (("Tesla M60",), "cu126"),
        (("NVIDIA GeForce GTX 1080 Ti",), "cu126"),
    ],
)
def test_uv_chooses_torchs_build_by_the_driver_save_for_gpus_that_the_newest_have_no_code_for(names, backend):
    assert torch_backend(names) == backend


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
