"""What a checkpoint must give back beside the numbers: strides, types, shapes, generators; and what it refuses."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpucloud import resume
from gpucloud.domain.checkpoint.manifest import Level, Promise
from gpucloud.domain.errors import UsageError
from gpucloud.resume.attempt import SAVED_AND_LEFT
from gpucloud.resume.settings import given, promised, surroundings, tuned
from gpucloud.resume.state import generators, randomness
from gpucloud.resume.state.modules import rebuckets
from gpucloud.resume.state.tree import decode, encode, laid_out, strides_of
from tests.functional.resuming import begin, job

__all__ = ["job"]  # a fixture


def steps(run, model, optimizer, until, loss=lambda model: model(torch.ones(2, 3, 4, 4)).square().mean()):
    """Train without a loader, on the same numbers at every step."""
    while run.steps_done < until:
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        run.step()
    run._decider._finish()
    return {name: value.clone() for name, value in model.state_dict().items()}


def images(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 9, 3), nn.Conv2d(9, 1, 1)).to(memory_format=torch.channels_last)
    return model, torch.optim.Adam(model.parameters(), lr=0.01, **options)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"amsgrad": True, "fused": True}])
def test_strides_of_weights_in_channels_last_are_those_of_what_their_optimizer_keeps(job, options):
    model, optimizer = images(**options)
    steps(resume.init(model=model, optimizer=optimizer), model, optimizer, 4)
    whole = steps(resume.init(model=model, optimizer=optimizer), model, optimizer, 8)
    model, optimizer = images(**options)
    resumed = resume.init(model=model, optimizer=optimizer)
    assert resumed.steps_done == 8
    for path in (job / "store").rglob("000000008*"):
        assert path.exists()
    kept = optimizer.state[model[0].weight]["exp_avg"]
    assert kept.stride() == model[0].weight.stride() != kept.contiguous().stride()
    assert whole.keys() == model.state_dict().keys()


def test_a_run_in_channels_last_with_a_fused_optimizer_goes_on_bit_for_bit(job):
    model, optimizer = images(fused=True)
    run = resume.init(model=model, optimizer=optimizer)
    steps(run, model, optimizer, 4)
    whole = steps(run, model, optimizer, 9)
    for folder in ("commit", "data"):
        for path in (job / "store" / "jobs" / "x" / "checkpoints" / folder).glob("*/*"):
            if int(path.name[:9]) > 4:
                subprocess.run(["rm", "-r", path], check=True)
    model, optimizer = images(fused=True)
    run = resume.init(model=model, optimizer=optimizer)
    assert run.steps_done == 4
    again = steps(run, model, optimizer, 9)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(6).reshape(2, 3).T,
        torch.arange(6).reshape(2, 3),
        torch.empty(0, 3).T,
        torch.tensor(2.5),
        torch.arange(3).expand(2, 3),
        torch.arange(12)[::2],
    ],
)
def test_a_tensor_comes_back_with_its_strides_where_each_number_has_one_place(tensor):
    tensors = {}
    written = encode(tensor, "t", tensors)
    plain = {"t": tensors["t"].contiguous().clone()}
    read = decode(written, plain)
    assert torch.equal(read, tensor)
    assert read.stride() == (tensor.stride() if strides_of(tensor) else plain["t"].stride())


@pytest.mark.parametrize("strides", [(1, 1), (0, 1), (6, 2), (3, 1, 1), (2**62, 1), (-3, 1)])
def test_strides_that_cannot_be_are_damage_and_take_no_memory(strides):
    with pytest.raises(ValueError, match="no tensor of"):
        laid_out(torch.zeros(2, 3), strides)


def test_state_of_another_type_than_its_weight_keeps_it(job):
    """Optimizers for bf16 weights keep their moments, or weights too, in fp32; torch casts them down on loading."""

    class Master(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for weight in group["params"]:
                    kept = self.state[weight]
                    kept.setdefault("master", weight.detach().float())
                    kept.setdefault("deep", {"list": [torch.full((3,), 1 / 3)]})
                    kept["master"] -= 1e-4

    def made():
        torch.manual_seed(0)
        model = nn.Linear(3, 3).bfloat16()
        optimizer = Master(model.parameters(), lr=0.1, momentum=0.9)
        return resume.init(model=model, optimizer=optimizer), model, optimizer

    def loss(model):
        return model(torch.ones(1, 3, dtype=torch.bfloat16)).sum()

    run, model, optimizer = made()
    steps(run, model, optimizer, 2, loss)
    before = optimizer.state[model.weight]
    _, model, optimizer = made()
    kept = optimizer.state[model.weight]
    assert kept["master"].dtype == kept["deep"]["list"][0].dtype == torch.float32
    assert torch.equal(kept["master"], before["master"])
    assert torch.equal(kept["deep"]["list"][0], before["deep"]["list"][0])
    assert kept["momentum_buffer"].dtype == torch.bfloat16


class Growing(nn.Module):
    """Caches positions as far as they were needed, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1)
        self.register_buffer("cache", torch.zeros(4), persistent=False)
        self.register_buffer("late", None, persistent=False)

    def forward(self, length):
        if length > len(self.cache):
            self.cache = torch.arange(float(length))
            self.late = torch.ones(2)
        return self.line(self.cache[:length, None]).sum()


