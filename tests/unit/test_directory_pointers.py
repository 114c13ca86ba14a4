"""Small files that name the checkpoint beside them: which are kept with it, and what they name when they are back."""

from __future__ import annotations

import pytest

from gpucloud.domain.checkpoint.directory import (
    Settling,
    Signature,
    at_path,
    beside,
    inside,
    named_by,
    readdressed,
    with_pointers,
)
from gpucloud.domain.checkpoint.layouts import Rule, checkpoints_of, find_sets
from gpucloud.domain.job.spec import Layout

FILE, DCP = Rule(layout=Layout.FILE), Rule(layout=Layout.DCP)
TWO = {"iter_0000400": ("iter_0000400/a",), "iter_0000500": ("iter_0000500/a",)}


def kept(rule, texts, *paths, size=8):
    """What is kept beside the newest set's own files, where those of `texts` hold that."""
    listing = {path: Signature(size=1 << 20, mtime_ns=n, inode=n) for n, path in enumerate(paths)}
    listing |= {path: Signature(size=size, mtime_ns=99, inode=99) for path in texts}
    sets = find_sets(rule, listing).sets
    checkpoints = checkpoints_of(sets, listing)
    near = beside(sets, listing, checkpoints)
    newest = max(sets, key=lambda one: one.written_ns(listing))
    found = with_pointers(newest, {path: texts[path] for path in near}, listing, checkpoints)
    return tuple(pointer.path for pointer in found.pointers), found.also


@pytest.mark.parametrize(
    ("rule", "paths", "name", "text"),
    [
        (FILE, ("model_0004999.pth",), "last_checkpoint", "model_0004999.pth"),
        (FILE, ("epoch_3.pth",), "last_checkpoint", "/home/ubuntu/code/out/epoch_3.pth"),
        (DCP, ("iter_0000500/__0_0.distcp", "iter_0000500/.metadata"), "latest_checkpointed_iteration.txt", "500\n"),
        (FILE, ("iter_0000500/mp_rank_00/model_optim_rng.pt",), "latest_checkpointed_iteration.txt", "500"),
        (Rule(done_file="DONE"), ("c/step_5/a.bin", "c/step_5/DONE"), "c/latest", "step_5"),
        (FILE, ("ckpt-7.pt",), "checkpoint", 'model_checkpoint_path: "ckpt-7.pt"'),
        (Rule(), ("ckpt-7.pt",), "state.json", '{"last": {"path": "out/ckpt-7.pt"}, "step": 7}'),
    ],
)
def test_a_small_text_that_names_a_checkpoint_is_kept_with_it(rule, paths, name, text):
    assert kept(rule, {name: text}, *paths) == ((name,), ())


@pytest.mark.parametrize(
    ("name", "text", "size"),
    [
        ("log.txt", "step 3: loss 0.2\nsaved model_0004999.pth today\n", 40),
        ("last_checkpoint", "model_0004999.pth", 5000),
        ("last_checkpoint", "model_0009999.pth", 17),
        ("last_checkpoint", "../out/model_0004999.pth", 24),
        ("deep/last_checkpoint", "model_0004999.pth", 17),
        ("steps.txt", "\n".join(["model_0004999.pth"] * 17), 400),
        ("nested.json", "[" * 3000, 3000),
    ],
)
def test_no_other_file_is_taken_for_one(name, text, size):
    assert kept(FILE, {name: text}, "model_0004999.pth", size=size) == ((), ())


def test_a_checkpoint_that_is_named_and_is_not_the_newest_is_kept_too():
    shards = [f"step-{n}/{name}" for n in (400, 500, 600) for name in ("__0_0.distcp", ".metadata")]
    also = ("step-400/.metadata", "step-400/__0_0.distcp")
    assert kept(DCP, {"latest": "step-600", "best.txt": "step-400"}, *shards) == (("best.txt", "latest"), also)
    assert kept(FILE, {"last": "a_1.pt"}, "a_1.pt", "a_2.pt") == (("last",), ("a_1.pt",))


