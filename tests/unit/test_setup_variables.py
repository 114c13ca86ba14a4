from __future__ import annotations

from pathlib import Path

import pytest

from gpucloud.agent.layer import build
from gpucloud.agent.layer.environment import Environment, Places, only_from, variables
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
    asked = only_from("https://torch", {**env, "UV_FIND_LINKS": "https://c"})
    assert asked == {"UV_DEFAULT_INDEX": "https://torch", "HOME": "/h", "UV_NO_CONFIG": "1"}


@pytest.mark.parametrize(
    ("setup", "fetched", "pip"),
    [
        ("bash install.sh", True, True),
        ("make deps", True, True),
        ("pip install x", True, True),
        ("uv pip install x", True, False),
        ("echo ready", False, False),
    ],
)
def test_a_setup_that_may_call_uv_or_pip_finds_both(setup, fetched, pip, monkeypatch, tmp_path):
    work, ran = _work(setup, tmp_path, monkeypatch)
    work._provide_tools(Environment(folder=tmp_path, conda=False), needed=False)
    assert (work.uv == "/tools/uv", any(command.startswith("echo 'pip==") for command in ran)) == (fetched, pip)


def test_uv_is_fetched_where_a_setup_took_away_what_had_sufficed(monkeypatch, tmp_path):
    work, _ = _work("echo ready", tmp_path, monkeypatch)
    made = Environment(folder=tmp_path, conda=False)
    work._provide_tools(made, needed=False)
    assert work.uv is None
    assert work._own_uv(made) == "/tools/uv"


def _work(setup, folder, monkeypatch):
    """A layer under way on a machine without uv and pip, and the commands of our own that it runs."""
    ran: list[str] = []
    (folder / "bin").mkdir()
    (folder / "lib/python3.11/site-packages").mkdir(parents=True)
    monkeypatch.setattr(build.tools, "find_uv", lambda *_: None)
    monkeypatch.setattr(build.tools, "fetch_uv", lambda *_: "/tools/uv")
    monkeypatch.setattr(build, "installed_version", lambda *_: None)
    monkeypatch.setattr(build, "show_base", lambda _: None)
    monkeypatch.setattr(build._Work, "_run", lambda _self, _made, command, **_: ran.append(command))
    order = LayerOrder(wanted=WANTED, setup=setup, code="/c")
    return build._Work(order=order, places=PLACES, folder=folder, torch_backend="auto"), ran
