"""The data of a run: the same samples in the same order, with the same random numbers, from any step on."""

import itertools
import json
import random

import numpy as np
import pytest
import torch

from gpucloud.domain.checkpoint.manifest import Level
from gpucloud.domain.errors import UsageError
from gpucloud.resume.loader import Loader, require_split
from tests.functional.resuming import DATA, begin, job, train

__all__ = ["job"]  # a fixture


class Random(torch.utils.data.Dataset):
    def __len__(self):
        return 25

    def __getitem__(self, index):
        return index, torch.rand(()).item() + np.random.rand() + random.uniform(0, 1)


def batches(rank, world, *, first=0, count=10, workers=0):
    options = {"num_workers": workers, "collate_fn": sorted}
    loader = Loader(Random(), global_batch=12, ranks=(rank, world), seed=5, options=options)
    loader.load_state_dict({"epoch": first // 2, "used": first % 2 * 12, **loader.rules})
    return list(itertools.islice(loader, count))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_ranks_sees_the_same_global_batches_with_the_same_noise(world):
    parts = [batches(rank, world) for rank in range(world)]
    assert [sorted(itertools.chain(*step)) for step in zip(*parts, strict=True)] == batches(0, 1)


def test_from_any_batch_on_the_order_is_the_same_with_and_without_workers():
    whole = batches(0, 2)
    for first in range(6):
        assert batches(0, 2, first=first, count=4) == whole[first : first + 4]
    assert batches(0, 2, first=3, count=4, workers=2) == whole[3:7]


def test_every_epoch_has_each_sample_at_most_once_and_its_own_order():
    indices = [[index for index, _ in batch] for batch in batches(0, 1, count=6)]
    epochs = [indices[i] + indices[i + 1] for i in (0, 2, 4)]
    assert all(len(set(epoch)) == 24 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_loading_draws_nothing_from_the_scripts_generators():
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    batches(0, 1)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


@pytest.mark.parametrize(
    ("dataset", "batch", "message"),
    [(DATA, 3, "cannot be split over 2"), (DATA, 22, "fewer than"), (iter([1]), 2, "exact sample")],
)
def test_data_that_cannot_be_continued_exactly_is_refused(dataset, batch, message):
    with pytest.raises(UsageError, match=message):
        Loader(dataset, global_batch=batch, ranks=(0, 2), seed=0, options={})


def test_a_batch_is_refused_that_cannot_be_divided_over_every_number_of_ranks_that_may_come():
    require_split(24, (2, 3, 4))
    with pytest.raises(UsageError, match="global_batch=8 cannot be split over 3 ranks") as refused:
        require_split(8, (2, 3, 4))
    assert refused.value.hint == "choose a multiple of 12"


def masked(samples):
    """What masked language modelling does: random numbers are drawn where a batch is put together."""
    return [index for index, _ in samples], torch.rand(4).tolist(), random.uniform(0, 1), np.random.rand()


def masks(rank, world, *, first=0, count=8, workers=0):
    options = {"num_workers": workers, "collate_fn": masked}
    loader = Loader(Random(), global_batch=12, ranks=(rank, world), seed=5, options=options)
    loader.load_state_dict({"epoch": first // 2, "used": first % 2 * 12, **loader.rules})
    return list(itertools.islice(loader, count))


@pytest.mark.parametrize("workers", [0, 2])
def test_what_collation_draws_depends_on_no_start_and_no_worker(workers):
    whole = masks(0, 2)
    assert masks(0, 2, first=3, count=4, workers=workers) == whole[3:7]
    drawn = [batch[1:] for batch in whole + masks(1, 2)]
    assert len({json.dumps(one) for one in drawn}) == len(drawn)


class WithWorkers(torch.utils.data.Dataset):
    """Its workers draw random numbers of their own when they begin."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.utils.data.get_worker_info().seed


def test_workers_are_seeded_alike_at_every_start_and_otherwise_on_each_rank_and_in_each_epoch():
    def seeds(rank, first):
        loader = Loader(
            WithWorkers(), global_batch=4, ranks=(rank, 2), seed=5, options={"num_workers": 1, "collate_fn": list}
        )
        loader.load_state_dict({"epoch": first, "used": 0, **loader.rules})
        return [batch[0] for batch in itertools.islice(loader, 2)]

    whole, other = seeds(0, 0), seeds(1, 0)
    assert seeds(0, 1)[0] == whole[1]
    assert len({*whole, *other}) == 4


def test_a_subset_draws_the_same_noise_on_any_number_of_ranks():
    subset = torch.utils.data.Subset(torch.utils.data.Subset(Random(), range(24)), range(2, 22))

    def seen(rank, world):
        options = {"collate_fn": sorted}
        loader = Loader(subset, global_batch=4, ranks=(rank, world), seed=5, options=options)
        return list(itertools.islice(loader, 5))

    parts = [seen(rank, 2) for rank in range(2)]
    assert [sorted(itertools.chain(*step)) for step in zip(*parts, strict=True)] == seen(0, 1)


class PutsBack(torch.utils.data.Dataset):
    """Draws from torch's generator, and leaves it where it stood."""

    def __len__(self):
        return 400

    def __getitem__(self, index):
        with torch.random.fork_rng():
            return torch.rand(()).item()


def test_samples_that_put_their_generators_back_draw_each_its_own_numbers_from_any_start():
    def seen(first):
        loader = Loader(PutsBack(), global_batch=4, ranks=(0, 1), seed=5, options={"collate_fn": list})
        loader.load_state_dict({"epoch": 0, "used": 4 * first, **loader.rules})
        return list(itertools.islice(loader, 100 - first))

    whole = seen(0)
    assert len(set(itertools.chain(*whole))) == 400
    assert seen(60) == whole[60:]


class Together(Random):
    """A data set that fetches whole batches."""

    def __getitems__(self, indices):
        return [(index, torch.rand(()).item()) for index in indices]


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: torch.utils.data.Subset(one, range(20))])
def test_what_fetches_whole_batches_is_seeded_once_a_batch(wrap):
    def first(count):
        loader = Loader(wrap(Together()), global_batch=4, ranks=(0, 1), seed=5, options={"collate_fn": list})
        return list(itertools.islice(loader, count))

    (one,) = first(1)
    assert len({noise for _, noise in one}) == 4
    assert first(2)[0] == one


def test_batches_without_end_are_refused(job):
    run, *_ = begin(total_steps=None)
    next(iter(run.loader(DATA, global_batch=4)))
    with pytest.raises(UsageError, match="nothing says how many steps") as refused:
        run.step()
    assert "total_steps" in refused.value.hint
    assert "run.epochs" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "theirs", "hint"),
    [("seed", 1, "the same on all ranks"), ("samples", 19, "same samples"), ("total_steps", None, "same total_steps")],
)
def test_ranks_that_order_the_samples_each_in_its_own_way_are_refused(job, monkeypatch, name, theirs, hint):
    run, *_ = begin(total_steps=9, seed=0)

    def gathered(told):
        return told, told, json.dumps({**json.loads(told), name: theirs}).encode()

    monkeypatch.setattr(run._ranks, "gathered", gathered)
    with pytest.raises(UsageError, match=rf"the ranks differ in {name}: \d+ on rank 0, {theirs} on rank 2") as refused:
        run.loader(DATA, global_batch=4)
    assert hint in refused.value.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 1}, "seed 0 → 1"),
        ({"dataset": torch.utils.data.Subset(DATA, range(16))}, "samples 20 → 16"),
        ({"shuffle": False}, "shuffle True → False"),
        ({"global_batch": 2, "seed": 1}, "seed 0 → 1, global_batch 4 → 2"),
        ({}, ""),
    ],
)
def test_other_samples_than_before_are_not_called_exact(job, capsys, changes, said):
    train(*begin(total_steps=9), steps=4)
    run, *_ = begin(total_steps=9, seed=changes.pop("seed", 0))
    run.loader(**{"dataset": DATA, "global_batch": 4, "changed": True, **changes})
    assert (run.level is Level.EXACT) == (not said)
    assert said in capsys.readouterr().err


