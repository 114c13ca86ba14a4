"""A model whose tensors the ranks hold together: resumed to the bit, and on other numbers of ranks and other ways."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from gpucloud.domain.checkpoint import objects
from gpucloud.domain.checkpoint.chunks import Box
from gpucloud.domain.checkpoint.objects import entries_of, header_bytes, placed, read_header
from gpucloud.domain.errors import UsageError
from gpucloud.resume.reading import Contents, Held, content, whole_of
from gpucloud.resume.restoring import parts_needed
from gpucloud.resume.save.capture import Capture
from gpucloud.resume.state.modules import parameter_names, plain
from gpucloud.resume.state.state import TrainingState
from gpucloud.resume.state.tree import NAMES, Layout, tensor_at
from gpucloud.store import open_store
from gpucloud.store.checkpoints import Checkpoints
from gpucloud.usecases.checkpoint import pulling
from gpucloud.usecases.checkpoint.checkpoints import StoredCheckpoints
from tests.functional import train_sharded
from tests.standins.saved_runs import PREFIX, SavedRun, forking


class Sharded:
    """One job's attempts, each with its own number of ranks and way to hold the model."""

    def __init__(self, folder, dropout=0.1):
        self.run = SavedRun(folder, every=2, keep=9, script=train_sharded.main)
        self.dropout = dropout

    def attempt(self, ranks, way, *, steps=6, die_at=0):
        self.run.ranks, self.run.steps = ranks, steps
        self.run.arguments = ("--way", way, "--die-at", str(die_at), "--dropout", str(self.dropout))
        codes = self.run.attempt()
        assert (codes == [0] * ranks) == (die_at == 0), self.run.said()
        return self

    def result(self, rank=0):
        return json.loads((self.run.folder / f"result-{rank}.json").read_text())

    def states(self):
        """The tensors of the last attempt, whole: as they were restored, and at its end."""
        return torch.load(self.run.folder / "states.pt")


@pytest.fixture(autouse=True)
def quick():
    with forking():
        yield


@pytest.mark.parametrize(
    ("ranks", "way"),
    [(2, "fsdp"), *(pytest.param(*one, marks=pytest.mark.slow) for one in [(3, "fsdp"), (2, "tp"), (4, "hybrid")])],
)
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(tmp_path, ranks, way):
    unbroken = Sharded(tmp_path / "unbroken").attempt(ranks, way)
    killed = Sharded(tmp_path / "killed").attempt(ranks, way, die_at=5).attempt(ranks, way)
    assert killed.result()["started"] == 4, killed.run.said()
    assert killed.result()["level"] == "exact"
    assert killed.run.digests() == unbroken.run.digests()
    assert killed.result()["losses"] == unbroken.result()["losses"][4:]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow  # nine launches, one after the other
def test_what_one_way_has_saved_another_way_restores_to_the_bit_and_goes_on_with_the_same_samples(tmp_path):
    whole = Sharded(tmp_path / "whole", dropout=0).attempt(1, "whole", steps=10)
    job, losses, saved = Sharded(tmp_path / "job", dropout=0), [], None
    for steps, (ranks, way) in enumerate(WAYS, 2):
        job.attempt(ranks, way, steps=steps)
        restored, left = job.states()
        assert saved is None or same(restored, saved), (ranks, way)
        assert job.result()["level"] == ("exact" if saved is None else "same_samples"), job.run.said()
        saved = left
        losses += job.result()["losses"]
    assert losses == pytest.approx(whole.result()["losses"], rel=1e-5)


WAYS = [
    (2, "fsdp"),
    (3, "fsdp"),
    (1, "whole"),
    (2, "fsdp"),
    (2, "ddp"),
    (2, "fsdp"),
    (2, "tp"),
    (4, "both"),
    (4, "hybrid"),
]


def test_a_damaged_part_of_one_rank_is_passed_over_by_all(tmp_path, capfd):
    job = Sharded(tmp_path / "job").attempt(2, "fsdp", steps=6)
    (newest,) = (tmp_path / "job" / "store").rglob("data/*/000000006/rank-00001*")
    data = newest.read_bytes()
    newest.write_bytes(data[:-20] + bytes([data[-20] ^ 1]) + data[-19:])
    job.attempt(3, "fsdp", steps=6)
    assert job.result()["started"] == 4
    assert capfd.readouterr().err.count("the checkpoint of step 6 is damaged: passed over") == 1


