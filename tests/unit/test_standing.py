"""How a job's checkpoints stand: what a restore takes first, what stays, what may go."""

from datetime import datetime, timezone

import pytest

from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Manifest,
    Piece,
    Promise,
    best_key,
    commit_key,
    data_key,
    generation_key,
)
from gpucloud.domain.checkpoint.standing import CheckpointMark, Found, nearest, standings, superfluous

AT = datetime(2026, 1, 2, tzinfo=timezone.utc)


def found(commit):
    piece = Piece(key=data_key(commit, "rank-00000-of-00001.safetensors"), size=10, crc32=(1,))
    return Found(manifest=Manifest(commit=commit, world=1, promise=Promise(), pieces=(piece,)), committed_at=AT)


def keys_of(commits, generations=(1, 2)):
    data = [data_key(c, "rank-00000-of-00001.safetensors") for c in commits]
    return [*map(generation_key, generations), *map(commit_key, commits), *data]


A, B, C, D = Commit(1, 10), Commit(1, 20), Commit(2, 20), Commit(2, 30)
BASES = {1: None, 2: A}


def marks(standing):
    return [(one.commit, sorted(mark.value for mark in one.marks)) for one in standing]


def test_the_order_is_that_of_restoring_and_each_says_what_becomes_of_it():
    standing = standings(keys_of([A, B, C, D]), BASES, {c: found(c) for c in (A, B, C, D)}, keep=2)
    assert marks(standing) == [(D, ["kept", "next"]), (C, ["kept"]), (A, ["base", "kept"]), (B, [])]


def test_what_another_gpucloud_wrote_is_no_damage_stays_and_is_where_a_restore_ends():
    foreign = Found(manifest=None, committed_at=AT, other_format=True)
    oldest = Commit(1, 5)
    there = [oldest, A, B, C, D]
    what = {**{c: found(c) for c in (A, B, C)}, D: foreign, oldest: foreign}
    standing = standings(keys_of(there), {1: None, 2: B}, what, keep=2)
    assert marks(standing) == [
        (D, ["kept", "other_format"]),
        (C, ["kept"]),
        (B, ["base", "kept"]),
        (A, []),
        (oldest, ["kept", "other_format"]),
    ]
    gone = superfluous(keys_of(there), standing)
    assert gone.keys == (commit_key(A), data_key(A, "rank-00000-of-00001.safetensors"))
    newest_read = standings(keys_of(there), {1: None, 2: B}, {**what, D: found(D)}, keep=2)
    assert marks(newest_read)[0] == (D, ["kept", "next"])


def test_the_best_stays_and_what_was_called_so_beside_the_chain_or_before_does_not():
    newest = Commit(2, 40)
    there = [A, B, C, D, newest]
    keys = [*keys_of(there), *map(best_key, (A, B))]  # B came after what generation 2 began from
    standing = standings(keys, BASES, {c: found(c) for c in there}, keep=2)
    assert marks(standing) == [
        (newest, ["kept", "next"]),
        (D, ["kept"]),
        (C, []),
        (A, ["base", "best", "kept"]),
        (B, []),
    ]
    assert superfluous(keys, standing).keys[-1] == "best/000001/000000020.json"
    keys.append(best_key(C))
    assert marks(standings(keys, BASES, {c: found(c) for c in there}, keep=2))[2] == (C, ["best", "kept"])


def test_a_damaged_or_incomplete_one_is_not_restored_first_and_does_not_count_among_the_kept():
    keys = [key for key in keys_of([A, B, C, D]) if key != data_key(C, "rank-00000-of-00001.safetensors")]
    there = {c: found(c) for c in (A, B, C)} | {D: Found(manifest=None, committed_at=AT)}
    standing = standings(keys, BASES, there, keep=2)
    assert marks(standing) == [
        (D, ["damaged"]),
        (C, ["incomplete"]),
        (A, ["base", "kept", "next"]),
        (B, ["kept"]),
    ]
    assert [one.sound is None for one in standing] == [True, True, False, False]


def test_at_least_two_are_kept_and_all_when_none_can_be_restored():
    one_kept = standings(keys_of([C, D]), {2: None, 1: None}, {c: found(c) for c in (C, D)}, keep=1)
    assert marks(one_kept) == [(D, ["kept", "next"]), (C, ["kept"])]
    nothing = Found(manifest=None, committed_at=AT)
    broken = standings(keys_of([C, D]), {2: None, 1: None}, {C: nothing, D: nothing}, keep=2)
    assert marks(broken) == [(D, ["damaged", "kept"]), (C, ["damaged", "kept"])]


def test_a_commit_whose_generation_has_no_record_is_never_restored():
    standing = standings(keys_of([A, D], generations=(1,)), {1: None}, {A: found(A), D: found(D)}, keep=2)
    assert marks(standing) == [(A, ["kept", "next"]), (D, ["unreachable"])]


def test_what_is_not_kept_goes_manifests_first_and_with_it_what_was_never_committed():
    keys = [*keys_of([A, B, C, D]), data_key(Commit(1, 25), "torn"), data_key(Commit(2, 35), "torn")]
    gone = superfluous(keys, standings(keys, BASES, {c: found(c) for c in (A, B, C, D)}, keep=2))
    assert gone.commits == (B,)
    assert gone.keys[0] == commit_key(B)
    assert sorted(gone.keys[1:]) == sorted(
        [
            data_key(B, "rank-00000-of-00001.safetensors"),
            data_key(Commit(1, 25), "torn"),
            data_key(Commit(2, 35), "torn"),
        ]
    )
    assert gone.unfinished == 2


@pytest.mark.parametrize(("step", "near"), [(12, 10), (15, 10), (16, 20), (99, 30)])
def test_the_nearest_step_is_named(step, near):
    assert nearest(step, standings(keys_of([A, B, C, D]), BASES, {c: found(c) for c in (A, B, C, D)}, keep=2)) == near


def test_marks_have_words_that_programs_read():
    assert [mark.value for mark in CheckpointMark] == [
        "next",
        "base",
        "best",
        "kept",
        "damaged",
        "other_format",
        "incomplete",
        "unreachable",
    ]
