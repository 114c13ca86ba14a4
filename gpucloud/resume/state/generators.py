"""The global generators of a process, whose states are read and written where they lie in memory.

To ask NumPy for its state takes 70 µs, a GPU 25, Python 10 and torch 5, more than all else that is done at a step; to
read all takes two. Where the words of those on the CPU lie is tried out on generators made for that, whose states are
known.
Where that does not tell, as in another Python than CPython, they are asked after all.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, Protocol

import torch

_WORDS = 624
_SIZE = 4 * _WORDS + 4  # with the place of the next word
_RESERVE = struct.Struct("i4xd")  # whether NumPy has a normal number in reserve, and which
_NOTHING = _RESERVE.pack(0, 0.0)
_KNOWN = 0.7390851332151607
_TORCHS = struct.Struct(f"Qi?xxxI{_WORDS}I4x8x16x")  # behind the words a single and a double normal number in reserve
_FEW = 32
"""Bytes with the place and some of the words: all words change together, and by whoever draws the place does."""

_FIRST = 8 + 4 + 4 + 4  # where torch's words begin
_RESERVED = _FIRST + 4 * _WORDS + 4  # where its reserve begins
_PLACED = 8 + 4  # bytes of its seed and its place, which is another after each word
_SEEDED = struct.Struct("Qi?xxxII")  # how it begins: none of the words is used yet
_AHEAD = 128  # bytes of a generator in which its seed is looked for, of 2,600
SEEDING = 4
"""The way in which `seed` works, which is another with each change of what is drawn after it."""
_32_BITS = 2**32 - 1  # of a seed that NumPy takes
_UNUSED = struct.pack("i", _WORDS)  # the place of a generator whose words are all to be made anew
_QUARTER = _WORDS  # bytes, of four a word
_FOR_NUMPY, _FOR_PYTHON = (2, 3, 0, 1), (1, 3, 0, 2)  # in which order each has the quarters of torch's words

Quarters = tuple[memoryview, ...]
"""Words of a generator, where they lie."""


class Global(Protocol):
    """One generator, by the name that it has in a checkpoint."""

    name: str

    def read(self) -> Any:
        """Return where it stands."""
        ...

    def write(self, state: Any, /) -> object:
        """Have it stand there."""
        ...

    def seed(self, number: int, /) -> object:
        """Have it stand where that seed, of 64 bits, puts it."""
        ...

    def follow(self, words: Quarters, /) -> object:
        """Have it stand where the words that a seed has given torch's put it."""
        ...

    def stands(self, state: Any, /) -> bool:
        """Whether it stands where that was read."""
        ...

    def told(self, state: Any) -> Any:
        """Return one that was read as a checkpoint has it."""
        ...


def of_cpu() -> tuple[Global, ...]:
    """Return what everything draws from on the CPU now: a script may exchange NumPy's."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return _without_numpy()
    generator = numpy.random.mtrand._rand  # noqa: SLF001
    return _with_numpy(generator, getattr(generator, "_bit_generator", None))


def seed_together(generators: tuple[Global, ...], number: int) -> None:
    """Seed those of the CPU with a number, cheaply enough for every sample.

    To make the words of a Mersenne Twister takes longer than all else of it, so that they are made for torch's alone.
    The others have the same in another order, in which no two that a twister combines (one, and that 397 places on) are
    combined by another too: none draws what another does.
    """
    first = generators[0]
    first.seed(number)
    words = first.words if isinstance(first, _Torch) else _quarters(_init_genrand(number >> 1 & _32_BITS))
    for one in generators[1:]:
        one.follow(words)


def _quarters(memory: Any, first: int = 0) -> Quarters:
    view = memoryview(memory).cast("B")[first:]
    return tuple(view[place : place + _QUARTER] for place in range(0, 4 * _QUARTER, _QUARTER))


def _placed(words: Quarters, order: tuple[int, ...]) -> Quarters:
    """Return where the quarters of torch's words lie in those of a generator that has them in that order."""
    return tuple(words[order.index(number)] for number in range(4))


