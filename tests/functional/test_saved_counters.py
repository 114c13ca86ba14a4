"""How far a script was, read from what real `torch.save` wrote; and files that were made to harm who reads them."""

from __future__ import annotations

import collections
import io
import pickle
import random
import time
import zipfile

import pytest
import torch

from gpucloud.agent.scripts import counters
from gpucloud.agent.scripts.counters import counters_in, counters_of
from gpucloud.domain.checkpoint.layouts import counter_drop
from gpucloud.domain.checkpoint.manifest import CounterDrop


def trained():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return model.state_dict(), optimizer.state_dict()


MODEL, OPTIMIZER = trained()


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        # nanoGPT's
        (
            {"model": MODEL, "optimizer": OPTIMIZER, "iter_num": 2000, "best_val_loss": 1.5, "config": {"step": 7}},
            {"iter_num": 2000},
        ),
        ({"MODEL_STATE": MODEL, "EPOCHS_RUN": 70_000}, {"EPOCHS_RUN": 70_000}),  # multigpu_torchrun's
        ({"epoch": 3, "global_step": 2**31, "state_dict": MODEL}, {"epoch": 3, "global_step": 2**31}),  # Lightning's
        # The name of a key is pickled once: here as the optimizer's, then by a reference.
        ({"optimizer": OPTIMIZER, "step": 12, "args": {"epoch": 1}}, {"step": 12}),
        ({"step": 0, "model": object}, {"step": 0}),
        ({"step": True, "epoch": 1.5, "iteration": torch.tensor(3), "iter": -1, "iter_num": 10**40}, {}),
        ({"model": MODEL}, {}),
        # One dict below it, which is named as the training's state, where the dict itself tells nothing.
        ({"model": MODEL, "optimizer": OPTIMIZER, "trainer": {"global_step": 40, "best": 0.5}}, {"global_step": 40}),
        ({"meta": {"epoch": 3, "iter": 1200}, "state_dict": MODEL, "config": {"step": 9}}, {"epoch": 3, "iter": 1200}),
        ({"progress": {"step": 7}, "trainer": {"lr": 0.1}}, {"step": 7}),
        ({"trainer": {"global_step": 40}, "epoch": 2}, {"epoch": 2}),
        ({"trainer": {"global_step": 40}, "progress": {"step": 3}}, {}),
        ({"trainer": {"progress": {"step": 3}}}, {}),
        ({"args": {"epoch": 1}, "config": {"step": 7}, "optimizer": {"step": 3}}, {}),
        ([{"trainer": {"step": 3}}], {}),
        (MODEL, {}),
        ([{"step": 3}], {}),
        (collections.OrderedDict(step=3), {}),
        (3, {}),
        ({}, {}),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_counters_are_those_of_the_dict_that_was_saved_or_of_the_only_one_in_it_that_is_the_trainings_state(
    tmp_path, saved, told, protocol
):
    torch.save(saved, tmp_path / "ckpt.pt", pickle_protocol=protocol)
    assert counters_in(tmp_path / "ckpt.pt") == told


def test_a_file_of_another_form_tells_nothing(tmp_path):
    torch.save({"step": 3}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"step": 3}))
    (tmp_path / "empty.pt").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("weights/data.bin", b"1")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    (tmp_path / "folder.pt").mkdir()
    names = ("old.pt", "plain.pt", "empty.pt", "other.pt", "model.pt", "folder.pt", "absent.pt")
    assert counters_of(tmp_path, names) == {}


def test_no_damaged_file_raises(tmp_path):
    torch.save({"model": MODEL, "optimizer": OPTIMIZER, "step": 12}, tmp_path / "ckpt.pt")
    whole = (tmp_path / "ckpt.pt").read_bytes()
    pickled = zipfile.ZipFile(io.BytesIO(whole)).read("ckpt/data.pkl")
    drawn = random.Random(7)
    for _ in range(1500):
        damaged = bytearray(drawn.choice((whole, pickled)))
        for _ in range(drawn.choice((1, 3, 30))):
            damaged[drawn.randrange(len(damaged))] = drawn.randrange(256)
        del damaged[drawn.choice((len(damaged), drawn.randrange(len(damaged)))) :]
        (tmp_path / "damaged.pt").write_bytes(as_saved(damaged) if damaged[:2] != b"PK" else damaged)
        found = counters_in(tmp_path / "damaged.pt")
        assert all(isinstance(value, int) for value in found.values())


