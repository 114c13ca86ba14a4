"""What `ci init` writes over, and what stays."""

from __future__ import annotations

import pytest

from gpucloud.adapters.packaging import Update, sha256, update

OLD, NEW, EDITED = b"old", b"new", b"edited"


@pytest.mark.parametrize(
    ("there", "recorded", "wanted", "becomes"),
    [
        (None, None, NEW, "written"),
        (NEW, None, NEW, None),
        (OLD, OLD, NEW, "written"),
        (NEW, OLD, NEW, None),
        (None, OLD, NEW, "written"),
        (EDITED, NEW, NEW, "kept"),
        (EDITED, OLD, NEW, "in_the_way"),
        (EDITED, None, NEW, "in_the_way"),
    ],
)
def test_what_only_its_owner_changed_stays_and_what_both_changed_is_in_the_way(
    there: bytes | None, recorded: bytes | None, wanted: bytes, becomes: str | None
) -> None:
    found = update(
        {"a": wanted}, {} if there is None else {"a": there}, {} if recorded is None else {"a": sha256(recorded)}, ()
    )
    expected = dict.fromkeys(("written", "removed", "kept", "in_the_way"), ()) | ({becomes: ("a",)} if becomes else {})
    assert found == Update(**expected)


def test_an_outdated_file_goes_if_it_is_as_it_was_written() -> None:
    record = {"a": sha256(OLD), "b": sha256(OLD), "c": sha256(OLD)}
    found = update({"new": NEW}, {"a": OLD, "b": EDITED}, record, ("a", "b", "c"))
    assert (found.written, found.removed) == (("new",), ("a",))
