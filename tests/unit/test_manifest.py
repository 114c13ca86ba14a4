"""Keys, manifests, what is restored first and what may be deleted."""

import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Level,
    Manifest,
    Notes,
    Piece,
    Promise,
    Why,
    best_bytes,
    best_key,
    collectable,
    commit_key,
    commits,
    data_key,
    generation_bytes,
    generation_key,
    generations,
    manifest_bytes,
    read_base,
    read_best,
    read_manifest,
    restore_order,
    seal,
    starting,
    starting_key,
    unseal,
)

MANIFEST = Manifest(
    commit=Commit(7, 1200),
    world=2,
    promise=Promise(),
    pieces=(
        Piece(key="data/000007/000001200/a", size=3, crc32=(1,)),
        Piece(key="data/000007/000001200/b", size=0, crc32=(), mtime_ns=2**63 - 1),
    ),
    why=Why.NOTICE,
)


def readable(data):
    try:
        read_manifest(data)
    except ValueError:
        return False
    return True


def test_what_a_resume_promises_is_read_as_it_was_written_and_cut_where_it_is_long():
    lowered = replace(MANIFEST, promise=Promise(Level.SAME_SAMPLES, "world 2 → 4"))
    assert read_manifest(manifest_bytes(lowered)) == lowered
    long = replace(MANIFEST, promise=Promise(Level.BEST_EFFORT, "x" * 5000))
    assert len(read_manifest(manifest_bytes(long)).promise.reason) == 1000
    body = unseal(manifest_bytes(MANIFEST))
    assert not any(readable(seal({**body, "reason": reason})) for reason in (None, 7, "x" * 5000))


@pytest.mark.parametrize("metric", [True, "1", None, float("inf"), float("nan")])
def test_a_metric_is_a_number_that_can_be(metric):
    assert read_best(best_bytes(-0.25)) == -0.25
    with pytest.raises(ValueError, match="not a metric"):
        read_best(seal({"metric": metric}))


def test_the_best_is_kept_and_forgotten_once_there_is_a_better_one():
    keys = [generation_key(1), *(commit_key(Commit(1, n)) for n in (1, 2, 3, 4, 5)), *map(best_key, (Commit(1, 1),))]
    assert collectable(keys, generation=1, base=None, keep=2, best=Commit(1, 1)) == (
        "commit/000001/000000003.json",
        "commit/000001/000000002.json",
    )
    assert collectable([*keys, best_key(Commit(1, 4))], generation=1, base=None, keep=2, best=Commit(1, 4))[-2:] == (
        "commit/000001/000000001.json",
        "best/000001/000000001.json",
    )


def test_what_a_script_noted_is_read_as_it_was_written_and_bounded():
    noted = replace(MANIFEST, notes=Notes(epoch=3, values={"config": {"width": 2}, "names": ["a"]}))
    assert read_manifest(manifest_bytes(noted)) == noted
    body = unseal(manifest_bytes(noted))
    wrong = ({"epoch": -1}, {"epoch": "3"}, {"values": []}, {"values": None}, {"values": {"text": "x" * 70_000}})
    assert not any(readable(seal({**body, **change})) for change in wrong)


@pytest.mark.parametrize("one", Level)
@pytest.mark.parametrize("other", Level)
def test_the_weaker_of_two_promises_keeps_its_reason(one, other):
    weaker = Promise(one, "one").weaker(Promise(other, "other"))
    order = list(Level)
    assert weaker == (Promise(other, "other") if order.index(other) > order.index(one) else Promise(one, "one"))


def test_keys_sort_as_their_numbers_do():
    assert generation_key(7) == "gen/000007.json"
    assert commit_key(Commit(7, 1200)) == "commit/000007/000001200.json"
    assert data_key(Commit(7, 1200), "x.bin") == "data/000007/000001200/x.bin"


def test_numbers_beyond_the_padding_are_still_told_apart():
    keys = [generation_key(n) for n in (1, 1_700_000_000_000, 999_999)]
    assert generations(keys) == (1_700_000_000_000, 999_999, 1)
    assert commits([commit_key(Commit(1, 9)), commit_key(Commit(1, 10**10))]) == (Commit(1, 10**10), Commit(1, 9))


def test_other_keys_are_no_checkpoints():
    assert commits(["commit/000007/000000001.json.tmp", "commit/7/1.json", "x/commit/000007/000000001.json"]) == ()
    assert generations(["gen/x.json", "gen/000001.txt"]) == ()


def test_a_manifest_is_read_as_it_was_written():
    assert read_manifest(manifest_bytes(MANIFEST)) == MANIFEST


@pytest.mark.parametrize(
    "piece",
    [
        {"size": -1, "crc32": []},
        {"size": True, "crc32": [1]},
        {"size": 2.0, "crc32": [1]},
        {"size": 1, "crc32": []},
        {"size": 1, "crc32": [1, 2]},
        {"size": 1, "crc32": ["1"]},
        {"size": 1, "crc32": "1"},
        {"size": 0, "crc32": [0]},
        {"size": 1, "crc32": None},
        {"size": 1, "sha256": "ab"},
        *({"size": 1, "crc32": [1], "mtime_ns": wrong} for wrong in (-1, 2**63, True, 1.5, "1", None)),
    ],
)
def test_a_manifest_with_sums_that_cannot_be_is_none(piece):
    body = unseal(manifest_bytes(MANIFEST))
    body["pieces"] = [{"key": "data/000007/000001200/a", **piece}]
    assert not readable(seal(body))


