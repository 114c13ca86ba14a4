"""Which files of a script's own directory are a whole checkpoint: tables of listings, over time where time matters."""

from __future__ import annotations

import pytest

from gpucloud.agent.scripts.script import why_none
from gpucloud.domain.checkpoint.directory import (
    AfterScript,
    Settling,
    Signature,
    Unsaved,
    after_script,
    object_name,
    paths_of,
    written_before,
)
from gpucloud.domain.checkpoint.layouts import Rule, find_sets, layout_of, leftovers, newest_checkpoint
from gpucloud.domain.checkpoint.manifest import (
    Commit,
    Level,
    Manifest,
    Piece,
    Promise,
    data_key,
    manifest_bytes,
    read_manifest,
)
from gpucloud.domain.job.spec import Layout


def listing(*paths, **times):
    """Each path, written one nanosecond after the one before it; `at` names other times."""
    at = times.get("at", {})
    return {path: Signature(size=1, mtime_ns=at.get(path, n), inode=n) for n, path in enumerate(paths)}


def complete(rule, *paths, **times):
    return [(one.name, one.step) for one in find_sets(rule, listing(*paths, **times)).sets if one.complete]


HF = ("out/checkpoint-500/model.safetensors", "out/checkpoint-500/trainer_state.json")
MEGATRON = ("iter_0000100/mp_rank_00/model_optim_rng.pt", "latest_checkpointed_iteration.txt")
DCP = ("step-20/__0_0.distcp", "step-20/.metadata")


@pytest.mark.parametrize(
    ("paths", "layout"),
    [
        ((), Layout.AUTO),
        (("log.txt", "deep/ckpt.pt"), Layout.AUTO),
        (("ckpt.pt",), Layout.FILE),
        (("snapshot.pt", "log.txt"), Layout.FILE),
        (("model.safetensors",), Layout.FILE),
        (("lightning_logs/version_0/checkpoints/epoch=1-step=20.ckpt",), Layout.LIGHTNING),
        (("checkpoint-500/model.safetensors",), Layout.HF),
        (("checkpoint-500/global_step500/mp_rank_00_model_states.pt",), Layout.HF),
        (("global_step500/mp_rank_00_model_states.pt",), Layout.DEEPSPEED),
        (("iter_0000100/mp_rank_00/model_optim_rng.pt",), Layout.MEGATRON),
        (("iter_0000100/__0_0.distcp", "iter_0000100/.metadata"), Layout.MEGATRON),
        (("iter_1000.pth", "last_checkpoint"), Layout.FILE),
        (("checkpoint.pth.tar",), Layout.FILE),
        (("step-20/__0_0.distcp",), Layout.DCP),
        (("checkpoint-500/__0_0.distcp",), Layout.DCP),
        (("checkpoint-500/pytorch_model_fsdp_0/__0_0.distcp",), Layout.HF),
        ((".metadata", "__0_0.distcp"), Layout.DCP),
    ],
)
def test_a_directory_tells_its_layout_before_anything_in_it_is_whole(paths, layout):
    assert layout_of(listing(*paths)) is layout


@pytest.mark.parametrize(
    ("rule", "paths", "found"),
    [
        (Rule(), HF[:1], []),
        (Rule(), HF, [("out/checkpoint-500", 500)]),
        (Rule(), (*HF, "out/checkpoint-500/checkpoint-is-incomplete.txt"), []),
        (Rule(), ("checkpoint-9/trainer_state.json", "checkpoint-10/model.bin"), [("checkpoint-9", 9)]),
        (Rule(ranks=2), (*HF, "out/checkpoint-500/rng_state_0.pth"), []),
        (
            Rule(ranks=2),
            (*HF, "out/checkpoint-500/rng_state_0.pth", "out/checkpoint-500/rng_state_1.pth"),
            [("out/checkpoint-500", 500)],
        ),
        (Rule(), ("tmp-checkpoint-500/trainer_state.json",), []),
        (Rule(), DCP[:1], []),
        (Rule(), DCP, [("step-20", 20)]),
        (Rule(nodes=2, per_node=True), DCP, [("step-20", 20)]),
        (Rule(), ("step-20/.metadata", "step-20/__0_0.distcp"), []),
        (Rule(), ("__0_0.distcp", ".metadata"), [("", None)]),
        (Rule(), ("epoch=0-step=9.ckpt/__0_0.distcp", "epoch=0-step=9.ckpt/.metadata"), []),
        (Rule(), ("a=9.ckpt/__0_0.distcp", "a=9.ckpt/.metadata", "a=9.ckpt/meta.pt"), [("a=9.ckpt", 9)]),
        (Rule(), ("global_step7/a.pt",), []),
        (Rule(), ("global_step7/a.pt", "latest"), [("global_step7", 7)]),
        (Rule(), ("latest", "global_step7/a.pt"), []),
        (Rule(), ("ckpt.pt",), [("", None)]),
        (Rule(), ("ckpt_500.pt",), [("", 500)]),
        (Rule(), MEGATRON[:1], []),
        (Rule(), MEGATRON, [("iter_0000100", 100)]),
        (Rule(), (*MEGATRON, "iter_0000200/mp_rank_00/model_optim_rng.pt"), [("iter_0000100", 100)]),
        (Rule(), ("checkpoint.pth.tar", "model_best.pth.tar"), [("", None)]),
        (Rule(), ("checkpoint_0007.pth.tar",), [("", 7)]),
        (Rule(), ("last.pt", "best.pt", "epoch10.pt"), [("", 10)]),
        (Rule(), ("model_0004999.pth", "model_final.pth", "last_checkpoint"), [("", 4999)]),
        (Rule(), ("epoch=0-step=20.ckpt", "last.ckpt"), [("", 20)]),
        (Rule(layout=Layout.FILE), ("deep/model-7.pth", "best.pt"), [("", 7)]),
        (Rule(done_file="DONE"), ("ep_1/a.bin", "ep_1/DONE", "ep_2/a.bin"), [("ep_1", 1)]),
        (Rule(done_file="DONE"), ("ep_1/DONE", "ep_1/a.bin"), []),
        (Rule(done_file="DONE"), ("a.bin", "DONE"), [("", None)]),
        (Rule(layout=Layout.HF), ("ckpt.pt",), []),
    ],
)
def test_a_set_is_complete_when_its_rule_says_so(rule, paths, found):
    assert complete(rule, *paths) == found


