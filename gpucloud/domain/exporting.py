"""One plain safetensors file out of a checkpoint's objects: which tensors, under which names, from which bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpucloud.domain.chunks import OWN, Chunk, chunks_of, covering
from gpucloud.domain.safetensors import Header, Tensor, entries_of, header_bytes, placed

_MAIN = "model"
_OF_A_SCRIPT = re.compile(r"data/\d+/\d+/(?:files|node-\d{5})/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The file that is to be written: how it begins, how large it is, and what goes where.

    Each move is a chunk and the place in the file where the tensor that it is a part of begins.
    """

    head: bytes
    size: int
    tensors: int
    moves: tuple[tuple[Chunk, int], ...]


def export(headers: Sequence[Header], ranks: Sequence[int], *, everything: bool, about: Mapping[str, str]) -> Exported:
    """Return the file of the model's weights, named as in its `state_dict()`, or with all tensors of the state.

    `ranks` wrote the objects with these `headers`; `about` goes into the file's metadata. Of several modules those
    beside `model` have their names before their weights'. With `everything`, optimizers and other objects follow, by
    rank 0 where each rank has its own, what is no tensor as JSON in the metadata. ValueError for what cannot be read.
    """
    trees = _Trees(headers, ranks)
    names = trees.weights()
    metadata = {"format": "pt", **about}
    if everything:
        names |= trees.beside(names)
        metadata["state"] = json.dumps(trees.rest({tensor: name for name, tensor in names.items()}))
    sources = {name: covering(trees.parts(tensor)) for name, tensor in names.items()}
    first = {name: trees.parts(tensor)[0] for name, tensor in names.items()}
    tensors = placed((name, chunk.dtype, chunk.shape) for name, chunk in first.items())
    head = header_bytes(entries_of(_in_order(tensors, names)), metadata)
    moves = tuple((chunk, len(head) + tensor.begin) for tensor in tensors for chunk in sources[tensor.name])
    size = len(head) + max((tensor.end for tensor in tensors), default=0)
    return Exported(head=head, size=size, tensors=len(tensors), moves=moves)


def rank_of(key: str) -> int:
    """Return the rank that wrote an object; ValueError for one of a script's own directory."""
    name = key.rpartition("/")[2]
    if _OF_A_SCRIPT.match(key) or not name.startswith("rank-"):
        raise ValueError("it holds files of the script's own checkpoint directory, not tensors by name")
    return int(name.split("-")[1])


class _Trees:
    """The state as its objects tell it: JSON in which tensors are named."""

    def __init__(self, headers: Sequence[Header], ranks: Sequence[int]) -> None:
        self._parts: dict[str, list[Chunk]] = {}
        texts: dict[str, str] = {}
        for number, (header, rank) in enumerate(zip(headers, ranks, strict=True)):
            for chunk in chunks_of(number, header):
                if rank == 0 or not chunk.of.startswith(OWN):
                    self._parts.setdefault(chunk.of, []).append(chunk)
            if rank == 0:
                texts.update(header.metadata)
        try:
            self._shared, self._own = json.loads(texts["shared"]), json.loads(texts["own"])
            self._modules: dict[str, dict[str, Any]] = self._shared["modules"]
            self._buffers: dict[str, dict[str, Any]] = self._own["buffers"]
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"it does not say what its tensors are: {error!r}") from error

    def parts(self, tensor: str) -> list[Chunk]:
        """Return the chunks of a tensor, by its name in the checkpoint."""
        try:
            return self._parts[tensor]
        except KeyError as error:
            raise ValueError(f"the tensor {tensor} is in none of its objects") from error

    def weights(self) -> dict[str, str]:
        """Return each weight's name in the file, with its name in the checkpoint."""
        plain = [module for module in self._modules if module == _MAIN or len(self._modules) == 1]
        named = [(module, name, tensor) for module in self._modules for name, tensor in self._state(module)]
        found = {name if module in plain else f"{module}.{name}": tensor for module, name, tensor in named}
        if len(found) < len(named):  # a weight of the model is called like another module's
            found = {f"{module}.{name}": tensor for module, name, tensor in named}
        return found

    def beside(self, taken: Mapping[str, str]) -> dict[str, str]:
        """Return the same of all other tensors but the generators' states."""
        known = set(taken.values())
        trees = (self._shared["optimizers"], self._own["buffers"], self._own.get("others", {}))
        tensors = [tensor for tree in trees for tensor in _tensors(tree) if tensor not in known]
        found = {tensor.removeprefix(OWN): tensor for tensor in tensors}
        clash = set(found) & set(taken)
        if clash:
            raise ValueError(f"two of its tensors would be called {min(clash)}")
        return found

    def rest(self, names: Mapping[str, str]) -> Any:
        """Return optimizers and others with what is no tensor; tensors are told by their names in the file."""
        return _renamed({"optimizers": self._shared["optimizers"], "others": self._own.get("others", {})}, names)

    def _state(self, module: str) -> Iterator[tuple[str, str]]:
        """Yield names and tensors of a module's `state_dict()`, in its order."""
        entries = {**self._modules[module], **self._buffers.get(module, {})}
        order = self._shared.get("names", {}).get(module, entries)
        for name in order:
            node = entries.get(name)
            if isinstance(node, dict) and node.get("$") == "tensor":
                yield name, str(node["name"])


def _tensors(tree: Any) -> Iterator[str]:
    """Yield the tensors that a tree names."""
    if isinstance(tree, list):
        for item in tree:
            yield from _tensors(item)
    elif isinstance(tree, dict):
        if tree.get("$") == "tensor":
            yield str(tree["name"])
        else:
            yield from _tensors(list(tree.values()))


def _renamed(tree: Any, names: Mapping[str, str]) -> Any:
    if isinstance(tree, list):
        return [_renamed(item, names) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.get("$") == "tensor":
        return {**tree, "name": names[tree["name"]]}
    return {key: _renamed(item, names) for key, item in tree.items()}


def _in_order(tensors: Sequence[Tensor], names: Mapping[str, str]) -> list[Tensor]:
    by_name = {tensor.name: tensor for tensor in tensors}
    return [by_name[name] for name in names]