def test_a_manifest_for_no_known_reason_is_none():
    body = unseal(manifest_bytes(MANIFEST))
    assert body["why"] == "notice"
    assert not readable(seal({**body, "why": "whim"}))


def test_an_object_matches_when_every_part_does():
    piece = Piece(key="data/000007/000001200/a", size=3, crc32=(zlib.crc32(b"abc"),))
    assert [piece.matches(data) for data in (b"abc", b"abd", b"ab", b"abcd", b"")] == [True, False, False, False, False]


def test_a_generations_base_is_read_as_it_was_written():
    assert read_base(generation_bytes(base=Commit(3, 40), owner="me")) == Commit(3, 40)
    assert read_base(generation_bytes(base=None, owner="me")) is None


@pytest.mark.parametrize("bit", range(8))
def test_one_flipped_bit_anywhere_in_a_manifest_is_noticed(bit):
    whole = manifest_bytes(MANIFEST)
    for place in range(len(whole)):
        damaged = whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :]
        assert not readable(damaged)


def test_a_cut_manifest_is_noticed():
    whole = manifest_bytes(MANIFEST)
    for length in range(len(whole)):
        assert not readable(whole[:length])


def test_a_replaced_writers_late_commits_come_after_the_base():
    keys = [generation_key(1), generation_key(2), *(commit_key(Commit(1, step)) for step in (10, 20, 30))]
    order = list(restore_order(keys, {1: None, 2: Commit(1, 20)}.get))
    assert order == [Commit(1, 20), Commit(1, 30), Commit(1, 10)]


def test_a_generations_own_commits_come_first_and_its_base_is_not_asked_for():
    keys = [generation_key(1), generation_key(2), commit_key(Commit(1, 30)), commit_key(Commit(2, 25))]
    assert next(restore_order(keys, lambda _: pytest.fail("asked"))) == Commit(2, 25)


def test_nothing_is_deleted_once_a_newer_generation_exists():
    keys = [generation_key(1), generation_key(2), *(commit_key(Commit(1, step)) for step in range(1, 9))]
    assert collectable(keys, generation=1, base=None, keep=2) == ()


def test_what_says_that_an_attempt_starts_is_no_generation_and_goes_with_the_next_one():
    keys = [generation_key(1), starting_key(1), starting_key(2), *(commit_key(Commit(1, step)) for step in (1, 2))]
    assert generations(keys) == (1,)
    assert starting(keys) == (1, 2)
    assert collectable(keys, generation=1, base=None, keep=2) == (starting_key(1),)


def test_manifests_go_before_their_data_and_torn_saves_go_too():
    saved = [commit_key(Commit(1, s)) for s in (10, 20, 30)] + [data_key(Commit(1, s), "x") for s in (10, 15, 20, 30)]
    assert collectable([generation_key(1), *saved], generation=1, base=None, keep=2) == (
        "commit/000001/000000010.json",
        "data/000001/000000010/x",
        "data/000001/000000015/x",
    )


def test_what_is_being_saved_now_is_not_deleted():
    saved = [generation_key(1), commit_key(Commit(1, 10)), data_key(Commit(1, 10), "x"), data_key(Commit(1, 20), "x")]
    assert collectable(saved, generation=1, base=None, keep=2) == ()


def test_however_few_are_wanted_two_are_kept():
    saved = [generation_key(1), *(commit_key(Commit(1, s)) for s in (10, 20, 30))]
    assert collectable(saved, generation=1, base=None, keep=0) == ("commit/000001/000000010.json",)


steps = st.integers(1, 8)
stored = st.sets(st.builds(Commit, st.integers(1, 4), steps), max_size=20)


@given(committed=stored, torn=stored, keep=st.integers(0, 5), data=st.data())
def test_collecting_never_takes_what_a_restore_may_need(committed, torn, keep, data):
    generation = max((c.generation for c in committed), default=1)
    older = [c for c in committed if c.generation < generation]
    base = data.draw(st.sampled_from(sorted(older))) if older else None
    keys = {generation_key(g) for g in range(1, generation + 1)} | {commit_key(c) for c in committed}
    keys |= {data_key(c, "x") for c in committed | torn}

    def base_of(asked):
        return base if asked == generation else None

    gone = collectable(sorted(keys), generation=generation, base=base, keep=keep)
    assert set(gone) <= keys
    left = keys - set(gone)
    before = [c for c in restore_order(keys, base_of) if c in committed]
    after = [c for c in restore_order(left, base_of) if commit_key(c) in left]
    assert after[: max(keep, 2)] == before[: max(keep, 2)]
    assert base is None or commit_key(base) in left
    assert all(data_key(c, "x") in left for c in after)
    # Killed in the middle of deleting, no manifest is left without its data.
    for done in range(len(gone)):
        rest = keys - set(gone[:done])
        assert all(data_key(c, "x") in rest for c in commits(rest))