def test_of_files_that_are_whole_by_themselves_the_newest_of_each_name_belongs_to_the_checkpoint():
    (one,) = find_sets(Rule(), listing("epoch=0-step=20.ckpt", "last.ckpt", "epoch=1-step=40.ckpt")).sets
    assert (one.paths, one.step) == (("epoch=1-step=40.ckpt", "last.ckpt"), 40)


@pytest.mark.parametrize(
    ("rule", "paths", "newest"),
    [
        (Rule(), ("ckpt.pt",), "ckpt.pt"),
        (Rule(), ("checkpoint.pth.tar", "model_best.pth.tar"), "checkpoint.pth.tar"),
        (Rule(), ("last.pt", "best.pt"), "last.pt"),
        (Rule(), ("best.pt",), "best.pt"),
        (Rule(), ("epoch=3-step=400.ckpt", "last.ckpt"), "last.ckpt"),
        (Rule(), ("model_0004999.pth", "last_checkpoint"), "model_0004999.pth"),
        (Rule(), ("checkpoint-400/trainer_state.json", *HF), "out/checkpoint-500"),
        (Rule(), MEGATRON, "iter_0000100"),
        (Rule(), DCP, "step-20"),
        (Rule(), ("__0_0.distcp", ".metadata"), ""),
        (Rule(done_file="DONE"), ("ep_1/a.bin", "ep_1/DONE", "ep_2/a.bin", "ep_2/DONE"), "ep_2"),
        (Rule(layout=Layout.HF), ("ckpt_400.pt", "ckpt_500.pt"), "ckpt_500.pt"),
    ],
)
def test_the_newest_checkpoint_is_the_last_one_written_and_no_copy_of_the_best(rule, paths, newest):
    assert newest_checkpoint(rule, listing(*paths)) == newest


@pytest.mark.parametrize(
    ("rule", "paths", "said"),
    [
        (Rule(), ("model.pt", "optimizer.pt"), "do model.pt and optimizer.pt belong together?"),
        (Rule(), ("G_last.pt", "D_last.pt"), "do D_last.pt and G_last.pt belong together?"),
        (Rule(), ("model.pt", "optimizer.pt", "best.pt"), "do model.pt and optimizer.pt belong together?"),
        (Rule(nodes=2), ("iter_0000100/__0_0.distcp", "latest_checkpointed_iteration.txt"), "writes its own part"),
        (Rule(), ("model-00001-of-00002.safetensors",), "is one of several files that belong together"),
        (Rule(nodes=2), DCP, "each node writes its own part"),
        (Rule(nodes=2), DCP, "checkpoint: {per_node: true}"),
    ],
)
def test_what_may_be_a_part_only_is_never_taken_and_the_user_is_told(rule, paths, said):
    found = find_sets(rule, listing(*paths))
    assert found.sets == ()
    assert said in found.unclear


