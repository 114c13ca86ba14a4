"""A checkpoint that several nodes write: what is called for, answered, whole, and where each file comes back."""

from __future__ import annotations

import pickle

import pytest

from gpucloud.domain.checkpoint.directory import Signature, files_apart, files_for, object_name, paths_of
from gpucloud.domain.checkpoint.layouts import Rule, find_sets
from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Level,
    Manifest,
    Piece,
    Promise,
    collectable,
    data_key,
    generation_bytes,
    read_attempt,
)
from gpucloud.domain.checkpoint.rounds import (
    Answer,
    Call,
    Round,
    answer_bytes,
    call_bytes,
    is_superseded,
    read_answer,
    read_call,
    round_of,
    shards_missing,
    share_of,
    to_call_for,
)
from gpucloud.domain.job.spec import Layout

COMMIT = Commit(3, 500)


def listing(*paths):
    return {path: Signature(size=1, mtime_ns=n, inode=n) for n, path in enumerate(paths)}


def rule(layout=Layout.AUTO, **options):
    return Rule(layout=layout, ranks=2, nodes=3, per_node=True, node=1, **options)


def piece(path, node=None, crc32=0):
    return Piece(key=data_key(COMMIT, object_name(path, node)), size=1, crc32=(crc32,))


def manifest(*pieces):
    return Manifest(commit=COMMIT, world=6, promise=Promise(Level.BEST_EFFORT), pieces=pieces)


HF = ("checkpoint-500/trainer_state.json", "checkpoint-500/rng_state_0.pth", "checkpoint-500/rng_state_1.pth")
DCP = ("step-500/__0_0.distcp", "step-500/.metadata")
ZERO = (
    "global_step500/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "global_step500/mp_rank_00_model_states.pt",
    "latest",
)


@pytest.mark.parametrize(
    ("of", "folder", "called", "there", "complete"),
    [
        (rule(), "checkpoint-500", HF, (), False),
        (rule(), "checkpoint-500", HF, ("checkpoint-500/rng_state_2.pth",), False),
        (rule(), "checkpoint-500", HF, ("checkpoint-500/rng_state_2.pth", "checkpoint-500/rng_state_3.pth"), True),
        (rule(), "checkpoint-500", HF, ("checkpoint-500/rng_state_0.pth", "checkpoint-500/rng_state_1.pth"), False),
        (rule(), "step-500", DCP, (), True),
        (rule(), "step-500", DCP, ("step-500/__2_0.distcp",), True),
        (rule(), "global_step500", ZERO, (), False),
        (rule(), "global_step500", ZERO, ("global_step500/zero_pp_rank_2_mp_rank_00_optim_states.pt",), True),
        (rule(), "global_step500", ZERO[1:], (), True),
        (rule(done_file="DONE"), "ep_500", ("ep_500/a", "ep_500/DONE"), ("ep_500/a",), False),
        (rule(done_file="DONE"), "ep_500", ("ep_500/a", "ep_500/DONE"), ("ep_500/a", "ep_500/DONE"), True),
        (rule(done_file="DONE"), "ep_500", ("ep_500/a", "ep_500/DONE"), ("ep_500/DONE", "ep_500/a"), False),
    ],
)
def test_a_nodes_part_is_complete_when_its_own_ranks_have_written(of, folder, called, there, complete):
    share = share_of(of, Call(step=500, folder=folder, paths=called), listing(*there, "other/x.pt"))
    assert (share.complete, share.paths, share.step) == (complete, tuple(sorted(there)), 500)


@pytest.mark.parametrize(
    ("there", "superseded"),
    [
        ((), False),
        (("checkpoint-400/a", "checkpoint-500/a"), False),
        (("checkpoint-600/deep/a",), True),
        (("other-600/a",), False),
        (("deep/checkpoint-600/a",), False),
    ],
)
def test_a_script_that_went_on_to_a_newer_folder_will_not_write_the_older(there, superseded):
    assert is_superseded(Call(step=500, folder="checkpoint-500"), listing(*there)) is superseded


