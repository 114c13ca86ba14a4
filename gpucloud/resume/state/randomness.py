"""Every random number generator of a process, its own and the script's: seeded, captured, put back."""

from __future__ import annotations

import contextlib
import random
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from gpucloud.resume.state.generators import Global, of_cpu, of_devices, seed_together

_WORD = 2**64 - 1


class Stand:
    """Where generators stood: read at each step, and told as a checkpoint has it only where one is made."""

    __slots__ = ("_cpu", "found")

    def __init__(self, devices: tuple[Global, ...] = ()) -> None:
        self._cpu = of_cpu()
        self.found = [(one, one.read()) for one in (*self._cpu, *devices)]

    def stands(self) -> bool:
        """Whether every generator of this process is there still."""
        if of_cpu() is not self._cpu:
            return False
        for one, then in self.found:  # noqa: SIM110  at each step, where `all` takes longer
            if not one.stands(then):
                return False
        return True

    def seed(self, number: int) -> None:
        """Seed these generators, cheaply enough for every sample.

        None can be spared it: whether one drew is not seen where it then puts a generator back, as `fork_rng` does.
        """
        seed_together(self._cpu, number)

    def seed_each(self, numbers: Iterable[int]) -> None:
        """Seed each with a number of its own."""
        for (one, _), number in zip(self.found, numbers, strict=False):  # there may be no NumPy
            one.seed(number)

    def put_back(self) -> None:
        """Set every generator that is here and was then."""
        for one, then in self.found:
            if one.name == "numpy" and of_cpu() is not self._cpu:  # a script has exchanged it
                _numpy().set_state(one.told(then))
            else:
                one.write(then)

    def told(self) -> dict[str, Any]:
        """Return it as a checkpoint has it."""
        return {one.name: one.told(then) for one, then in self.found}


@dataclass(slots=True)
class _Kept:
    """The `kept` that are under way, by where the CPU's generators stood; `begun` counts all that ever were."""

    begun: int = 0
    outside: list[Stand] = field(default_factory=list)


_kept = _Kept()


def seed_all(seed: int, rank: int) -> None:
    """Seed torch (CUDA too), Python and, where it is loaded, NumPy, differently on every rank."""
    mixed = mix(seed, rank)
    torch.manual_seed(mixed >> 1)
    random.seed(mixed)
    numpy = _numpy()
    if numpy is not None:
        numpy.seed(mixed & 0xFFFFFFFF)


def capture() -> dict[str, Any]:
    """Return the state of every generator, as a checkpoint has it; of those that are `kept`, as they will be again.

    Another thread may ask, while this one waits for something.
    """
    while True:
        begun, outside = _kept.begun, _kept.outside[:1]
        state = here().told() | (outside[0].told() if outside else {})
        if begun == _kept.begun:
            return state


def here() -> Stand:
    """Return where every generator stands, cheaply enough for every step."""
    return Stand(of_devices())


def put_back(state: Mapping[str, Any]) -> None:
    """Set every generator that is here and was captured."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    numpy = _numpy()
    if "numpy" in state and numpy is not None:
        numpy.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


class kept:  # noqa: N801  (used as a function is: what `contextlib` makes of one takes as long as all else here)
    """Leave the CPU generators as they were, whatever happens inside."""

    __slots__ = ("_stand",)

    def __enter__(self) -> Stand:
        """Return where they stand."""
        self._stand = stand = Stand()
        _kept.outside.append(stand)
        _kept.begun += 1
        return stand

    def __exit__(self, *_: object) -> None:
        self._stand.put_back()
        _kept.outside.pop()


@contextlib.contextmanager
def apart(origins: tuple[int, ...], number: int) -> Iterator[None]:
    """Have what is inside draw from generators of that number after `origins`, and leave the CPU's as they were."""
    with kept() as inside:
        inside.seed_each(mix(origin, number) for origin in origins)
        yield


def origins() -> tuple[int, int, int]:
    """Return a number for where torch's, Python's and NumPy's generator stand, each by itself."""
    numpy = _numpy()
    states = torch.get_rng_state().numpy().tobytes(), repr(random.getstate()).encode(), b""
    if numpy is not None:
        _, words, place, *_ = numpy.get_state()
        states = (*states[:2], words.tobytes() + place.to_bytes(4, "big"))
    first, second, third = map(zlib.crc32, states)
    return first, second, third


def mix(*numbers: int, mixed: int = 0) -> int:
    """Return 64 well-mixed bits of the numbers (the finalizer of SplitMix64, once for each), `mixed` those before."""
    for number in numbers:
        mixed = (mixed + number + 0x9E3779B97F4A7C15) & _WORD
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
        mixed ^= mixed >> 31
    return mixed


def _numpy() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random if numpy is not None else None