def test_a_buffer_that_has_grown_comes_back_as_it_was(job):
    def made():
        torch.manual_seed(0)
        model = Growing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        return resume.init(model=model, optimizer=optimizer), model, optimizer

    run, model, optimizer = made()
    steps(run, model, optimizer, 2, lambda model: model(8))
    run, model, optimizer = made()
    assert run.steps_done == 2
    assert model.cache.tolist() == list(range(8))
    assert "cache" not in model.state_dict()
    steps(run, model, optimizer, 4, lambda model: model(8))


def test_what_a_loop_of_its_own_draws_is_not_drawn_again_after_a_resume(job, capsys):
    def drawn(until):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        run = resume.init(model=model)
        numbers = []
        while run.steps_done < until:
            numbers.append(torch.rand(()).item())
            run.step()
        run._decider._finish()
        return run, numbers

    _, first = drawn(4)
    run, then = drawn(8)
    assert not set(then[1:]) & set(first)
    assert run.level is Level.BEST_EFFORT
    assert "without `run.loader`" in capsys.readouterr().err


@pytest.fixture
def alone():
    """A process group of one rank."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_replicated_model_is_found_however_deep_it_lies(alone):
    def replicated(**options):
        return DistributedDataParallel(nn.Linear(1, 1), **options)

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self._forward_module = inner

    assert rebuckets(Wrapped(Wrapped(replicated())))
    assert rebuckets(nn.ModuleList([nn.Linear(1, 1), replicated()]))
    assert rebuckets(torch.compile(replicated(), backend="eager"))
    assert not rebuckets(Wrapped(replicated(find_unused_parameters=True)))
    assert not rebuckets(nn.Linear(1, 1))


class Accelerated(torch.optim.Optimizer):
    """An optimizer around another that is none itself, as Accelerate's is."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)


def test_an_optimizer_inside_another_is_the_one_that_is_watched_and_saved(job):
    model, inner = images()
    run = resume.init(model=model, optimizer=Accelerated(inner))
    steps(run, model, inner, 2)
    before = inner.state[model[0].weight]["exp_avg"].clone()
    model, inner = images()
    assert resume.init(model=model, optimizer=Accelerated(inner)).steps_done == 2
    assert torch.equal(inner.state[model[0].weight]["exp_avg"], before)


def test_a_type_that_no_checkpoint_has_is_refused_by_the_tensors_name(job):
    run, *_ = begin(odd=nn.ParameterDict({"one": nn.Parameter(torch.zeros(2, dtype=torch.complex128))}))
    with pytest.raises(UsageError, match=r"cannot save odd\.one: no checkpoint has a form for torch\.complex128") as no:
        run.step()
    assert "float32" in no.value.hint


def test_state_that_no_rank_has_whole_is_refused_at_once(job):
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="no rank has whole") as refused:
        resume.init(model=model, optimizer=ZeroRedundancyOptimizer(model.parameters()))
    assert "fully_shard" in refused.value.hint