class _Seeded:
    """One that follows torch's by a seed of its own, which is the first of their words."""

    seed: Callable[[int], object]

    def follow(self, words: Quarters) -> None:
        self.seed(int.from_bytes(words[0][:4], sys.byteorder))


class _Asked(_Seeded):
    """One that is asked."""

    def __init__(
        self, name: str, ask: Callable[[], Any], put: Callable[[Any], object], seed: Callable[[int], object]
    ) -> None:
        self.name = name
        self.read, self.write, self.seed = ask, put, seed

    def stands(self, state: Any) -> bool:
        return alike(state, self.read())

    def told(self, state: Any) -> Any:
        return state


class _Gpu(_Seeded):
    """The current GPU's, of which a number, the seed and the offset are all there is."""

    name = "cuda"

    def read(self) -> Any:
        own = self._own()
        return own.initial_seed(), own.get_offset()

    def write(self, state: Any) -> None:
        own = self._own()
        own.manual_seed(state[0])
        own.set_offset(state[1])

    def seed(self, number: int) -> None:
        self._own().manual_seed(number >> 1)

    def stands(self, state: Any) -> bool:
        return bool(state == self.read())

    def told(self, state: Any) -> Any:
        return torch.tensor(list(struct.pack("=Qq", *state)), dtype=torch.uint8)

    def _own(self) -> Any:
        device = torch.cuda.current_device()  # ahead of the list, which is empty until a GPU is asked for
        return torch.cuda.default_generators[device]


class _AskedPython(_Asked):
    """Python's."""

    def __init__(self) -> None:
        super().__init__("python", random.getstate, random.setstate, self._seed)

    def _seed(self, number: int) -> None:
        self._put(_twister()(number >> 32))

    def follow(self, words: Quarters) -> None:
        self._put(b"".join(words[number] for number in _FOR_PYTHON))

    def _put(self, words: bytes) -> None:
        random.setstate((random.Random.VERSION, (*struct.unpack(f"{_WORDS}I", words), _WORDS), None))


class _AskedNumPy(_Asked):
    """NumPy's, of any kind: its functions know how to seed each."""

    def __init__(self, *, is_twister: bool) -> None:
        self._numpy = sys.modules["numpy"]
        self._is_twister = is_twister
        own = self._numpy.random
        ask = functools.partial(own.get_state, legacy=is_twister)
        super().__init__("numpy", ask, own.set_state, lambda number: own.seed(number & _32_BITS))

    def follow(self, words: Quarters) -> None:
        if self._is_twister:
            own = b"".join(words[number] for number in _FOR_NUMPY)
            self.write(("MT19937", self._numpy.frombuffer(own, dtype=self._numpy.uint32), _WORDS))
        else:
            super().follow(words)


class _Mac(_Asked):
    """The GPU's of a Mac."""

    def __init__(self) -> None:
        super().__init__("mps", self._ask, self._put, torch.mps.manual_seed)

    def _ask(self) -> Any:
        return torch.mps.get_rng_state()

    def _put(self, state: Any) -> None:
        torch.mps.set_rng_state(state)


_MAC = _Mac()


class _Torch(_Seeded):
    """One of torch's: its seed, its place, its words and its normal numbers in reserve, at that place in memory."""

    name = "torch"

    def __init__(self, generator: torch.Generator, place: int) -> None:
        self._generator, self._place = generator, place
        self.memory = self._of(generator)
        self.words = _quarters(self.memory, _FIRST)
        view = memoryview(self.memory).cast("B")
        self._few, self._reserve = view[:_FEW], view[_RESERVED:]

    def read(self) -> Any:
        return self.memory.raw

    def write(self, state: Any) -> None:
        self.memory.raw = state

    def seed(self, number: int) -> None:
        self._generator.manual_seed(number >> 1)

    def stands(self, state: Any) -> bool:
        if self._few == state[:_FEW] and self._reserve == state[_RESERVED:]:
            return True
        if self._few[:_PLACED] != state[:_PLACED]:
            return False
        return alike(self.told(self.memory.raw), self.told(state))  # what is between its numbers may differ

    def told(self, state: Any) -> Any:
        told = torch.Generator()
        self._of(told).raw = state
        return told.get_state()

    def _of(self, generator: torch.Generator) -> Any:
        itself = ctypes.c_size_t.from_address(id(generator) + object.__basicsize__).value
        return _memory(itself + self._place, _TORCHS.size)