def test_only_folders_named_by_their_step_are_called_for_and_each_step_once():
    sets = find_sets(rule(Layout.DCP), listing("step-20/__0_0.distcp", "step-20/.metadata", *DCP))
    assert [one.step for one in to_call_for(sets, done=-1, base=None).sets] == [20, 500]
    assert [one.step for one in to_call_for(sets, done=20, base=None).sets] == [500]
    assert [one.step for one in to_call_for(sets, done=-1, base=500).sets] == [20]
    for nameless in ((".metadata", "__0_0.distcp"), ("last/__0_0.distcp", "last/.metadata"), ("ckpt_500.pt",)):
        found = to_call_for(find_sets(rule(), listing(*nameless)), done=-1, base=None)
        assert found.sets == ()
        assert "a folder of its own whose name ends with the step" in found.unclear
    beside = find_sets(rule(), listing("last.ckpt/__0_0.distcp", "last.ckpt/.metadata", "last.ckpt/meta.pt", *DCP))
    assert [one.step for one in to_call_for(beside, done=-1, base=None).sets] == [500]


def test_a_round_is_whole_with_the_parts_of_all_and_void_as_soon_as_one_has_none():
    own, none = Answer(node=1, pieces=()), Answer(node=2, pieces=None)
    assert round_of(3, {}) is Round.OPEN
    assert round_of(3, {1: own}) is Round.OPEN
    assert round_of(3, {2: none}) is Round.VOID
    assert round_of(3, {1: own, 2: none}) is Round.VOID
    assert round_of(3, {1: own, 2: Answer(node=2, pieces=())}) is Round.WHOLE
    assert round_of(1, {}) is Round.WHOLE


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_a_torch_checkpoint_names_is_read_without_loading_it(protocol):
    data = pickle.dumps({"a": ["__0_0.distcp", "__11_2.distcp"], "b": "__0_0.distcp"}, protocol)
    assert shards_missing(data, {"__0_0.distcp"}) == ("__11_2.distcp",)
    assert shards_missing(data, {"__0_0.distcp", "__11_2.distcp", "more"}) == ()
    assert shards_missing(b"", ()) == ()


def test_calls_and_answers_come_back_as_they_were_and_nothing_else_is_one():
    call = Call(step=500, folder="a b", paths=("a b/ü",), over=True)
    assert read_call(call_bytes(call)) == call
    for answer in (Answer(node=1, pieces=None), Answer(node=1, pieces=(piece("x", 1),))):
        assert read_answer(answer_bytes(answer), COMMIT, 1) == answer
    for data in (b"", call_bytes(call)[:-1], answer_bytes(Answer(node=1, pieces=None))):
        with pytest.raises(ValueError, match=r"."):
            read_call(data)
    for answer in (Answer(node=2, pieces=()), Answer(node=1, pieces=(piece("x", 2),))):
        with pytest.raises(ValueError, match="answer"):
            read_answer(answer_bytes(answer), COMMIT, 1)


def test_a_node_gets_its_own_files_and_those_that_only_others_have():
    one = manifest(piece("s/a", 0), piece("s/latest", 0, 7), piece("s/b", 1), piece("s/latest", 1, 8))
    assert [path for path, _ in files_for(one, 0)] == ["s/a", "s/b", "s/latest"]
    assert dict(files_for(one, 0))["s/latest"].crc32 == (7,)
    assert dict(files_for(one, 1))["s/latest"].crc32 == (8,)
    assert dict(files_for(one, 2))["s/latest"].crc32 == (7,)
    assert paths_of(one) == ("s/a", "s/latest", "s/b", "s/latest")


def test_all_files_lie_in_one_folder_unless_two_nodes_wrote_one_of_them_differently():
    alike = manifest(piece("s/a", 0, 7), piece("s/a", 1, 7), piece("s/b", 1))
    assert [path for path, _ in files_apart(alike)] == ["s/a", "s/b"]
    other = manifest(piece("s/a", 0, 7), piece("s/a", 1, 8))
    assert [path for path, _ in files_apart(other)] == ["node-0/s/a", "node-1/s/a"]
    clash = manifest(piece("s", 0), piece("s/a", 1))
    assert files_for(clash) is None
    assert [path for path, _ in files_apart(clash)] == ["node-0/s", "node-1/s/a"]
    assert files_apart(manifest(piece("../x", 0))) is None
    assert files_apart(manifest(piece("a"), piece("a"))) is None


def test_older_generations_calls_are_collected_and_the_records_say_their_attempt():
    keys = ("gen/000002.json", "gen/000002.call.json", "gen/000003.json", "gen/000003.call.json")
    assert collectable(keys, generation=3, base=None, keep=2) == ("gen/000002.call.json",)
    assert collectable(keys, generation=2, base=None, keep=2) == ()
    assert read_attempt(generation_bytes(base=None, owner="x", attempt=7)) == 7