class Draws:
    """What a run's training draws from: put where its first batch is to find it, and then where each step left it.

    `rank` is that among the ranks that draw otherwise. Without `seeds`, a fresh run draws as the script has seeded.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self.rank = rank
        self.seeds = True
        self._seed = seed
        self._saved: dict[str, Any] | None = None
        self._is_resumed = self._is_begun = False
        self._after: Stand | None = None

    @property
    def are_saved(self) -> bool:
        """Whether a checkpoint says where they stood, and they are not put there yet."""
        return self._saved is not None and not self._is_begun

    def resumed(self, saved: dict[str, Any] | None) -> None:
        """Have the next `begin` put them there; None where a checkpoint does not say."""
        self._saved, self._is_resumed = saved, True
        self._is_begun, self._after = False, None

    def again(self) -> None:
        """Have the next `begin` do so once more: nothing was trained on yet."""
        self._is_begun = False

    def begin(self, step: int) -> None:
        """Put them where the first batch after that step is to find them, unless that is done."""
        if self._is_begun:
            return
        self._is_begun = True
        if self._saved is not None:
            put_back(self._saved)
        elif self.seeds or self._is_resumed:
            seed_all(mix(self._seed, step), self.rank)

    def stepped(self) -> None:
        """Remember where a step has left them."""
        if self._after is None or not self._after.stands():
            self._after = here()

    def go_on(self) -> None:
        """Put them where the last step left them, whatever was drawn since."""
        if self._after is not None and not self._after.stands():
            self._after.put_back()

    def state(self) -> dict[str, Any]:
        """Return where the last step left them."""
        return self._after.told() if self._after is not None else capture()


# Random number generators of a script's own: given to `init` they are saved, in a data set no checkpoint has them.


_DEEP = 4
_MOST = 64  # of the items of a list, and so on at each level


class Generator:
    """One of torch's, Python's or NumPy's, with a state as all else has one."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands."""
        own = self.generator
        if isinstance(own, torch.Generator):
            return {"state": own.get_state()}
        if isinstance(own, random.Random):
            return {"state": own.getstate()}
        return {"state": own.bit_generator.state if hasattr(own, "bit_generator") else own.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have it stand there."""
        own = self.generator
        if isinstance(own, torch.Generator):
            own.set_state(state["state"].cpu())
        elif isinstance(own, random.Random):
            own.setstate(state["state"])
        elif hasattr(own, "bit_generator"):
            own.bit_generator.state = state["state"]
        else:
            own.set_state(state["state"])


def is_generator(thing: Any) -> bool:
    """Whether it draws random numbers, and can be put where it stood."""
    numpy = sys.modules.get("numpy")
    kinds = (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()
    return isinstance(thing, (torch.Generator, random.Random, *kinds)) and not isinstance(thing, random.SystemRandom)


def own_generator(thing: Any, known: Collection[int] = ()) -> str | None:
    """Return where an object has a generator of its own, as `transform.rng`; `known` are the ids of those saved."""
    return next((place for place, _ in _found(thing, "", known, _DEEP, set())), None)


def generators_of(thing: Any) -> dict[str, Generator]:
    """Return the generators of an object's own, by where it has them."""
    return {place: Generator(own) for place, own in _found(thing, "", (), _DEEP, set())}


def states_of(generators: Mapping[str, Generator]) -> dict[str, Any]:
    """Return where they stand, by their names."""
    return {name: one.state_dict() for name, one in generators.items()}


def put_states(generators: Mapping[str, Generator], states: Mapping[str, Any]) -> None:
    """Have those stand there that were there too."""
    for name in generators.keys() & states.keys():
        generators[name].load_state_dict(states[name])


def _found(thing: Any, place: str, known: Collection[int], deep: int, met: set[int]) -> Iterator[tuple[str, Any]]:
    if id(thing) in met or deep < 0:
        return
    met.add(id(thing))
    if is_generator(thing):
        if id(thing) not in {*known, *_of_all()}:
            yield place, thing
        return
    for name, part in _parts(thing):
        yield from _found(part, f"{place}.{name}" if place else name, known, deep - 1, met)


def _of_all() -> tuple[int, ...]:
    """Return the ids of those that everything draws from unless told otherwise: they are saved with every run."""
    numpy = sys.modules.get("numpy")
    own = getattr(getattr(numpy, "random", None), "mtrand", None)
    return id(torch.default_generator), id(getattr(random, "_inst", None)), id(getattr(own, "_rand", None))


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, (list, tuple)):
        yield from ((str(number), part) for number, part in enumerate(thing[:_MOST]))
    elif isinstance(thing, dict):
        yield from ((str(name), part) for name, part in list(thing.items())[:_MOST])
    elif not isinstance(thing, (torch.Tensor, type, ModuleType)) and hasattr(thing, "__dict__"):
        yield from list(vars(thing).items())