class _Python:
    """Python's, whose place is ahead of its words."""

    name = "python"

    def __init__(self, generator: random.Random) -> None:
        self._generator: Any = generator
        self._memory = _memory(id(generator) + object.__basicsize__, _SIZE)
        self._words = _placed(_quarters(self._memory, 4), _FOR_PYTHON)
        self._few = memoryview(self._memory).cast("B")[:_FEW]

    def read(self) -> Any:
        return self._memory.raw, self._generator.gauss_next

    def write(self, state: Any) -> None:
        self._memory.raw, self._generator.gauss_next = state

    def stands(self, state: Any) -> bool:
        return bool(self._few == state[0][:_FEW] and self._generator.gauss_next == state[1])

    def seed(self, number: int) -> None:
        self._memory.raw = _UNUSED + _twister()(number >> 32)
        self._generator.gauss_next = None

    def follow(self, words: Quarters) -> None:
        first, second, third, fourth = self._words
        first[:], second[:], third[:], fourth[:] = words
        self._memory[:4] = _UNUSED
        self._generator.gauss_next = None

    def told(self, state: Any) -> Any:
        place, *words = struct.unpack(f"i{_WORDS}I", state[0])
        return random.Random.VERSION, (*words, place), state[1]


class _NumPy:
    """NumPy's, whose place is behind its words; `reserve` is where it has its normal number, from its begin."""

    name = "numpy"

    def __init__(self, generator: Any, reserve: int) -> None:
        self._bits = generator._bit_generator  # noqa: SLF001
        self._generator = generator  # which must live as long as its memory is used
        self._memory = _memory(self._bits.ctypes.state_address, _SIZE)
        self._reserve = _memory(id(generator) + reserve, _RESERVE.size)
        self._words = _placed(_quarters(self._memory), _FOR_NUMPY)
        self._few = memoryview(self._memory).cast("B")[-_FEW:]

    def read(self) -> Any:
        return self._memory.raw, self._reserve.raw

    def write(self, state: Any) -> None:
        self._memory.raw, self._reserve.raw = state

    def stands(self, state: Any) -> bool:
        return bool(self._few == state[0][-_FEW:] and self._reserve.raw == state[1])

    def seed(self, number: int) -> None:
        self._generator.seed(number & _32_BITS)

    def follow(self, words: Quarters) -> None:
        first, second, third, fourth = self._words
        first[:], second[:], third[:], fourth[:] = words
        self._memory[-4:] = _UNUSED
        self._reserve.raw = _NOTHING

    def told(self, state: Any) -> Any:
        numpy = sys.modules["numpy"]
        words = numpy.frombuffer(state[0], dtype=numpy.uint32, count=_WORDS).copy()
        return "MT19937", words, int.from_bytes(state[0][4 * _WORDS :], sys.byteorder), *_RESERVE.unpack(state[1])