@pytest.mark.parametrize(
    ("best", "also"),
    [
        (
            '"best_model_checkpoint": "out/checkpoint-400"',
            ("checkpoint-400/model.bin", "checkpoint-400/trainer_state.json"),
        ),
        ('"log": "x", "best_model_checkpoint":"/old/out/checkpoint-400"', None),
        ('"best_model_checkpoint": "out/checkpoint-600"', ()),
        ('"best_model_checkpoint": "out/checkpoint-300"', ()),
        ('"best_model_checkpoint": null', ()),
        ('"best_model_checkpoint": "../checkpoint-400"', ()),
        ('"best_model_checkpoint": "\\ud8"', ()),
    ],
)
def test_the_checkpoint_that_trainer_calls_the_best_is_kept_with_the_newest(best, also):
    paths = [f"checkpoint-{n}/{name}" for n in (400, 500, 600) for name in ("model.bin", "trainer_state.json")]
    listing = {path: Signature(size=1 << 20, mtime_ns=n, inode=n) for n, path in enumerate(paths)}
    sets = find_sets(Rule(), listing).sets
    states = inside(sets, listing)
    assert states == tuple(path for path in paths if path.endswith(".json"))
    texts = dict.fromkeys(states, f"{{{best}}}")
    newest = max(sets, key=lambda one: one.written_ns(listing))
    found = with_pointers(newest, texts, listing, checkpoints_of(sets, listing))
    expected = ("checkpoint-400/model.bin", "checkpoint-400/trainer_state.json") if also is None else also
    assert (found.name, found.also, found.pointers) == ("checkpoint-600", expected, ())


def test_a_state_of_trainer_that_is_no_text_of_a_sane_length_is_not_looked_into():
    listing = {"checkpoint-6/trainer_state.json": Signature(size=(16 << 20) + 1, mtime_ns=1, inode=1)}
    assert inside(find_sets(Rule(), listing).sets, listing) == ()


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("iter_0000500", "iter_0000500"),
        ("/mnt/other/iter_0000500/", "iter_0000500"),
        ("./iter_0000500", "iter_0000500"),
        ("iter_0000500/../iter_0000400", None),
        ("iter_0000600", None),
        ("", None),
    ],
)
def test_a_path_leads_to_a_checkpoint_of_the_directory_alone(value, found):
    assert at_path(value, "", TWO) == found


def test_a_number_names_the_checkpoint_of_that_step_beside_it():
    assert named_by("500", "", TWO) == ("iter_0000500",)
    assert named_by("500", "deep", TWO) == ()
    assert named_by("9" * 4000, "", TWO) == ()


def test_what_names_an_absolute_path_leads_to_where_the_checkpoint_lies_now():
    assert readdressed("/old/out/iter_0000500\n", "", "/new/out", TWO) == "/new/out/iter_0000500\n"
    for text in ("iter_0000500", "500", "/old/out/other", "/new/out/iter_0000500"):
        assert readdressed(text, "", "/new/out", TWO) == text


def test_a_set_is_at_rest_while_what_names_it_is_written_again_and_new_when_it_names_another():
    settling, paths = Settling(1.0), ("a_1.pt", "a_2.pt")
    for now, text, ready in ((0.0, "a_1.pt", 0), (0.9, "a_1.pt", 0), (1.0, "a_1.pt", 1), (1.1, "a_2.pt", 0)):
        listing = {path: Signature(size=9999, mtime_ns=n, inode=n) for n, path in enumerate(paths)}
        listing["last"] = Signature(size=9, mtime_ns=int(now * 10), inode=9)
        (one,) = find_sets(FILE, listing).sets
        one = with_pointers(one, {"last": text}, listing, checkpoints_of((one,), listing))
        assert len(settling.look((one,), listing, now)) == ready, now
        if ready:
            settling.take(one, one.content(listing))
    assert settling.look((one,), listing, 2.2) == (one,)
