"""A loader of the script's own: continued at its next batch, from any step on, with the same random numbers."""

import gc
import itertools
import json
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from gpucloud import resume
from gpucloud.domain.checkpoint.manifest import Level
from gpucloud.domain.errors import UsageError
from gpucloud.resume.batches import Wrapped
from gpucloud.resume.loader import Drawn
from gpucloud.resume.sources import source_of
from gpucloud.resume.state import randomness
from gpucloud.resume.state.tree import decode, encode
from tests.functional.resuming import job

__all__ = ["job"]  # a fixture
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # by torchdata 0.11 with torch 2.13
SAMPLES, BATCH, EPOCHS = 22, 4, 3  # five batches, and one of two samples, in each of three epochs
PER_EPOCH = 6


@pytest.fixture(autouse=True)
def _workers_hand_over_files():
    """As they do not otherwise: sockets are closed to tests."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(strategy)


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()).item() + np.random.rand() + random.uniform(0, 1)])


class Stream(torch.utils.data.IterableDataset):
    """Samples in an order that global generators decide on, in the midst of an epoch too."""

    def __iter__(self):
        held = []
        for index in torch.randperm(SAMPLES).tolist():
            held.append(index)
            if len(held) > 3:
                yield Noisy()[held.pop(random.randrange(len(held)))]
        yield from (Noisy()[index] for index in held)


class Resumable(torch.utils.data.IterableDataset):
    """A stream that knows where it is."""

    done = 0

    def __iter__(self):
        for index in range(self.done, SAMPLES):
            self.done = index + 1
            yield Noisy()[index]
        self.done = 0

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class ByLength:
    """A batch sampler of the script's own, whose order comes from Python's generator."""

    def __init__(self):
        self._pools = [list(range(start, min(start + BATCH, SAMPLES))) for start in range(0, SAMPLES, BATCH)]

    def __iter__(self):
        yield from random.sample(self._pools, len(self._pools))

    def __len__(self):
        return len(self._pools)


class Remembering:
    """A sampler with a state: each epoch begins where the last one ended."""

    def __init__(self):
        self._start = 0

    def __iter__(self):
        self._start += 5
        yield from ((index + self._start) % SAMPLES for index in range(SAMPLES))

    def __len__(self):
        return SAMPLES

    def state_dict(self):
        return {"start": self._start}

    def load_state_dict(self, state):
        self._start = state["start"]


class Telling:
    """Batches, not samples: the data set itself makes them."""

    def __getitem__(self, key):
        return Noisy()[key].repeat(BATCH, 1)


class Own:
    """No DataLoader at all, with a state by its own word."""

    def __init__(self):
        self.rng, self._at = random.Random(3), 0

    def __iter__(self):
        while self._at < PER_EPOCH:
            self._at += 1
            yield torch.stack([Noisy()[self.rng.randrange(SAMPLES)] for _ in range(BATCH)])
        self._at = 0

    def state_dict(self):
        return {"at": self._at}

    def load_state_dict(self, state):
        self._at = state["at"]


def packed():
    for _ in range(PER_EPOCH):
        yield torch.stack([Noisy()[random.randrange(SAMPLES)] for _ in range(BATCH)])


def seeded(number):
    return torch.Generator().manual_seed(number)


LOADERS = {
    "in order": lambda: DataLoader(Noisy(), BATCH),
    "shuffled": lambda: DataLoader(Noisy(), BATCH, shuffle=True),
    "shuffled by a generator of its own": lambda: DataLoader(Noisy(), BATCH, shuffle=True, generator=seeded(5)),
    "a sampler with a generator": lambda: DataLoader(
        Noisy(), BATCH, sampler=RandomSampler(Noisy(), generator=seeded(5))
    ),
    "weighted": lambda: DataLoader(Noisy(), BATCH, sampler=WeightedRandomSampler([1.0, 3.0] * 11, SAMPLES)),
    "by length": lambda: DataLoader(Noisy(), batch_sampler=ByLength()),
    "a sampler with a state": lambda: DataLoader(Noisy(), BATCH, sampler=Remembering()),
    "whole batches": lambda: DataLoader(Telling(), batch_size=None, sampler=RandomSampler(range(PER_EPOCH))),
    "stateful, with a sampler": lambda: StatefulDataLoader(Noisy(), BATCH, shuffle=True),
    "stateful": lambda: StatefulDataLoader(Resumable(), BATCH),
    "stateful of its own": Own,
    "read again": lambda: DataLoader(Stream(), BATCH),
    "made by a function": lambda: packed,
}
IN_WORKERS = {
    "shuffled": lambda: DataLoader(Noisy(), BATCH, shuffle=True, num_workers=2, persistent_workers=True),
    "stateful": lambda: StatefulDataLoader(Resumable(), BATCH, num_workers=2),
    "read again": lambda: DataLoader(Stream(), BATCH, num_workers=1, persistent_workers=True),
}


class Training:
    """A script with epochs, and a schedule that goes on with each of them."""

    def __init__(self, loader, total_steps=None, **how):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.run = resume.init(
            model=self.model, optimizer=self.optimizer, schedule=self.schedule, total_steps=total_steps
        )
        self.loader = self.run.wrap(loader, **how)
        self.seen = []

    def train(self, until=None, epochs=EPOCHS):
        for _epoch in self.run.epochs(epochs):
            for batch in self.loader:
                self.step(batch)
                if self.run.steps_done == until:
                    return self._left()
            torch.rand(7)  # an evaluation draws
            self.schedule.step()
        return self._left()

    def step(self, batch):
        self.optimizer.zero_grad()
        self.model(batch).square().sum().backward()
        self.optimizer.step()
        self.seen.append((self.run.steps_done + 1, batch.tolist()))
        self.run.step()

    def _left(self):
        self.run._decider._finish()
        self.run._decider.close()
        return self.seen, [value.tolist() for value in self.model.state_dict().values()]


def uninterrupted(make, monkeypatch, folder):
    with monkeypatch.context() as patch:
        patch.setenv("GPUCLOUD_STORE", str(folder / "whole"))
        return Training(make()).train()


def resumed_equals_uninterrupted(make, until, monkeypatch, folder):
    seen, weights = uninterrupted(make, monkeypatch, folder)
    first, _ = Training(make()).train(until=until)
    after = Training(make())
    rest, ended = after.train()
    assert first == seen[:until]
    assert rest == seen[until - until % 2 :]
    assert ended == weights
    assert after.run.level is Level.EXACT


class Steps:
    """What a run does with the batches, and nothing else: a step draws, and is followed by an evaluation that does."""

    def __init__(self, make, saved=None):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        self.said = []
        self.loader = Wrapped(source_of(make(), seed=7, rank=0), 1, self.said.append)
        self._after = saved and saved["randomness"]
        if saved:
            assert self.loader.load_state_dict(saved["loader"]) == {}
            torch.rand(5)  # whatever a script draws before its loop
        self.loader.begin = self.loader.asked = self._as_the_step_left

    def take(self, until=EPOCHS * PER_EPOCH):
        """Train, to that step or the end, and return what each step was made of."""
        seen = []
        for epoch in range(self.loader.handed.epoch, EPOCHS):
            self.loader.enter(epoch)
            for batch in self.loader:
                seen.append((epoch, batch.tolist(), torch.rand(()).item(), random.uniform(0, 1), np.random.rand()))
                self.loader.stepped()
                self._after = randomness.capture()
                torch.rand(3)
                if len(seen) == until:
                    return seen
        return seen

    def saved(self):
        tensors = {}
        told = {"loader": self.loader.state_dict(), "randomness": self._after}
        return decode(json.loads(json.dumps(encode(told, "", tensors))), tensors)

    def _as_the_step_left(self, *_):
        if self._after is not None and not self.loader.untrained:
            randomness.put_back(self._after)


@pytest.mark.parametrize("name", LOADERS)
def test_from_any_step_on_the_batches_are_the_same_and_so_is_what_training_draws(name):
    whole = Steps(LOADERS[name]).take()
    assert len({json.dumps(step) for step in whole}) == EPOCHS * PER_EPOCH
    for until in (1, 5, 6, 7, 13):
        first = Steps(LOADERS[name])
        assert first.take(until) == whole[:until]
        second = Steps(LOADERS[name], first.saved())
        assert second.take(2) == whole[until : until + 2]
        third = Steps(LOADERS[name], second.saved())
        assert third.take() == whole[until + 2 :]
        assert first.said + second.said + third.said == []


@pytest.mark.parametrize(
    "name", ["shuffled", "a sampler with a generator", "stateful", "stateful of its own", "read again"]
)
def test_what_is_saved_between_two_epochs_begins_with_the_next(name):
    whole = Steps(LOADERS[name]).take()
    first = Steps(LOADERS[name])
    first.take(PER_EPOCH)
    assert list(first.loader) == []  # the epoch's end
    assert first.saved()["loader"]["over"]
    second = Steps(LOADERS[name], first.saved())
    assert second.take() == whole[PER_EPOCH:]


@pytest.mark.parametrize("name", ["shuffled", "stateful", "by length"])
def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(job, monkeypatch, name):
    resumed_equals_uninterrupted(LOADERS[name], {"shuffled": 6}.get(name, 8), monkeypatch, job)


@pytest.mark.parametrize("name", IN_WORKERS)
def test_it_is_so_with_workers_too(job, monkeypatch, name):
    resumed_equals_uninterrupted(IN_WORKERS[name], 10, monkeypatch, job)


@pytest.mark.parametrize("name", ["shuffled", "stateful", "read again"])
def test_a_batch_that_is_only_looked_at_comes_again_and_nothing_is_read_twice_for_it(job, name):
    training = Training(LOADERS[name]())
    peeked = next(iter(training.loader)).tolist()
    training.train(until=4)
    assert training.seen[0][1] == peeked
    peeked = next(iter(training.loader)).tolist()
    training.train(until=5)
    assert training.seen[4] == (5, peeked)


def test_a_sample_that_is_drawn_twice_in_an_epoch_has_another_noise_each_time(job):
    training = Training(DataLoader(Noisy(), BATCH, sampler=[3] * SAMPLES))
    seen, _ = training.train(epochs=1)
    noises = [noise for _, batch in seen for _, noise in batch]
    assert len(set(noises)) == SAMPLES


def test_the_generators_are_seeded_once_a_batch(job, monkeypatch):
    seeds = []
    monkeypatch.setattr(randomness.Stand, "seed", lambda _, number: seeds.append(number))
    batches = list(Wrapped(source_of(DataLoader(Noisy(), BATCH), seed=7, rank=0), 1, print))
    assert len(set(seeds)) == len(seeds) == len(batches) > 1


def test_the_epoch_is_told_to_a_sampler_that_wants_to_know_it(job):
    sampler = torch.utils.data.DistributedSampler(Noisy(), num_replicas=1, rank=0)
    training = Training(DataLoader(Noisy(), BATCH, sampler=sampler))
    epochs = []
    for epoch in training.run.epochs(3):
        for batch in training.loader:
            training.step(batch)
        epochs.append((epoch, sampler.epoch, training.run.epoch))
    assert epochs == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]


def test_the_total_of_steps_follows_from_epochs_and_length(job):
    training = Training(DataLoader(Noisy(), BATCH))
    assert training.run.total_steps is None
    training.train(until=8)
    assert training.run.total_steps == EPOCHS * PER_EPOCH


def test_where_a_step_takes_two_batches_the_total_is_half_as_much(job):
    training = Training(DataLoader(Noisy(), BATCH, drop_last=True))
    for _ in training.run.epochs(4):
        for number, batch in enumerate(training.loader):
            if number % 2:
                training.step(batch)
        break
    assert training.run.total_steps == 10


def test_a_step_of_fewer_batches_at_an_epochs_end_is_no_sign_that_others_were_taken_ahead(job):
    training = Training(DataLoader(torch.utils.data.Subset(Noisy(), range(3 * BATCH)), BATCH))
    for _epoch in training.run.epochs(2):
        batches = iter(training.loader)
        for first in batches:
            for batch in (first, *itertools.islice(batches, 1)):
                training.model(batch).square().sum().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            training.run.step()
    assert (training.run.steps_done, training.run.level) == (4, Level.EXACT)


def test_without_a_length_the_total_is_not_known(job):
    training = Training(DataLoader(Stream(), BATCH))
    training.train(until=3)
    assert training.run.total_steps is None


def test_an_epoch_that_the_script_cuts_short_is_followed_by_the_next(job):
    training = Training(DataLoader(Noisy(), BATCH, sampler=range(SAMPLES)))
    for _ in training.run.epochs(2):
        for number, batch in enumerate(training.loader):
            training.step(batch)
            if number == 1:
                break
    assert [batch[0][0] for _, batch in training.seen] == [0.0, 4.0, 0.0, 4.0]


def test_the_runs_own_loader_ends_with_the_epoch_too_and_resumes_at_its_end(job):
    def script():
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        run = resume.init(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.01))
        return run, run.loader(torch.utils.data.TensorDataset(torch.ones(20, 2)), global_batch=4)

    told = []
    run, loader = script()
    for epoch in run.epochs(3):
        for _ in loader:
            run.step()
            if run.steps_done == 10:
                break
        told.append((epoch, run.steps_done, run.total_steps))
        if run.steps_done == 10:
            break
    run._decider._finish()
    run, loader = script()
    told.append((run.steps_done, sum(1 for _ in loader)) if not run.steps_done else "resumed")
    for epoch in run.epochs(3):
        for _ in loader:
            run.step()
        told.append((epoch, run.steps_done, run.total_steps))
    assert told == [(0, 5, 15), (1, 10, 15), "resumed", (1, 10, 15), (2, 15, 15)]


def test_a_sampler_that_draws_in_the_midst_of_an_epoch_is_named(job, capsys):
    class Midst(ByLength):
        def __iter__(self):
            for _ in self._pools:
                yield random.choice(self._pools)

    training = Training(DataLoader(Noisy(), batch_sampler=Midst()))
    training.train(until=3)
    assert training.run.level is Level.BEST_EFFORT
    assert "Midst draws random numbers in the midst of an epoch" in capsys.readouterr().err


class Numbers(torch.utils.data.IterableDataset):
    def __init__(self, first):
        self._first = first

    def __iter__(self):
        yield from (torch.tensor([float(self._first + index), 0.0]) for index in range(SAMPLES))


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (Numbers(0), Numbers(1), "the data came in another order than before, or is other data"),
        (Noisy(), torch.utils.data.Subset(Noisy(), range(21)), "samples 22 → 21"),
    ],
)
def test_data_that_comes_otherwise_the_second_time_is_named(job, capsys, before, now, said):
    Training(DataLoader(before, BATCH)).train(until=4)
    after = Training(DataLoader(now, BATCH), changed=True)
    after.train(until=5)
    assert after.run.level is Level.BEST_EFFORT
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (lambda: DataLoader(torch.utils.data.Subset(Noisy(), range(21)), BATCH), "samples 22 → 21"),
        (lambda: DataLoader(Noisy(), 2 * BATCH), "batch_size 4 → 8"),
        (lambda: DataLoader(Noisy(), BATCH, shuffle=True), "sampler SequentialSampler → RandomSampler"),
        (lambda: DataLoader(Noisy(), BATCH, sampler=DistributedSampler(Noisy(), 1, 0, seed=3)), "seed None → 3"),
    ],
)
def test_a_loader_of_other_data_than_before_is_refused_and_says_what_is_other(job, now, said):
    Training(DataLoader(Noisy(), BATCH)).train(until=4)
    with pytest.raises(UsageError, match="the data are others than at step 4: ") as refused:
        Training(now())
    assert said in str(refused.value)


def test_another_sampler_on_another_number_of_ranks_is_no_other_data(job):
    training = Training(DataLoader(Noisy(), BATCH, shuffle=True))
    training.train(until=4)
    sampler = DistributedSampler(Noisy(), num_replicas=2, rank=0, seed=11)
    spread = Wrapped(source_of(DataLoader(Noisy(), 2, sampler=sampler), 0, 0), 2, lambda _why: None)
    others = spread.load_state_dict(training.loader.state_dict())
    assert others["sampler"] == "RandomSampler → DistributedSampler"
    assert spread.firm == ()


def test_batches_that_come_in_another_way_than_before_are_refused(job):
    Training(DataLoader(Noisy(), BATCH)).train(until=4)
    with pytest.raises(UsageError, match="are continued from an iterable that is read again, and came from a sampler"):
        Training(DataLoader(Numbers(0), BATCH), changed=True)
    training = Training(DataLoader(Noisy(), BATCH))
    training.run._feed.loader = None
    with pytest.raises(UsageError, match="came from a loader of the script's own before"):
        training.run.loader(Noisy(), global_batch=BATCH)


def test_a_sampler_that_is_another_ranks_is_refused(job):
    sampler = DistributedSampler(Noisy(), num_replicas=4, rank=2)
    with pytest.raises(UsageError, match="on rank 0, the sampler takes share 2 of 4, and this is 0 of 1") as refused:
        Training(DataLoader(Noisy(), BATCH, sampler=sampler))
    assert "run.wrap(loader, over=" in refused.value.hint


def test_ranks_whose_samplers_have_other_seeds_are_refused_with_how_to_give_them_one(job, monkeypatch):
    training = Training(DataLoader(Noisy(), BATCH))
    training.run._feed.loader = None
    monkeypatch.setattr(
        training.run._ranks, "gathered", lambda told: (told, json.dumps({**json.loads(told), "seed": 1}).encode())
    )
    with pytest.raises(UsageError, match="the ranks differ in seed: 0 on rank 0, 1 on rank 1") as refused:
        training.run.wrap(DataLoader(Noisy(), BATCH, sampler=DistributedSampler(Noisy(), 1, 0)))
    assert refused.value.hint == "DistributedSampler(dataset, seed=0): the same on all ranks"


def test_another_number_of_workers_is_named_where_it_matters(job, capsys):
    Training(DataLoader(Stream(), BATCH)).train(until=2)
    after = Training(DataLoader(Stream(), BATCH, num_workers=1))
    assert after.run.level is Level.BEST_EFFORT
    assert "workers 0 → 1" in capsys.readouterr().err


def test_another_number_of_workers_does_not_matter_to_a_sampler(job, monkeypatch):
    seen, weights = uninterrupted(LOADERS["shuffled"], monkeypatch, job)
    Training(LOADERS["shuffled"]()).train(until=4)
    after = Training(DataLoader(Noisy(), BATCH, shuffle=True, num_workers=2))
    assert after.train() == (seen[4:], weights)
    assert after.run.level is Level.EXACT


def test_a_state_that_the_loader_does_not_take_back_is_an_error_that_says_so(job):
    Training(StatefulDataLoader(Resumable(), BATCH)).train(until=2)
    after = Training(StatefulDataLoader(Resumable(), BATCH, num_workers=1))
    with pytest.raises(UsageError, match="StatefulDataLoader does not take its state back") as refused:
        after.train(until=3)
    assert "number of workers" in refused.value.hint


@pytest.mark.parametrize(
    ("loader", "error"),
    [(7, "run.wrap takes what batches come from, not a int")],
)
def test_what_hands_out_no_batches_is_refused(job, loader, error):
    with pytest.raises(UsageError, match=error):
        Training(loader)


def test_a_run_without_an_end_is_refused_at_its_first_step(job):
    training = Training(DataLoader(Noisy(), BATCH))
    with pytest.raises(UsageError, match="nothing says how many steps") as refused:
        training.step(next(iter(training.loader)))
    assert "run.epochs" in refused.value.hint


def test_ranks_whose_loaders_have_other_lengths_are_refused(job, monkeypatch):
    training = Training(DataLoader(Noisy(), BATCH))
    training.run._feed.loader = None

    def gathered(told):
        return told, json.dumps({**json.loads(told), "batches": 7}).encode()

    monkeypatch.setattr(training.run._ranks, "gathered", gathered)
    with pytest.raises(UsageError, match="the ranks differ in batches: 6 on rank 0, 7 on rank 1") as refused:
        training.run.wrap(DataLoader(Noisy(), BATCH))
    assert refused.value.hint == "give every rank the same batches"


def test_what_the_scripts_loader_has_is_found_in_the_wrapped_one(job):
    training = Training(DataLoader(Noisy(), BATCH))
    assert len(training.loader) == PER_EPOCH
    assert len(training.loader.dataset) == SAMPLES
    with pytest.raises(AttributeError):
        _ = training.loader.nothing


def test_a_data_set_goes_with_the_last_that_names_it_and_waits_for_no_collector():
    gc.disable()
    try:
        dataset = Noisy()
        gone, drawn = weakref.ref(dataset), Drawn(dataset, 1, together=True)
        del dataset, drawn
        assert gone() is None
    finally:
        gc.enable()
