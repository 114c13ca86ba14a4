"""What scripts do around their steps: a run that was killed ends as one that was not, or says why it may not.

Each script is trained as a whole, and again from its checkpoint of step 4 on, of which it is told after step 5.
"""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from gpucloud import resume
from gpucloud.resume.save.cadence import Window, Windows
from tests.functional.resuming import DATA, job

__all__ = ["job"]
STEPS = 8
KILLED = 5


class Killed(Exception):
    """In place of a signal: what was saved by then is all that is left."""


class Script:
    """A training; `befores` are called ahead of each batch, `afters` after each step, `inside` before its step ends."""

    before = after = inside = at_begin = staticmethod(lambda self: None)

    def __init__(self, **changes):
        vars(self).update(changes)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(2, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.run = resume.init(
            model=self.model, optimizer=self.optimizer, scheduler=self.schedule, total_steps=STEPS, **self.others()
        )

    def others(self):
        return {}

    def take(self, x):
        self.optimizer.zero_grad()
        self.loss(x).backward()
        self.optimizer.step()

    def loss(self, x):
        return functional.softplus(self.model(x / 40)).mean()

    def train(self, until=STEPS):
        """Train to the end and return the weights; up to another step, die when the save before it counts."""
        self.loader = self.run.loader(DATA, global_batch=4)
        self.at_begin(self)
        batches = iter(self.loader)
        while self.run.steps_done < STEPS:
            self.before(self)
            (x,) = next(batches)
            self.take(x)
            self.inside(self)
            self.run.step()
            self.run._decider._finish()
            if self.run.steps_done == until:
                break
            self.after(self)
        return [value.tolist() for value in self.model.state_dict().values()]


def both(job, monkeypatch, kind=Script, **changes):
    """Return the weights of a whole run, those of one that was killed, and the second attempt of that."""
    monkeypatch.setenv("GPUCLOUD_CHECKPOINTS", "jobs/whole/checkpoints")
    whole = kind(**changes).train()
    monkeypatch.setenv("GPUCLOUD_CHECKPOINTS", "jobs/killed/checkpoints")
    kind(**changes).train(until=KILLED)
    second = kind(**changes)
    assert second.run.steps_done == 4
    return whole, second.train(), second.run


class Counting(torch.optim.Optimizer):
    """Keeps a number that its state_dict does not have, as scripts' own optimizers do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.calls = 0

    def step(self):
        self.calls += 1
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad * self.param_groups[0]["lr"] / self.calls)


class Counted(Script):
    def others(self):
        self.optimizer = Counting(self.model.parameters())
        return {"other_optimizer": self.optimizer}


def test_numbers_that_an_optimizer_counts_by_itself_come_back(job, monkeypatch):
    whole, again, run = both(job, monkeypatch, Counted)
    assert again == whole
    assert run.level.value == "exact"


def look_at_a_batch(script):
    next(iter(script.loader))


def find_a_learning_rate(script):
    before = copy.deepcopy((script.model.state_dict(), script.optimizer.state_dict()))
    for number, (x,) in enumerate(script.loader):
        script.take(x)
        if number == 2:
            break
    script.model.load_state_dict(before[0])
    script.optimizer.load_state_dict(before[1])


def draw(script):
    """As an evaluation does: torch's DataLoader draws once for each loop over it."""
    for _ in torch.utils.data.DataLoader(DATA, batch_size=20):
        torch.rand(3)


def freeze_a_layer(script):
    if script.run.steps_done == 2:
        script.model[0].requires_grad_(False)


def freeze_statistics(script):
    if script.run.steps_done == 2:
        script.model[1].eval()


def anneal(script):
    script.model[1].momentum *= 0.8
    script.model[2].p *= 0.9


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"at_begin": look_at_a_batch},
        {"after": look_at_a_batch},
        {"inside": look_at_a_batch},
        {"at_begin": find_a_learning_rate},
        {"after": draw},
        {"inside": freeze_a_layer},
        {"inside": freeze_statistics},
        {"inside": anneal},
        {"inside": lambda script: script.schedule.step()},
        {"before": lambda script: script.schedule.step()},
    ],
    ids=[
        "nothing else",
        "looks at a batch before",
        "looks at a batch between",
        "looks at a batch within",
        "tries learning rates",
        "evaluates",
        "freezes a layer",
        "freezes statistics",
        "changes momentum and dropout",
        "has a schedule",
        "has a schedule ahead of batches",
    ],
)
def test_what_a_script_does_around_its_steps_leaves_a_resume_exact(job, monkeypatch, changes):
    whole, again, run = both(job, monkeypatch, **changes)
    assert again == whole
    assert run.level.value == "exact"


class Noise(Script):
    """Draws from generators of its own, which the run is given."""

    def others(self):
        self.one, self.two = torch.Generator().manual_seed(3), np.random.default_rng(4)
        self.three, self.four = random.Random(5), np.random.RandomState(6)
        return {"one": self.one, "two": self.two, "three": self.three, "four": self.four}

    def loss(self, x):
        drawn = self.two.normal() + self.three.random() + self.four.rand()
        return super().loss(x + torch.rand(x.shape, generator=self.one) + drawn)


def test_generators_of_a_scripts_own_are_saved_where_the_run_is_given_them(job, monkeypatch):
    whole, again, run = both(job, monkeypatch, Noise)
    assert again == whole
    assert run.level.value == "exact"


