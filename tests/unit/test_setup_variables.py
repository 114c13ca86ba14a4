from __future__ import annotations

from pathlib import Path

import pytest

from gpucloud.agent.layer.environment import Places, only_from, variables
from gpucloud.domain.node.layer import LayerOrder, LayerWanted

PLACES = Places(layers=Path("/l"), tools=Path("/l/.bin"), cache=Path("/l/.cache"))
WANTED = LayerWanted(digest="d", always=True, boto3=False, torch=True)
MIRROR = "https://me:secret@mirror.example/simple"


@pytest.mark.parametrize(
    ("mirror", "env", "expected"),
    [
        (None, (), ("auto", None, None)),
        (None, (("UV_TORCH_BACKEND", "cu128"),), ("cu128", None, None)),
        (MIRROR, (), (None, MIRROR, MIRROR)),
        (MIRROR, (("UV_TORCH_BACKEND", "cu128"),), ("cu128", MIRROR, MIRROR)),
        (None, (("PIP_INDEX_URL", "https://x"),), (None, "https://x", "https://x")),
        (None, (("UV_DEFAULT_INDEX", "https://x"),), (None, "https://x", None)),
    ],
)
def test_uv_chooses_torchs_build_unless_another_index_is_named(mirror, env, expected, monkeypatch):
    for name in ("UV_TORCH_BACKEND", "UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    order = LayerOrder(wanted=WANTED, setup="x", code="/c", env=env, pip_mirror=mirror)
    made = variables(order, PLACES, None, "auto")
    assert tuple(made.get(name) for name in ("UV_TORCH_BACKEND", "UV_DEFAULT_INDEX", "PIP_INDEX_URL")) == expected


def test_uv_trusts_whom_the_machine_trusts():
    order = LayerOrder(wanted=WANTED, setup="x", code="/c")
    assert variables(order, PLACES, None, "auto")["UV_SYSTEM_CERTS"] == "1"


def test_torchs_own_mirror_is_the_only_index_for_it():
    env = {"UV_TORCH_BACKEND": "auto", "UV_INDEX": "https://a", "UV_DEFAULT_INDEX": "https://b", "HOME": "/h"}
    assert only_from("https://torch", env) == {"UV_DEFAULT_INDEX": "https://torch", "HOME": "/h"}
