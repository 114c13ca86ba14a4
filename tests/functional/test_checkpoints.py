"""A job's checkpoints read through from outside: verified, pulled, exported, pruned; over every store."""

import contextlib
import errno
import json
import os
import random

import pytest

from gpucloud.domain.checkpoint import objects
from gpucloud.domain.checkpoint.chunks import rank_of
from gpucloud.domain.checkpoint.manifest import Commit, commit_key, data_key, generation_key
from gpucloud.domain.checkpoint.objects import read_header
from gpucloud.domain.errors import StoreError, UsageError
from gpucloud.store import directory, open_store, parts
from gpucloud.store.directory import DirectoryStore
from gpucloud.usecases.checkpoint import checkpoints, pulling
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints, restorable
from gpucloud.usecases.checkpoint.pulling import Puller
from tests.fakes.clock import JumpingClock
from tests.fakes.memory_store import MemoryStore
from tests.lab.aws import Lab
from tests.standins.made_checkpoints import Made, state

PREFIX = "jobs/made/checkpoints"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with Lab(tmp_path_factory.mktemp("lab")) as standing:
        yield standing


@pytest.fixture(params=["directory", "memory", "s3"])
def store(request, tmp_path, monkeypatch):
    if request.param == "memory":
        yield MemoryStore(JumpingClock())
        return
    if request.param == "directory":
        yield DirectoryStore(tmp_path / "a store")
        return
    for name, value in request.getfixturevalue("lab").settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    opened = open_store(f"s3://made/{abs(hash(request.node.name))}")
    with contextlib.suppress(opened._client_error):
        opened._client.create_bucket(Bucket="made")
    yield opened
    opened.close()


@pytest.fixture
def memory():
    return MemoryStore(JumpingClock())


@pytest.fixture
def small_parts(monkeypatch):
    """Objects of a few KiB have many parts: everything that counts in parts is met."""
    for module in (objects, checkpoints, directory, parts):
        monkeypatch.setattr(module, "PART_BYTES", 100)


def stored_checkpoints(store, keep=3):
    return StoredCheckpoints(store=store, prefix=PREFIX, keep=keep)


def made(store, generation=1, step=10):
    return Made(store, PREFIX, Commit(generation, step))


def sharded(store, generation=1, step=10, *, base=None, second=False):
    """A checkpoint of three ranks: `w` in rows and columns over them, the rest whole, generators on each."""
    one = made(store, generation, step)
    metadata = state(one, second=second)
    own = [name for name in one.tensors if name.startswith("rank.")]
    one.put(
        [
            [("model.w", (0, 0), (2, 8)), "model.b", *own, *(["ema.w"] if second else [])],
            [("model.w", (2, 0), (4, 3)), ("optimizer.state.0.exp_avg", (0, 0), (6, 5)), "rank.randomness.torch"],
            [("model.w", (2, 3), (4, 5)), ("optimizer.state.0.exp_avg", (0, 5), (6, 3)), "rank.randomness.torch"],
        ],
        metadata,
        base=base,
    )
    return one


def exported(store, path, *, everything=False, step=None):
    here = stored_checkpoints(store)
    manifest = restorable(step, here.standing())
    plan = pulling.planned(here, manifest, everything=everything, about={"job": "made"})
    pulling.write(here, manifest, plan, path)
    data = path.read_bytes()
    assert len(data) == plan.size
    header = read_header(data, len(data))
    return {t.name: (t.dtype, t.shape, data[header.start + t.begin : header.start + t.end]) for t in header.tensors}, (
        header.metadata
    )


def test_weights_are_exported_whole_out_of_shards_under_the_names_of_the_state_dict(store, tmp_path, small_parts):
    one = sharded(store)
    found, metadata = exported(store, tmp_path / "w.safetensors")
    assert list(metadata.items()) == [("format", "pt"), ("job", "made")]
    assert found == {
        "w": one.tensors["model.w"],
        "b": one.tensors["model.b"],
        "mean": one.tensors["rank.buffers.model.mean"],  # not `cache`, which no state_dict has
    }
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "a store") == ["w.safetensors"]


def test_with_all_optimizer_and_other_objects_come_too_with_what_is_no_tensor(memory, tmp_path):
    one = sharded(memory)
    found, metadata = exported(memory, tmp_path / "w.safetensors", everything=True)
    assert sorted(found) == [
        "b", "buffers.model.cache", "mean", "optimizer.state.0.exp_avg", "others.average.shadow", "w",
    ]  # fmt: skip
    assert found["optimizer.state.0.exp_avg"] == one.tensors["optimizer.state.0.exp_avg"]
    rest = json.loads(metadata["state"])
    assert rest["others"]["scheduler"] == {"last_epoch": 3}
    assert rest["others"]["average"]["shadow"] == {"$": "tensor", "name": "others.average.shadow"}