class Own(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.transforms = [transform]

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return (DATA[index][0],)


class Holder:
    def __init__(self, generator):
        self.generator = generator


@pytest.mark.parametrize(
    ("make", "level"),
    [
        (lambda: Holder(np.random.default_rng(0)), "best_effort"),
        (lambda: Holder(torch.Generator()), "best_effort"),
        (lambda: Holder(random.Random(0)), "best_effort"),
        (lambda: Holder(random.SystemRandom()), "exact"),
        (lambda: Holder(random), "exact"),
        (lambda: Holder(torch.default_generator), "exact"),
        (lambda: None, "exact"),
    ],
)
def test_a_data_set_with_a_generator_of_its_own_is_not_called_exact(job, capsys, make, level):
    script = Script()
    script.run.loader(Own(make()), global_batch=4)
    assert script.run.level.value == level
    told = "the data set has a generator of its own, transforms.0.generator" in capsys.readouterr().err
    assert told == (level == "best_effort")


def load_others(script):
    torch.manual_seed(9)
    script.model[0].reset_parameters()


class Delayed(Script):
    """Takes its step with the gradients of the batch before."""

    def take(self, x):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss(x).backward()


def prefetch(script):
    """Take each batch while the one before is trained on, as prefetchers to a GPU do."""

    def ahead(batches):
        waiting = next(batches, None)
        while waiting is not None:
            now, waiting = waiting, next(batches, None)
            yield now

    script.loader = ahead(iter(script.loader))


class Untied(Script):
    """Has a layer twice until it is loaded."""

    class Twice(nn.Sequential):
        def load_state_dict(self, *given, **named):
            self[4].weight = nn.Parameter(self[4].weight.detach().clone())
            return super().load_state_dict(*given, **named)

    def others(self):
        other = self.Twice(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        other[4].weight = other[2].weight
        return {"other": other}


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (
            Script,
            {"at_begin": load_others},
            "the script changed model.0.weight between resume.init and the first batch",
        ),
        (Script, {"after": lambda script: script.schedule.step()}, "a schedule's step comes after `run.step()`"),
        (Delayed, {}, "its optimizer steps with gradients that were there before the last `run.step()`"),
        (Script, {"at_begin": prefetch}, "batches are taken before the step ahead of them ends"),
        (Untied, {}, "other.4.weight shares its memory with others than as it was saved"),
    ],
    ids=[
        "loads other weights",
        "steps its schedule late",
        "steps with gradients before",
        "prefetches",
        "parts two tensors",
    ],
)
def test_what_no_checkpoint_has_is_named_and_is_not_exact(job, monkeypatch, capsys, kind, changes, said):
    *_, run = both(job, monkeypatch, kind, **changes)
    assert run.level.value == "best_effort"
    assert said in capsys.readouterr().err


def test_an_epoch_is_known_before_there_is_a_loader(job):
    script = Script()
    script.train(until=KILLED + 1)
    again = Script()
    assert (again.run.steps_done, again.run.epoch) == (6, 1)


class Two:
    """Two optimizers of one model's halves."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        self.one, self.other = (torch.optim.SGD(layer.parameters(), 0.1) for layer in self.model)
        self.windows = Windows((self.one, self.other))

    def gather(self, *layers):
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        self.model(torch.ones(1, 2)).sum().backward(inputs=parameters)

    def use(self, optimizer, *, clear=True):
        optimizer.step()
        if clear:
            optimizer.zero_grad()


def test_a_step_is_open_while_one_of_two_optimizers_gathers():
    two = Two()
    found = []
    for number in range(1, 7):
        two.gather(*two.model)
        two.use(two.one)
        if number % 3 == 0:
            two.use(two.other)
        found.append(two.windows.now())
    assert found == [Window.UNKNOWN, Window.UNKNOWN, Window.CLOSED, Window.OPEN, Window.OPEN, Window.CLOSED]


def test_hooks_of_a_scripts_own_are_called_beside_those_that_watch():
    two = Two()
    called = []
    two.one.register_step_pre_hook(lambda *_: called.append("before"))
    two.one.register_step_post_hook(lambda *_: called.append("after"))
    two.gather(*two.model)
    two.use(two.one)
    two.use(two.one)
    assert called == ["before", "after"] * 2


@pytest.mark.parametrize("clear", [True, False])
def test_two_optimizers_that_take_turns_keep_no_step_open(clear):
    two = Two()
    found = []
    for number in range(6):
        layer, optimizer = [(two.model[0], two.one), (two.model[1], two.other)][number % 2]
        optimizer.zero_grad()
        two.gather(layer)
        two.use(optimizer, clear=clear)
        found.append(two.windows.now())
    assert set(found) == {Window.CLOSED}


def test_an_optimizer_whose_turn_has_not_come_keeps_no_step_of_anothers_with_the_same_weights_open():
    two = Two()
    later = torch.optim.Adam(two.model.parameters())
    windows = Windows((two.one, two.other, later))
    found = []
    for _ in range(3):
        two.gather(*two.model)
        two.use(two.one, clear=False)
        two.use(two.other, clear=False)
        found.append(windows.now())
        later.zero_grad()
    assert set(found) == {Window.CLOSED}


def test_two_optimizers_that_are_never_done_at_once_keep_a_notice_waiting_for_a_few_windows_alone():
    two = Two()
    found = []
    for number in range(70):
        two.gather(*two.model)
        two.use((two.one, two.other)[number % 2])
        found.append(two.windows.now())
    assert found[1:8] == [Window.OPEN] * 7
    assert set(found[8:64]) == {Window.LONG}
    assert set(found[64:]) == {Window.CLOSED}
    assert two.windows.lacks is not None
