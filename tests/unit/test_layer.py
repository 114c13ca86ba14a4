from __future__ import annotations

import pytest

from gpucloud.domain.layer import layer_key, setup_digest, setup_files, setup_uses_tree, suffices


@pytest.mark.parametrize(
    ("setup", "files"),
    [
        ("pip install torch", ()),
        ("pip install -r requirements.txt", ("requirements.txt",)),
        ("pip install -r a/dev.txt -c 'b.lock' && cat a/dev.txt", ("a/dev.txt", "b.lock")),
    ],
)
def test_the_files_that_a_setup_names_are_found(setup, files):
    assert setup_files(setup) == files


@pytest.mark.parametrize(
    ("setup", "uses"),
    [
        ("pip install -r requirements.txt", False),
        ("pip install -e .", True),
        ("pip install '.[dev]'", True),
        ("./install.sh", True),
        ("echo 'open", True),
    ],
)
def test_a_setup_that_installs_from_the_tree_is_told_apart(setup, uses):
    assert setup_uses_tree(setup) is uses


def test_a_layer_depends_on_text_files_and_interpreter_and_on_the_tree_only_if_used():
    plain = setup_digest("pip install a", (), "/code/1")
    assert setup_digest("pip install a", (), "/code/2") == plain
    assert setup_digest("pip install b", (), "/code/1") != plain
    assert setup_digest("pip install a", (("r.txt", b"x"),), "/code/1") != plain
    assert setup_digest("pip install .", (), "/code/1") != setup_digest("pip install .", (), "/code/2")
    assert setup_digest("pip install a", (), "/code/1", requirements=("boto3",)) != plain
    keys = {layer_key(plain, "/p", (3, 11, 7)), layer_key(plain, "/q", (3, 11, 7)), layer_key(plain, "/p", (3, 12, 0))}
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("version", "enough"),
    [
        ("1.36.0", True),
        ("1.44.5", True),
        ("2.0", True),
        ("1.35.99", False),
        ("1.9", False),
        ("new", False),
        (None, False),
    ],
)
def test_boto3_suffices_from_conditional_writes_on(version, enough):
    assert suffices(version) is enough