def alike(one: Any, other: Any) -> bool:
    """Whether two states are the same, as generators tell them."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return bool(one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one))
    # Python's has 625 numbers in a row, which compare at once.
    if isinstance(one, tuple) and any(type(part) is not int for part in one[:1]):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one.tobytes() == other.tobytes()) if hasattr(one, "tobytes") else bool(one == other)


@functools.cache
def _without_numpy() -> tuple[Global, ...]:
    own = random.getstate.__self__  # type: ignore[attr-defined]  # of whom it is a method
    python = _Python(own) if _python_lies_there() else None
    return _torchs(), python or _AskedPython()


@functools.cache
def _twister() -> Callable[[int], bytes]:
    """Return what makes a Mersenne Twister's words of a seed of 32 bits, as NumPy and torch do.

    Python mixes a seed into the words twice over, which takes three times as long as torch takes for all of them. It
    is given the half of a number that those two do not take, so that it draws otherwise than they.
    """
    place = _torchs_place()
    if place is None:
        return _init_genrand
    generator = torch.Generator()
    memory, seed = _Torch(generator, place).memory, generator.manual_seed

    def words_of(number: int) -> bytes:
        seed(number)
        return bytes(memory[_FIRST : _FIRST + 4 * _WORDS])

    return words_of


def _init_genrand(seed: int) -> bytes:
    """Matsumoto and Nishimura, mt19937ar (2002)."""
    words = [seed]
    for number in range(1, _WORDS):
        words.append((1812433253 * (words[-1] ^ words[-1] >> 30) + number) & _32_BITS)
    return struct.pack(f"{_WORDS}I", *words)


def _torchs() -> Global:
    own, place = torch.default_generator, _torchs_place()
    if place is not None:
        return _Torch(own, place)
    return _Asked("torch", own.get_state, own.set_state, lambda number: own.manual_seed(number >> 1))


@functools.lru_cache(maxsize=4)
def _with_numpy(generator: Any, bits: Any) -> tuple[Global, ...]:
    is_twister = type(bits).__name__ == "MT19937"
    reserve = _reserve(generator.__class__) if is_twister else None
    if reserve is not None:
        return *_without_numpy(), _NumPy(generator, reserve)
    return *_without_numpy(), _AskedNumPy(is_twister=is_twister)


@functools.cache
def of_devices() -> tuple[Global, ...]:
    """Return what is drawn from on the current GPU: what there is does not change, and takes 12 µs to ask."""
    return (*_gpus(), _MAC) if torch.backends.mps.is_available() else _gpus()


def _gpus() -> tuple[Global, ...]:
    if not torch.cuda.is_available():
        return ()
    gpu = _Gpu()
    if hasattr(torch.Generator, "get_offset") and torch.equal(gpu.told(gpu.read()), torch.cuda.get_rng_state()):
        return (gpu,)
    return (_Asked("cuda", torch.cuda.get_rng_state, torch.cuda.set_rng_state, torch.cuda.manual_seed),)


@functools.cache
def _python_lies_there() -> bool:
    kind = random.Random.__base__
    if sys.implementation.name != "cpython" or kind is None or kind.__basicsize__ < object.__basicsize__ + _SIZE:
        return False
    tried = random.Random(1)  # noqa: S311
    return _is_so(_Python(tried), tried.getstate, lambda: tried.gauss(0.0, 1.0))


@functools.cache
def _torchs_place() -> int | None:
    if sys.implementation.name != "cpython":
        return None
    seed = 0x1122334455667788
    tried = torch.Generator().manual_seed(seed)
    itself = ctypes.c_size_t.from_address(id(tried) + object.__basicsize__).value
    ahead = ctypes.string_at(itself, _AHEAD)
    place = ahead.find(seed.to_bytes(8, sys.byteorder), 0, _AHEAD - _SEEDED.size + 8)
    if place < 0 or _SEEDED.unpack_from(ahead, place) != (seed, 1, True, 0, seed & _32_BITS):
        return None
    draw = functools.partial(torch.randn, 1, dtype=torch.float64, generator=tried)
    return place if _is_so(_Torch(tried, place), tried.get_state, draw) else None


@functools.cache
def _reserve(kind: Any) -> int | None:
    tried = kind(1)
    words, size = tried.get_state()[:3], getattr(kind, "__basicsize__", 0)
    if sys.implementation.name != "cpython" or size < _RESERVE.size:
        return None
    tried.set_state((*words, 1, _KNOWN))
    place = ctypes.string_at(id(tried), size).find(_RESERVE.pack(1, _KNOWN)[8:]) - 8
    if place < object.__basicsize__:
        return None
    return place if _is_so(_NumPy(tried, place), tried.get_state, tried.normal) else None


def _is_so(one: Global, ask: Callable[[], Any], draw: Callable[[], Any]) -> bool:
    """Whether what is read is what the generator tells, and what is written is what it then tells."""
    before, as_read = ask(), one.read()
    so = alike(one.told(as_read), before)
    for _ in range(3):  # a normal number comes into reserve, and is taken from there
        draw()
        so = so and not one.stands(as_read) and alike(one.told(one.read()), ask())
    if so:
        one.write(as_read)
    return so and one.stands(as_read) and alike(ask(), before)


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)
