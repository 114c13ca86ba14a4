"""Random number generators of a script's own: given to `init` they are saved, in a data set no checkpoint has them."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

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
    return next(_found(thing, "", known, _DEEP, set()), None)


def _found(thing: Any, place: str, known: Collection[int], deep: int, met: set[int]) -> Iterator[str]:
    if id(thing) in met or deep < 0:
        return
    met.add(id(thing))
    if is_generator(thing):
        if id(thing) not in {*known, *_of_all()}:
            yield place
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