def test_weights_of_further_modules_have_the_modules_name_before_their_own(memory, tmp_path):
    one = sharded(memory, second=True)
    found, _ = exported(memory, tmp_path / "w.safetensors")
    assert found["ema.w"] == one.tensors["ema.w"]
    assert found["w"] == one.tensors["model.w"]


def test_a_checkpoint_without_a_part_of_a_tensor_is_not_exported(memory, tmp_path):
    one = made(memory)
    metadata = state(one)
    own = [name for name in one.tensors if name.startswith("rank.")]
    one.put([[("model.w", (0, 0), (5, 8)), "model.b", *own]], metadata)
    with pytest.raises(UsageError, match=r"step 10 cannot be exported: a part of model\.w is missing"):
        exported(memory, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_scripts_own_directory_is_not_exported_and_says_what_is_possible(memory):
    with pytest.raises(ValueError, match="script's own checkpoint directory"):
        rank_of("data/000001/000000010/files/ckpt.pt")


@pytest.mark.parametrize("harm", ["flip", "shorter", "longer", "missing"])
def test_every_harm_to_an_object_is_found_and_named(store, small_parts, harm):
    sharded(store, step=10)
    sharded(store, step=20)
    here = stored_checkpoints(store)
    pieces = [piece for one in here.standing() for piece in one.sound.pieces]
    assert here.verify(pieces) == ()
    key = data_key(Commit(1, 20), "rank-00001-of-00003.safetensors")
    data = bytearray(store.get(f"{PREFIX}/{key}").data)
    if harm == "flip":
        data[250] ^= 1
    changed = {"flip": data, "shorter": data[:-1], "longer": data + b"x"}.get(harm)
    if changed is None:
        store.delete(f"{PREFIX}/{key}")
    else:
        store.put(f"{PREFIX}/{key}", bytes(changed))
    (damage,) = here.verify(pieces)
    assert damage.key == key
    number = len(data) // 100 + 1
    assert (
        str(damage)
        == {
            "flip": f"part 3 of {number} of {key} is not as it was written",
            "shorter": f"part {number} of {number} of {key} is missing, or shorter than it was written",
            "longer": f"{key} is longer than it was written",
            "missing": f"{key} is missing",
        }[harm]
    )


def test_damage_found_while_exporting_leaves_nothing(memory, tmp_path, small_parts):
    sharded(memory)
    key = f"{PREFIX}/{data_key(Commit(1, 10), 'rank-00002-of-00003.safetensors')}"
    data = bytearray(memory.get(key).data)
    data[-60] ^= 1
    memory.put(key, bytes(data))
    with pytest.raises(StoreError, match=r"damaged: part \d+ of \d+ of data/000001/000000010/rank-00002"):
        exported(memory, tmp_path / "w.safetensors")
    assert list(tmp_path.iterdir()) == []


def pull(store, folder, step=None):
    here = stored_checkpoints(store)
    moved = []
    pulled = Puller(stored_checkpoints=here, target=DirectoryStore(folder)).pull(
        restorable(step, here.standing()), moved.append
    )
    assert sum(moved) == pulled.size
    return pulled


def contents(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and "locks" not in str(p)}


def test_a_pulled_checkpoint_is_the_same_in_a_folder_that_is_a_store(store, tmp_path, small_parts):
    sharded(store, generation=2, step=10, base=Commit(1, 5))
    pulled = pull(store, tmp_path / "here")
    assert pulled.fetched == pulled.size
    expected = {key.removeprefix(f"{PREFIX}/"): store.get(key).data for key in store.list(PREFIX)}
    assert contents(tmp_path / "here") == expected
    (one,) = StoredCheckpoints(store=DirectoryStore(tmp_path / "here"), prefix="", keep=3).standing()
    assert (one.commit, one.sound is not None) == (Commit(2, 10), True)
    again = pull(store, tmp_path / "here")
    assert (again.fetched, again.size) == (0, pulled.size)


class _Breaks(MemoryStore):
    """A store whose network breaks after some reads of parts."""

    def __init__(self, store, reads):
        super().__init__(JumpingClock())
        self.__dict__.update(store.__dict__)
        self.left = reads

    def read_into(self, key, at, into):
        self.left -= len(into) > 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().read_into(key, at, into)


@pytest.mark.parametrize("reads", [0, 1, 4, 7])
def test_a_pull_that_was_broken_off_shows_nothing_and_goes_on_where_it_was(memory, tmp_path, small_parts, reads):
    sharded(memory)
    folder = tmp_path / "here"
    with pytest.raises(KeyboardInterrupt):
        pull(_Breaks(memory, reads), folder)
    assert StoredCheckpoints(store=DirectoryStore(folder), prefix="", keep=3).standing() == ()
    pulled = pull(memory, folder)
    assert pulled.size - pulled.fetched >= 100 * max(0, reads - 4)
    (one,) = StoredCheckpoints(store=DirectoryStore(folder), prefix="", keep=3).standing()
    assert StoredCheckpoints(store=DirectoryStore(folder), prefix="", keep=3).verify(one.sound.pieces) == ()
    assert not list(folder.glob(".gpucloud-*"))


@pytest.mark.parametrize("linked", ["data", "gen", "commit"])
def test_a_pull_goes_through_no_link_that_lies_in_the_folder(memory, tmp_path, linked):
    sharded(memory)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / linked).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match=f"{linked} is a link; files go into folders"):
        pull(memory, tmp_path / "here")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_is_damaged_in_the_folder_is_fetched_again(memory, tmp_path, small_parts):
    sharded(memory)
    pull(memory, tmp_path)
    key = data_key(Commit(1, 10), "rank-00000-of-00003.safetensors")
    (tmp_path / key).write_bytes(b"rubbish")
    pulled = pull(memory, tmp_path)
    assert pulled.fetched == len((tmp_path / key).read_bytes()) == len(memory.get(f"{PREFIX}/{key}").data)