def test_a_script_that_ends_its_process_group_itself_leaves_with_the_code_of_who_was_asked_to(job):
    (job / "attempt" / "stop.json").write_text('{"reason": "stop", "at": "2026-01-01T00:00:00+00:00"}')
    (job / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from gpucloud import resume\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "try:\n"
        "    run = resume.init(model=torch.nn.Linear(2, 2))\n"
        "    while True:\n"
        "        run.step()\n"
        "finally:\n"
        "    dist.destroy_process_group()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, job / "train.py"], capture_output=True, text=True, env=environment)
    assert done.returncode == SAVED_AND_LEFT, done.stderr


MADE_OF = '{"code": "a", "run": "train.py", "settings": "c"}'
HERE = surroundings(8, "whole", {"LOCAL_WORLD_SIZE": "8", "GPUCLOUD_RECIPE": MADE_OF})


@pytest.mark.parametrize(
    ("changes", "level", "why"),
    [
        ({}, Level.EXACT, ""),
        ({"per_node": "4"}, Level.SAME_SAMPLES, "per_node 8 → 4"),
        ({"world": 16, "per_node": "4"}, Level.SAME_SAMPLES, "world 8 → 16"),
        ({"threads": 96}, Level.SAME_SAMPLES, f"threads {torch.get_num_threads()} → 96"),
        ({"vectors": "NEON"}, Level.SAME_SAMPLES, f"vectors {HERE['vectors']} → NEON"),
        ({"device": "mps"}, Level.BEST_EFFORT, "device cpu → mps"),
        ({"run": "train.py --epochs 1"}, Level.BEST_EFFORT, "run train.py → train.py --epochs 1"),
        ({"code": "b"}, Level.BEST_EFFORT, "code a → b"),
        ({"settings": "d"}, Level.BEST_EFFORT, "settings c → d"),
        ({"seeding": HERE["seeding"] + 1}, Level.BEST_EFFORT, f"seeding {HERE['seeding']} → {HERE['seeding'] + 1}"),
        ({"cudnn": 91002, "threads": 96}, Level.BEST_EFFORT, "cudnn None → 91002"),
    ],
)
def test_what_rounds_otherwise_is_not_called_exact(changes, level, why):
    found = promised(HERE, {**HERE, **changes})
    assert (found.level, why in found.reason) == (level, True)


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        ({"a.py": "1", "b.py": "2"}, {"a.py": "1", "b.py": "2"}, ""),
        ({"a.py": "1", "b.py": "2"}, {"a.py": "1", "b.py": "3"}, "code of b.py"),
        ({"a.py": "1"}, {"a.py": "1", "b.py": "3"}, ""),  # imported later, then: nobody knows of it
        ("77ab", {"a.py": "1"}, "code is another"),
        (None, {"a.py": "1"}, "code is another"),
        ({"a.py": "1"}, "77ab", "code is another"),
    ],
)
def test_outside_a_launcher_the_files_that_both_attempts_have_are_compared(before, now, why):
    level = Level.BEST_EFFORT if why else Level.EXACT
    assert promised({"code": before}, {"code": now}) == Promise(level, why)


def test_ranks_spread_over_other_machines_are_seen(monkeypatch):
    monkeypatch.setenv("GPUCLOUD_RECIPE", MADE_OF)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert promised(HERE, surroundings(8, "whole")).level is Level.SAME_SAMPLES


@pytest.mark.parametrize(
    ("gpu", "compiled", "level"),
    [(True, True, Level.SAME_SAMPLES), (True, False, Level.EXACT), (False, True, Level.EXACT)],
)
def test_kernels_that_are_chosen_by_their_speed_are_not_called_exact(monkeypatch, gpu, compiled, level):
    cache = SimpleNamespace(PyCodeCache=SimpleNamespace(modules=[sys] if compiled else []))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setitem(sys.modules, "torch._inductor.codecache", cache)
    assert tuned().level is level


def test_code_that_inductor_made_is_seen_and_what_is_traced_alone_is_none(tmp_path):
    """By what only torch knows, in this torch too; in a process of its own, for what was compiled stays."""
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib\n"
        "import torch\n"
        "from gpucloud.resume.settings import tuned\n"
        "torch.compile(lambda x: x * 2, backend='aot_eager')(torch.ones(2))\n"
        "torch.cuda.is_available = lambda: True\n"
        "print(tuned().level.value)\n"
        "importlib.import_module('torch._inductor.codecache').PyCodeCache.load('ready = True')\n"
        "print(tuned().level.value)\n"
    )
    told = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert told.stdout.split() == ["exact", "same_samples"], told.stderr