@pytest.mark.parametrize(
    ("rule", "paths", "said"),
    [
        (Rule(), HF, None),
        (Rule(), ("log.txt", "runs/events.out.1"), None),
        (Rule(), ("model.pt", "optimizer.pt"), None),  # said to be unclear
        (Rule(), HF[:1], "out/checkpoint-500 is not whole: a checkpoint (layout hf) is `checkpoint-STEP/` with `trai"),
        (Rule(), DCP[:1], "step-20 is not whole: a checkpoint (layout dcp) is a folder of `*.distcp` with `.metadata`"),
        (
            Rule(),
            MEGATRON[:1],
            "iter_0000100 is not whole: a checkpoint (layout megatron) is `iter_STEP/`, of 7",
        ),
        (
            Rule(layout=Layout.HF),
            ("a.txt", "step_1.pt"),
            "step_1.pt is in none: a checkpoint (layout hf) is `checkpoint",
        ),
        (
            Rule(layout=Layout.FILE),
            ("w.npz",),
            "w.npz is in none: a checkpoint (layout file) is a file `*.pt`,",
        ),
        (
            Rule(done_file="DONE"),
            ("ep_1/a.bin",),
            "ep_1/a.bin is in none: a checkpoint is a folder with `DONE`",
        ),
        (
            Rule(),
            ("ep_1/a.pt",),
            "ep_1/a.pt is of no layout that is known; if it is one by itself: checkpoint: {",
        ),
        (
            Rule(),
            ("ep_1/a.bin",),
            "ep_1/a.bin is of no layout that is known; have the script write a file when",
        ),
    ],
)
def test_what_looks_like_a_checkpoint_and_is_none_is_named_with_what_a_whole_one_has(rule, paths, said):
    found = why_none(rule, find_sets(rule, listing(*paths)), listing(*paths))
    assert found is None if said is None else found.startswith(said)
    assert why_none(rule, find_sets(rule, listing(*paths)), listing(*paths), since_ns=99) is None


def test_a_set_is_ready_when_nothing_changed_for_the_settle_time():
    settling, rule = Settling(1.0), Rule()
    half, whole = listing(*HF[:1]), listing(*HF)
    changed = {**whole, HF[0]: Signature(size=2, mtime_ns=9, inode=0)}
    seen = [
        (0.0, half, []),
        (5.0, whole, []),
        (5.9, whole, []),
        (6.0, whole, [500]),
        (6.1, changed, []),
        (7.0, changed, []),
        (7.1, changed, [500]),
        (7.2, {}, []),
    ]
    for now, files, steps in seen:
        assert [one.step for one in settling.look(find_sets(rule, files).sets, files, now)] == steps, now


def test_what_is_taken_is_offered_again_only_when_it_changed():
    settling, rule = Settling(1.0), Rule()
    files = listing("ckpt.pt")
    sets = find_sets(rule, files).sets
    assert settling.look(sets, files, 0.0) == ()
    assert settling.unsettled(sets, files)
    assert settling.look(sets, files, 1.0) == sets
    settling.take(sets[0], sets[0].content(files))
    assert settling.look(sets, files, 2.0) == ()
    assert not settling.unsettled(sets, files)
    again = {"ckpt.pt": Signature(size=1, mtime_ns=0, inode=77)}
    assert settling.look(sets, again, 3.0) == ()
    assert settling.look(sets, again, 4.0) == sets


def test_what_is_older_than_the_newest_that_was_taken_is_never_offered():
    settling = Settling(0.0)
    files = listing("checkpoint-9/trainer_state.json", "checkpoint-10/trainer_state.json")
    sets = find_sets(Rule(), files).sets
    settling.take(sets[1], sets[1].content(files))
    assert settling.look(sets, files, 1.0) == ()
    assert not settling.unsettled(sets, files)


@pytest.mark.parametrize(
    ("then", "has_newest"),
    [
        ({}, True),
        ({"model.pt": 9}, True),  # an export
        ({"ckpt_100.pt": 0}, True),  # passed over
        ({"ckpt_200.pt": 9}, False),  # written again
        ({"ckpt_300.pt": 9, "model.pt": 9}, False),
    ],
)
def test_the_newest_checkpoint_is_taken_until_another_of_its_name_is_there(then, has_newest):
    settling, files = Settling(0.0), listing("ckpt_200.pt", at={"ckpt_200.pt": 5})
    sets = find_sets(Rule(), files).sets
    settling.take(sets[0], sets[0].content(files))
    assert settling.has_newest({**files, **listing(*then, at=then)}) is has_newest


def test_the_newest_of_several_is_first():
    settling, files = Settling(0.0), listing("checkpoint-9/trainer_state.json", "checkpoint-10/trainer_state.json")
    assert [one.step for one in settling.look(find_sets(Rule(), files).sets, files, 0.0)] == [10, 9]