def as_saved(pickled, compression=zipfile.ZIP_STORED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        archive.writestr("ckpt/data.pkl", bytes(pickled))
    return out.getvalue()


@pytest.mark.parametrize("compression", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_what_torch_never_writes_so_tells_nothing_damaged_or_not(tmp_path, compression):
    whole = as_saved(pickle.dumps({"step": 12}, protocol=2), compression)
    for at in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        (tmp_path / "ckpt.pt").write_bytes(damaged)
        assert counters_in(tmp_path / "ckpt.pt") in ({}, {"step": 12})
    (tmp_path / "ckpt.pt").write_bytes(whole)
    assert counters_in(tmp_path / "ckpt.pt") == {}


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit",)


@pytest.mark.parametrize(
    "pickled",
    [
        b"}" * 40_000_000 + b".",  # more than is read
        b"}" * 3_000_000 + b".",  # more than is followed
        b"(" * 900_000 + b"t" * 100_000 + b".",
        b"}X\x04\x00\x00\x00step\x8b\xff\xff\xff\x7f.",  # a number of 2 GB
        b"}X\x04\x00\x00\x00stepI" + b"9" * 1_000_000 + b"\ns.",
        b"s.",
        b".",
        b"2" * 1000 + b".",
        b"h\x05.",
        b"",
    ],
)
def test_what_was_made_to_harm_is_left_in_time_and_memory(tmp_path, pickled):
    (tmp_path / "ckpt.pt").write_bytes(as_saved(pickled, zipfile.ZIP_DEFLATED))
    began = time.process_time()
    assert counters_in(tmp_path / "ckpt.pt") == {}
    assert time.process_time() - began < 30


def test_nothing_is_run_of_what_a_pickle_names(tmp_path):
    (tmp_path / "ckpt.pt").write_bytes(as_saved(pickle.dumps({"bomb": Bomb(), "step": 5}, 2)))
    assert counters_in(tmp_path / "ckpt.pt") == {"step": 5}


def test_of_many_files_few_are_read(tmp_path):
    for number in range(20):
        torch.save({"step": number}, tmp_path / f"{number:02}.pt")
    assert len(counters_of(tmp_path, [f"{number:02}.pt" for number in range(20)])) == counters._MOST_FILES


ONE = "ckpt.pt"


@pytest.mark.parametrize(
    ("put_back", "saved", "behind"),
    [
        ({ONE: {"iter_num": 2000}}, {ONE: {"iter_num": 250}}, CounterDrop(saved=250, put_back=2000)),
        ({ONE: {"iter_num": 2000}}, {ONE: {"iter_num": 2000}}, None),
        ({ONE: {"iter_num": 2000}}, {ONE: {"iter_num": 2250}}, None),
        ({ONE: {"epoch": 12}}, {ONE: {"epoch": 0}}, CounterDrop(saved=0, put_back=12, epochs=True)),
        # A step that is counted within its epoch.
        ({ONE: {"epoch": 3, "step": 120}}, {ONE: {"epoch": 4, "step": 20}}, None),
        (
            {ONE: {"epoch": 3, "step": 20}},
            {ONE: {"epoch": 0, "step": 90}},
            CounterDrop(saved=0, put_back=3, epochs=True),
        ),
        # One that begins its epoch again has resumed.
        ({ONE: {"epoch": 5, "step": 300}}, {ONE: {"epoch": 5, "step": 100}}, None),
        ({ONE: {"epoch": 0, "step": 90}}, {ONE: {"epoch": 0, "step": 20}}, None),
        # Another key, another file, nothing at all.
        ({ONE: {"epoch": 3}}, {ONE: {"step": 2}}, None),
        ({"model.pt": {"epoch": 3}}, {"other.pt": {"epoch": 0}}, None),
        ({}, {ONE: {"epoch": 0}}, None),
        ({ONE: {"epoch": 3}}, {}, None),
        ({"ckpt_1.pt": {"epoch": 3}}, {"ckpt_2.pt": {"epoch": 0}}, CounterDrop(saved=0, put_back=3, epochs=True)),
        # The best model's is as it was, or of an older step.
        (
            {"best.pt": {"epoch": 5}, "last.pt": {"epoch": 10}},
            {"best.pt": {"epoch": 5}, "last.pt": {"epoch": 1}},
            CounterDrop(saved=1, put_back=10, epochs=True),
        ),
        (
            {"best.pt": {"epoch": 5}, "last.pt": {"epoch": 10}},
            {"best.pt": {"epoch": 4}, "last.pt": {"epoch": 11}},
            None,
        ),
    ],
)
def test_a_script_began_anew_where_a_counter_is_lower_and_none_is_higher(put_back, saved, behind):
    assert counter_drop(saved, put_back) == behind


def test_a_dict_that_is_its_own_trainings_state_tells_what_it_has_and_ends(tmp_path):
    saved = {}
    saved["trainer"] = saved
    torch.save(saved, tmp_path / "ckpt.pt")
    assert counters_in(tmp_path / "ckpt.pt") == {}
    saved["step"] = 5
    torch.save(saved, tmp_path / "ckpt.pt")
    assert counters_in(tmp_path / "ckpt.pt") == {"step": 5}