def test_a_folder_with_another_runs_checkpoints_is_left_alone(memory, tmp_path):
    sharded(memory)
    other = MemoryStore(JumpingClock())
    one = made(other)
    one.seed = 1
    one.put([["model.w"]], state(one))
    pull(other, tmp_path)
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="checkpoints of another run"):
        pull(memory, tmp_path)
    assert contents(tmp_path) == before


def test_a_newer_checkpoint_in_the_folder_is_named(memory, tmp_path):
    sharded(memory, step=10)
    sharded(memory, step=20)
    assert pull(memory, tmp_path).first == Commit(1, 20)
    assert pull(memory, tmp_path, step=10).first == Commit(1, 20)


def test_a_disk_that_is_too_small_is_met_before_anything_is_fetched(memory, tmp_path, monkeypatch):
    sharded(memory)

    def full(_descriptor, _at, _size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    folder = tmp_path / "here"
    for act in (lambda: pull(memory, folder), lambda: exported(memory, tmp_path / "w.safetensors")):
        with pytest.raises(StoreError, match="No space left") as raised:
            act()
        assert "free some space" in raised.value.hint
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_step_that_is_not_there_is_answered_with_the_nearest(memory):
    sharded(memory, step=10)
    sharded(memory, step=20)
    here = stored_checkpoints(memory)
    with pytest.raises(UsageError, match="no checkpoint of step 16: the nearest is 20") as raised:
        restorable(16, here.standing())
    assert raised.value.hint == "--step 20"


def test_one_that_is_not_whole_is_refused_with_the_nearest_that_is(memory):
    for step in (10, 20, 30):
        sharded(memory, step=step)
    memory.delete(f"{PREFIX}/{data_key(Commit(1, 30), 'rank-00001-of-00003.safetensors')}")
    memory.put(f"{PREFIX}/{commit_key(Commit(1, 20))}", b"rubbish")
    standing = stored_checkpoints(memory).standing()
    assert restorable(None, standing).commit == Commit(1, 10)
    for step in (20, 30):
        with pytest.raises(StoreError, match=f"step {step} is not whole") as raised:
            restorable(step, standing)
        assert raised.value.hint == "--step 10"
    memory.delete(f"{PREFIX}/{commit_key(Commit(1, 10))}")
    with pytest.raises(StoreError, match="no checkpoint is whole"):
        restorable(None, stored_checkpoints(memory).standing())


def test_a_checkpoint_that_is_collected_while_it_is_listed_is_left_out(memory):
    sharded(memory, step=10)
    sharded(memory, step=20)
    here = stored_checkpoints(memory)
    keys = here.listed()
    memory.delete(f"{PREFIX}/{commit_key(Commit(1, 10))}")
    assert [one.commit.step for one in here.standing(keys)] == [20]


def test_any_damaged_manifest_or_record_is_a_mark_and_never_an_error(memory):
    sharded(memory, step=10)
    sharded(memory, step=20)
    dice = random.Random(3)
    for key in (commit_key(Commit(1, 20)), generation_key(1)):
        good = memory.get(f"{PREFIX}/{key}").data
        for _ in range(30):
            data = bytearray(good)
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            memory.put(f"{PREFIX}/{key}", bytes(data))
            standing = stored_checkpoints(memory).standing()
            assert {one.commit.step for one in standing} == {10, 20}
        memory.put(f"{PREFIX}/{key}", good)