@pytest.mark.slow  # a launch; the arithmetic is in tests/unit/test_chunks.py
def test_an_export_has_whole_tensors_by_the_bare_models_names(tmp_path):
    job = Sharded(tmp_path / "job").attempt(2, "fsdp", steps=2)
    stored_checkpoints = StoredCheckpoints(store=open_store(job.run.url), prefix=PREFIX, keep=3)
    manifest = next(Checkpoints(stored_checkpoints.store, PREFIX, keep=3).candidates())
    plan = pulling.planned(stored_checkpoints, manifest, everything=True, about={})
    pulling.write(stored_checkpoints, manifest, plan, tmp_path / "all.safetensors")
    data = memoryview(bytearray((tmp_path / "all.safetensors").read_bytes()))
    header = read_header(data)
    memory = torch.frombuffer(data, dtype=torch.uint8)
    found = {tensor.name: tensor_at(memory, header.start, tensor) for tensor in header.tensors}
    for name, tensor in job.states()[1].items():
        kind, _, of = name.partition(" ")
        of = of.replace("_checkpoint_wrapped_module.", "")
        there = {"weight": of, "mean": f"others.average.shadow.{name.partition(' ')[2]}"}
        assert torch.equal(found[there.get(kind, f"optimizer.state.model.{of}.{kind}")], tensor), name


def compiled(module):
    return torch.compile(module, backend="eager")  # never run: it is for its names


def test_wrappers_leave_no_word_in_names():
    layers = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(compiled(nn.Linear(2, 2))))
    optimizer = torch.optim.SGD([{"params": layers[1].parameters()}, {"params": layers[0].parameters()}])
    model = compiled(layers)
    assert parameter_names({"model": model}, optimizer) == [
        "model.1.weight",
        "model.1.bias",
        "model.0.weight",
        "model.0.bias",
    ]
    assert [plain(name) for name in model.state_dict()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_state_of_wrapped_and_bare_models_is_exchanged():
    def made(wrap):
        torch.manual_seed(wrap)
        inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        model = (
            compiled(nn.Sequential(checkpoint_wrapper(inner), nn.Linear(3, 1)))
            if wrap
            else nn.Sequential(inner, nn.Linear(3, 1))
        )
        optimizer = torch.optim.Adam(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return model, TrainingState({"model": model, "optimizer": optimizer})

    for first in (True, False):
        model, state = made(first)
        found = state.collect(0, 1, {})
        tensors = found.shared | found.own
        data = header_bytes(
            entries_of(places := placed((n, NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items())),
            found.metadata,
        )
        memory = torch.frombuffer(
            bytearray(data + b"".join(tensors[p.name].numpy().tobytes() for p in places)), dtype=torch.uint8
        )
        held = {0: Held(memoryview(memory.numpy()), memory, read_header(memoryview(memory.numpy())))}
        other, into = made(not first)
        into.fit(content(Contents({0: held[0].header}, [0], whole_of(held)), 0, held), 1)
        assert [t.tolist() for t in other.state_dict().values()] == [t.tolist() for t in model.state_dict().values()]


def test_a_rank_reads_the_parts_that_hold_its_rows_and_what_it_needs_whole(monkeypatch):
    monkeypatch.setattr(objects, "PART_BYTES", 64)
    rows = [
        ("model.w", "F32", (16, 4)),
        ("rank.randomness", "U8", (64,)),
        ("model.b", "U8", (64,)),
    ]
    data = header_bytes(entries_of(placed(rows)), {"shards": SECOND_HALF}, 640)
    headers = dict.fromkeys((0, 1), read_header(memoryview(data), 640 + 256 + 128))
    mine = {"model.w": Layout(torch.empty(32, 4), Box((20, 0), (6, 4)))}
    # Rows 20 to 25 of 32 are 4 to 9 of these objects, which have 4 in a part; the header has 10 parts.
    assert sorted(parts_needed(headers, mine, own=1)) == [(0, 11), (0, 12), (0, 15), (1, 11), (1, 12), (1, 14), (1, 15)]


SECOND_HALF = json.dumps({"model.w": {"of": "model.w", "shape": [32, 4], "offset": [16, 0]}})


def test_ranks_with_different_models_are_told_so():
    class Told:
        device, rank, world = torch.device("cpu"), 0, 2

        def highest(self, *numbers):
            return tuple(max(number, 7) for number in numbers)

    capture = Capture(TrainingState({"model": nn.Linear(2, 2)}), Told())
    with pytest.raises(UsageError, match="the ranks have different models") as refused:
        capture.begin({})
    assert refused.value.hint.endswith("give resume.init the PipelineStage: model=stage")


def test_a_shape_that_only_one_rank_has_is_told_to_the_others():
    told = [TrainingState({"model": nn.Linear(2, width)}).collect(0, 2, {}).names for width in (2, 3)]
    assert told[0] != told[1]