def test_a_tensor_that_a_gpu_had_comes_back_on_this_ranks(monkeypatch):
    """A plain object, as a diffusers EMAModel, keeps what it is given: on the CPU its next update would end the run."""
    tensors = {}
    with monkeypatch.context() as there:
        there.setattr(torch.Tensor, "is_cuda", True)
        saved = encode({"mean": torch.ones(2)}, "average", tensors)
    assert saved["mean"]["gpu"] is True
    moved = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: moved.append(self) or self)
    assert decode(saved, tensors)["mean"] is moved[0]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(()),
        lambda: random.getrandbits(8),
        np.random.rand,
        np.random.normal,
        lambda: np.random.seed(7),
    ],
    ids=["torch", "Python", "NumPy", "NumPy's reserve", "another seed"],
)
@pytest.mark.parametrize("in_reserve", [0, 1])
@pytest.mark.parametrize("states", ["in memory", "asked for"], indirect=True)
def test_whatever_draws_is_seen_and_put_back(draw, in_reserve, states):
    for _ in range(in_reserve):
        np.random.normal()
        random.gauss(0, 1)
    before, captured = randomness.here(), randomness.capture()
    following = drawn()
    assert not before.stands()
    before.put_back()
    assert before.stands()
    draw()
    assert not before.stands()
    before.put_back()
    assert before.stands()
    assert drawn() == following
    randomness.put_back(captured)
    assert before.stands()
    with randomness.kept():
        draw()
    assert drawn() == following


@pytest.fixture
def states(request, monkeypatch):
    """How generators tell where they stand; none is remembered from before, nor afterwards."""
    if request.param == "asked for":
        monkeypatch.setattr(generators, "_python_lies_there", lambda: False)
        monkeypatch.setattr(generators, "_reserve", lambda _kind: None)
        monkeypatch.setattr(generators, "_torchs_place", lambda: None)
    for known in (generators._without_numpy, generators._with_numpy, generators._twister):
        known.cache_clear()
    asked = [isinstance(one, generators._Asked) for one in generators.of_cpu()]
    assert asked == [request.param == "asked for"] * 3
    yield
    for known in (generators._without_numpy, generators._with_numpy, generators._twister):
        known.cache_clear()


@pytest.mark.parametrize("states", ["in memory", "asked for"], indirect=True)
def test_a_seed_puts_each_at_words_of_it_in_another_order(states):
    number = randomness.mix(1, 2, 3)
    assert number == randomness.mix(3, mixed=randomness.mix(1, 2)) == 0x6AE515C1C0AC7E37
    words = np.random.RandomState(number >> 1 & 0xFFFFFFFF).get_state()[1].tolist()
    torch.manual_seed(number >> 1)
    quarters = [words[n : n + 156] for n in range(0, 624, 156)]
    pythons = itertools.chain(*(quarters[n] for n in (1, 3, 0, 2)))
    random.setstate((random.Random.VERSION, (*pythons, 624), None))
    np.random.set_state(("MT19937", np.array([*words[312:], *words[:312]], np.uint32), 624))
    seeded = drawn()
    random.gauss(0, 1)
    with randomness.kept() as those:
        those.seed(number)
        assert drawn() == seeded


@pytest.mark.parametrize("states", ["in memory", "asked for"], indirect=True)
def test_what_is_seeded_for_each_by_itself_draws_alike_however_it_is_put_there(states):
    with randomness.kept() as those:
        those.seed_each((1 << 1, 2 << 32, 3))
        seeded = drawn()
    torch.manual_seed(1)
    words = np.random.RandomState(2).get_state()[1].tolist()
    random.setstate((random.Random.VERSION, (*words, len(words)), None))
    np.random.seed(3)
    assert drawn() == seeded