@pytest.mark.parametrize(
    ("rule", "there", "restored", "aside"),
    [
        (Rule(), ("checkpoint-6/model.bin",), (), ("checkpoint-6/model.bin",)),
        (
            Rule(),
            ("checkpoint-4/trainer_state.json", "checkpoint-6/trainer_state.json", "log.txt"),
            ("checkpoint-5/trainer_state.json",),
            ("checkpoint-6/trainer_state.json",),
        ),
        (Rule(), ("ckpt.pt", "log.txt"), (), ("ckpt.pt",)),
        (Rule(), ("logs/run.log", "metrics_7.csv"), (), ()),
        (Rule(done_file="DONE"), ("ep_6/a.bin", "last.pt", "logs/run.log"), (), ("ep_6/a.bin", "last.pt")),
        (Rule(), ("ckpt.pt",), ("ckpt.pt",), ()),
        (Rule(), ("ckpt_4.pt", "ckpt_6.pt"), ("ckpt_5.pt",), ("ckpt_6.pt",)),
        (Rule(done_file="DONE"), ("ep_6/a.bin", "other/a.bin"), ("ep_5/a.bin", "ep_5/DONE"), ("ep_6/a.bin",)),
        (Rule(), ("checkpoint-5/rng_state_1.pth",), ("checkpoint-5/a",), ("checkpoint-5/rng_state_1.pth",)),
    ],
)
def test_what_an_earlier_attempt_left_and_a_script_would_resume_from_is_set_aside(rule, there, restored, aside):
    assert leftovers(rule, listing(*there), restored) == aside


@pytest.mark.parametrize("path", ["a.pt", "deep/b c=1.ckpt", "100%/ü", "new\nline", "dir/\udcff.bin"])
def test_every_path_is_a_key_and_comes_back(path):
    commit = Commit(3, 7)
    key = data_key(commit, object_name(path))
    assert key.isascii()
    manifest = Manifest(
        commit=commit, world=1, promise=Promise(Level.BEST_EFFORT), pieces=(Piece(key=key, size=1, crc32=(0,)),)
    )
    assert paths_of(read_manifest(manifest_bytes(manifest))) == (path,)


@pytest.mark.parametrize(
    "name", ["files/../x", "files//x", "files/a/%2e%2e/x", "files/%00", "files/.gpucloud-x", "a.bin"]
)
def test_a_manifest_of_anything_but_files_below_the_directory_is_none_of_it(name):
    commit = Commit(3, 7)
    pieces = (Piece(key=data_key(commit, name), size=1, crc32=(0,)),)
    assert paths_of(Manifest(commit=commit, world=1, promise=Promise(Level.BEST_EFFORT), pieces=pieces)) is None


@pytest.mark.parametrize(
    ("times", "back"),
    [
        ((), ()),
        ((5, 7, None), (5, 7, 100)),
        ((90, 100), (90, 100)),
        ((3, 90, 150), (0, 40, 100)),
        ((2**63 - 1, 0), (100, 0)),
    ],
)
def test_files_are_as_old_as_they_were_and_none_is_of_the_future(times, back):
    pieces = tuple(Piece(key="data/000003/000000007/files/a", size=1, crc32=(0,), mtime_ns=one) for one in times)
    assert written_before(100, pieces) == back


LAST = Unsaved(why="away", paths=("checkpoint-9/a.pt", "checkpoint-9/b.pt"))


@pytest.mark.parametrize(
    ("unsaved", "outputs", "after"),
    [
        (None, (), AfterScript.OVER),
        (Unsaved(why="torn"), (), AfterScript.OVER),  # another attempt would not have it either
        (LAST, (), AfterScript.AGAIN),
        (Unsaved(why="full", lasts=True, paths=LAST.paths), (), AfterScript.FAILED),
        (LAST, ("runs/out/",), AfterScript.OVER),
        (LAST, ("./runs",), AfterScript.OVER),
        (LAST, (".",), AfterScript.OVER),
        (LAST, ("runs/out/checkpoint-*",), AfterScript.OVER),
        (LAST, ("runs/out/*/*.pt",), AfterScript.OVER),
        (LAST, ("runs/out/*/a.pt",), AfterScript.AGAIN),
        (LAST, ("runs/*.pt", "out", "runs/out2"), AfterScript.AGAIN),
    ],
)
def test_a_job_is_over_without_its_last_checkpoint_only_where_its_files_come_home(unsaved, outputs, after):
    assert after_script(unsaved, "runs/out", outputs) is after


def test_what_its_script_has_deleted_meanwhile_is_not_waited_for():
    assert LAST.as_left(listing(*LAST.paths)) == LAST
    assert LAST.as_left(listing("checkpoint-9/a.pt")) == Unsaved(why="away")


def test_only_so_much_is_told_of_why_and_that_the_files_come_home():
    assert [LAST.told(after) for after in AfterScript] == ["away; its files come home", "away", "away"]
    assert Unsaved(why="torn").told(AfterScript.OVER) == "torn"
    assert len(Unsaved(why="x" * 5000).told(AfterScript.AGAIN)) < 400