def test_other_data_than_before_are_refused_unless_that_is_meant_and_another_batch_is_not(job, monkeypatch):
    train(*begin(total_steps=9), steps=4)
    run, *_ = begin(total_steps=9, seed=1)
    with pytest.raises(UsageError, match="the data are others than at step 4: seed 0 → 1, shuffle True → False") as no:
        run.loader(DATA, global_batch=4, shuffle=False)
    assert "changed=True" in no.value.hint
    run, *_ = begin(total_steps=9)
    run.loader(DATA, global_batch=2)
    assert run.level is Level.BEST_EFFORT
    run, *_ = begin(total_steps=9)
    monkeypatch.setattr(run._ranks, "world", 2)
    other = json.dumps({"samples": "20 → 19"}).encode()
    monkeypatch.setattr(run._ranks, "gathered", lambda told: (told, told if b"seed" in told else other))
    with pytest.raises(UsageError, match="the data are others than at step 4 on rank 1: samples 20 → 19"):
        run.loader(DATA, global_batch=4)


@pytest.mark.parametrize("name", ["batch_size", "batch_sampler", "sampler", "drop_last", "generator"])
def test_what_the_run_decides_of_its_batches_is_refused_with_what_to_write_instead(job, name):
    run, *_ = begin(total_steps=4)
    with pytest.raises(UsageError, match=f"run.loader\\({name}=…\\)") as refused:
        run.loader(DATA, global_batch=4, **{name: 2})
    assert refused.value.hint