def test_generators_that_are_seeded_together_draw_unlike_numbers():
    count = 20_000
    with randomness.kept() as those:
        those.seed(randomness.mix(4))
        words = [
            torch.empty(count, dtype=torch.int64).random_(2**24).numpy(),  # the lower bits of one word each
            np.frombuffer(random.randbytes(4 * count), np.uint32) % 2**24,
            np.frombuffer(np.random.bytes(4 * count), np.uint32) % 2**24,
        ]
    for one, other in itertools.permutations(words, 2):
        for late in (0, 1, 208, 227, 312, 397, 416, 624):
            bits = np.unpackbits((one[late:] ^ other[: count - late]).astype(np.uint32).view(np.uint8))
            assert abs(32 * bits.mean() - 12) < 0.1


def drawn():
    """Draw from every generator, their reserves included."""
    return torch.rand(2).tolist(), [random.gauss(0, 1) for _ in range(3)], np.random.normal(size=3).tolist()


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox])
def test_a_generator_that_numpy_draws_from_instead_is_told_from_the_one_before(kind):
    before, own = randomness.here(), np.random.get_bit_generator()
    with_own = drawn()
    before.put_back()
    np.random.set_bit_generator(kind(3))
    try:
        assert not before.stands()
        other = randomness.here()
        following = drawn()
        other.put_back()
        assert drawn() == following
        randomness.put_back(other.told())
        assert drawn() == following
        with randomness.kept() as those:
            those.seed(5)
            seeded = np.random.rand(3).tolist()
            those.seed(5)
            assert np.random.rand(3).tolist() == seeded
        if kind is np.random.MT19937:
            before.put_back()
            assert drawn() == with_own
    finally:
        np.random.set_bit_generator(own)
    assert not other.stands()


def test_the_memory_of_what_is_no_generators_twister_is_not_taken_for_one(monkeypatch):
    class Other(random.Random):
        def getstate(self):
            return 3, (0,) * 625, None

    monkeypatch.setattr(generators.random, "Random", Other)
    assert not generators._python_lies_there.__wrapped__()


def test_where_torch_keeps_its_words_elsewhere_it_is_asked(monkeypatch):
    monkeypatch.setattr(generators, "_SEEDED", generators.struct.Struct("Qi?xxx4xII"))
    assert generators._torchs_place.__wrapped__() is None
    monkeypatch.undo()
    assert generators._torchs_place.__wrapped__() is not None
    monkeypatch.setattr(generators, "_TORCHS", generators.struct.Struct(f"Qi?xxxI{generators._WORDS - 4}I"))
    assert generators._torchs_place.__wrapped__() is None


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_torchs_words_and_reserve_are_told_from_memory_as_torch_tells_them(kind):
    torch.manual_seed(3)
    own = generators._torchs()
    assert isinstance(own, generators._Torch)
    for number in range(700):  # past the end of the words
        torch.randn(1 + number % 2, dtype=kind)
        state = own.read()
        assert torch.equal(own.told(state), torch.get_rng_state())
    following = torch.randn(3, dtype=kind)
    own.write(state)
    assert torch.equal(torch.randn(3, dtype=kind), following)


def test_the_generator_of_a_mac_is_saved_too(monkeypatch):
    stands = [torch.tensor([1], dtype=torch.uint8)]
    monkeypatch.setattr(randomness, "of_devices", generators.of_devices.__wrapped__)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: stands[-1])
    monkeypatch.setattr(torch.mps, "set_rng_state", stands.append)
    state, here = randomness.capture(), randomness.here()
    stands.append(torch.tensor([2], dtype=torch.uint8))
    assert not here.stands()
    randomness.put_back(state)
    assert stands[-1].tolist() == [1]
    assert here.stands()
    stands.append(torch.tensor([2], dtype=torch.uint8))
    here.put_back()
    assert here.stands()


@pytest.mark.parametrize(
    ("options", "lr", "said"),
    [
        (
            "a",
            0.01,
            "optimizer lr 0.1 → 0.01 in the script: what the checkpoint has is put back;"
            " a new run (another `name:` in the job file) has the script's",
        ),
        ("a", 0.1, None),
        ("same", 0.01, None),  # a script that is as it was may make its optimizer by what it resumes
    ],
)
def test_a_setting_of_an_optimizer_that_the_checkpoint_overrules_is_named(job, monkeypatch, capsys, options, lr, said):
    def start(lr, options):
        monkeypatch.setenv("GPUCLOUD_RECIPE", json.dumps({"options": options}))
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        run = resume.init(model=model, optimizer=optimizer, scheduler=schedule, total_steps=8)
        return run, model, optimizer

    steps(*start(0.1, "same"), 3, lambda model: model(torch.ones(2, 2)).square().mean())
    capsys.readouterr()
    _, _, optimizer = start(lr, options)
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
    told = capsys.readouterr().err
    assert (said in told) if said else "in the script" not in told


@pytest.fixture
def elsewhere(job, monkeypatch):
    """A start by something else than gpucloud."""
    monkeypatch.delenv("GPUCLOUD_ATTEMPT_DIR")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("lr", "world", "said"),
    [
        (
            0.01,
            1,
            "this resume is best_effort, not exact: optimizer lr 0.1 → 0.01 in the script: what the checkpoint has"
            " is put back; a new run (another GPUCLOUD_STORE) has the script's",
        ),
        (None, 1, None),  # made by what it resumes
        (0.01, 2, None),  # may be reckoned from the number of ranks
    ],
)
def test_elsewhere_a_setting_that_the_checkpoint_overrules_is_named_whatever_file_or_variable_has_it(
    monkeypatch, capsys, lr, world, said
):
    """What else than the script's own files and options has changed is seen by nobody there."""

    def start(lr):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
        run = resume.init(model=model, optimizer=optimizer, scheduler=schedule, total_steps=8)
        return run, model, optimizer

    with monkeypatch.context() as patched:
        patched.setattr("gpucloud.resume.run.surroundings", lambda _, arrangement: surroundings(world, arrangement))
        run, model, first = start(0.1)
        steps(run, model, first, 3, lambda model: model(torch.ones(2, 2)).square().mean())
    capsys.readouterr()
    _, _, optimizer = start(first.param_groups[0]["lr"] if lr is None else lr)
    assert optimizer.param_groups[0]["initial_lr"] == 0.1
    told = capsys.readouterr().err
    assert (said in told) if said else "in the script" not in told


@pytest.mark.usefixtures("elsewhere")
def test_elsewhere_a_script_that_makes_its_optimizer_by_its_phase_and_a_schedule_anew_is_as_it_was(capsys):
    for until, second in ((2, False), (4, True), (6, True)):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if second else 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        run = resume.init(model=model, optimizer=optimizer, scheduler=schedule, total_steps=8)
        assert "in the script" not in capsys.readouterr().err
        if until == 2:  # the second phase begins: a rate of its own, and its own decay from there
            optimizer.param_groups[0].update(lr=0.01, initial_lr=0.01)
            schedule.base_lrs = [0.01]
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 2)).square().mean().backward()
            optimizer.step()
            schedule.step()
            run.step()
        run._decider._finish()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.9**until)
        assert run.steps_done == until


def test_a_setting_that_the_checkpoint_overruled_is_named_again_when_the_same_script_goes_on(job, monkeypatch, capsys):
    for recipe, lr, until in (("a", 0.1, 3), ("b", 0.01, 5), ("b", 0.01, 7), ("b", 0.1, 9)):
        monkeypatch.setenv("GPUCLOUD_RECIPE", json.dumps({"options": recipe}))
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        run = resume.init(model=model, optimizer=optimizer, total_steps=9)
        named = "optimizer lr 0.1 → 0.01 in the script" in capsys.readouterr().err
        assert (named, optimizer.param_groups[0]["lr"]) == (lr == 0.01, 0.1)
        steps(run, model, optimizer, until, lambda model: model(torch.ones(2, 2)).square().mean())


def test_of_what_optimizers_are_given_numbers_alone_are_kept_and_of_many_groups_a_range():
    many = [
        {"lr": 0.1 * n, "initial_lr": float(n), "betas": (0.9, 0.99), "names": "x", "foreach": None} for n in (3, 1, 2)
    ]
    one = [
        {"lr": torch.tensor(0.5), "weight_decay": 0, "capturable": True, "table": list(range(9)), "at": torch.ones(2)}
    ]
    assert given({"deep": many, "flat": one}) == {
        "deep lr": [1.0, 3.0], "deep betas": [0.9, 0.99],
        "flat lr": 0.5, "flat weight_decay": 0, "flat capturable": True,
    }  # fmt: skip
