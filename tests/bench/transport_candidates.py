# ruff: noqa: PLC0415  each process imports what it measures, no more
"""One way to save and load some bytes, in a process of its own: `… transport_candidates NAME BYTES DISK MEMORY`.

It prints one line of JSON: for `save` and `load` the best seconds, the least CPU seconds and the peak of memory beyond
what stood before. Everyone gets what suits it best: those that send files have the file ready, in memory
where there is a folder there, and who loads into a file need not read it.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

Work = Callable[[], None]
TRIES = 4  # the first warms up
_PIECE = 32 << 20
_TENSORS = 16


def main() -> None:
    name, size = sys.argv[1], int(sys.argv[2])
    folder = Path(sys.argv[4 if name in IN_FILES else 3])
    save, load = CANDIDATES[name](_state(size), folder)
    print(json.dumps({"save": _measured(save), "load": _measured(load)}))


def ours(state: memoryview, folder: Path) -> tuple[Work, Work]:
    """The S3 store."""
    return _stored("s3://bucket/ours", state)


def directory(state: memoryview, folder: Path) -> tuple[Work, Work]:
    """The directory store."""
    return _stored(str(folder / "store"), state)


def _stored(url: str, state: memoryview) -> tuple[Work, Work]:
    """Write the state; read it back and compare every part with its CRC32."""
    from gpucloud.store import open_store
    from gpucloud.store.parts import all_done, crc32_of

    store = open_store(url)
    into, sums = memoryview(bytearray(len(state))), []

    def save() -> None:
        sums[:] = [store.write("state", (state,))]

    def read(number: int) -> bool:
        part = into[number * _PIECE : (number + 1) * _PIECE]
        return store.read_into("state", number * _PIECE, part) and crc32_of((part,)) == sums[0].crc32[number]

    def load() -> None:
        assert all(all_done(read, range(len(sums[0].crc32))))

    return save, load


def disk(state: memoryview, folder: Path) -> tuple[Work, Work]:
    """The limit: one write and fsync, one read into ready memory, nothing checked."""
    path, into = folder / "raw", memoryview(bytearray(len(state)))

    def save() -> None:
        with path.open("wb", buffering=0) as file:
            rest = state
            while rest:
                rest = rest[file.write(rest[:_PIECE]) :]
            os.fsync(file.fileno())

    def load() -> None:
        with path.open("rb", buffering=0) as file:
            rest = into
            while rest:
                rest = rest[file.readinto(rest) :]

    return save, load


def torch_save(state: memoryview, folder: Path) -> tuple[Work, Work]:
    """`torch.save` into a file, and fsync; `torch.load`."""
    import torch

    path, tensors = folder / "torch.pt", _tensors(state)

    def save() -> None:
        with path.open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())

    return save, lambda: torch.load(path)


def dcp(state: memoryview, folder: Path) -> tuple[Work, Work]:
    """DCP's own files, with fsync; into ready tensors."""
    import torch
    import torch.distributed.checkpoint as library

    place, tensors = str(folder / "dcp"), _tensors(state)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def save() -> None:
        library.save(tensors, storage_writer=library.FileSystemWriter(place), no_dist=True)

    return save, lambda: library.load(into, storage_reader=library.FileSystemReader(place), no_dist=True)


def _tensors(state: memoryview):
    import torch

    step = len(state) // _TENSORS
    return {str(n): torch.frombuffer(state[n * step : (n + 1) * step], dtype=torch.uint8) for n in range(_TENSORS)}


def boto3_file(state: memoryview, folder: Path) -> tuple[Work, Work]:
    """`upload_file` and `download_file` as they come."""
    import boto3.session

    client = boto3.session.Session().client("s3")
    source, target = str(folder / "source"), str(folder / "target")
    Path(source).write_bytes(state)
    return lambda: client.upload_file(source, "bucket", "boto3"), lambda: client.download_file(
        "bucket", "boto3", target
    )


def crt(state: memoryview, folder: Path) -> tuple[Work, Work]:
    """s3transfer's CRT client, from and into memory."""
    from gpucloud.store.parts import crc32_of
    from gpucloud.store.s3parts import PartFile

    manager, into, sums = _crt_manager(), bytearray(len(state)), []

    def save() -> None:
        sums[:] = [crc32_of((state[at : at + _PIECE],)) for at in range(0, len(state), _PIECE)]
        manager.upload(PartFile((state,)), "bucket", "crt").result()

    def load() -> None:
        manager.download("bucket", "crt", _Writer(into)).result()
        with memoryview(into) as view:
            assert [crc32_of((view[at : at + _PIECE],)) for at in range(0, len(view), _PIECE)] == sums

    return save, load


def crt_file(state: memoryview, folder: Path) -> tuple[Work, Work]:
    """s3transfer's CRT client, from a file and into one, both in memory."""
    import mmap

    from gpucloud.store.parts import crc32_of

    manager, sums = _crt_manager(), []
    source, target = folder / "crt-source", folder / "crt-target"
    source.write_bytes(state)

    def save() -> None:
        sums[:] = [crc32_of((state[at : at + _PIECE],)) for at in range(0, len(state), _PIECE)]
        manager.upload(str(source), "bucket", "crt-file").result()

    def load() -> None:
        manager.download("bucket", "crt-file", str(target)).result()
        with (
            target.open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped,
            memoryview(mapped) as view,
        ):
            found = []
            for at in range(0, len(view), _PIECE):
                with view[at : at + _PIECE] as part:
                    found.append(crc32_of((part,)))
            assert found == sums

    return save, load


class _Writer:
    """A file that only grows, over ready memory."""

    def __init__(self, into: bytearray) -> None:
        self._into, self._at = into, 0

    def write(self, chunk: bytes) -> int:
        self._into[self._at : self._at + len(chunk)] = chunk
        self._at += len(chunk)
        return len(chunk)


def _crt_manager():
    import botocore.session
    from botocore.config import Config
    from s3transfer.crt import (
        BotocoreCRTCredentialsWrapper,
        BotocoreCRTRequestSerializer,
        CRTTransferManager,
        create_s3_crt_client,
    )

    session = botocore.session.Session()
    provider = BotocoreCRTCredentialsWrapper(session.get_credentials()).to_crt_credentials_provider()
    client = create_s3_crt_client("us-east-1", crt_credentials_provider=provider, part_size=_PIECE, use_ssl=False)
    config = Config(
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"},
    )
    told = {"region_name": "us-east-1", "endpoint_url": os.environ["AWS_ENDPOINT_URL"], "config": config}
    return CRTTransferManager(client, BotocoreCRTRequestSerializer(session, told))


def s3torchconnector(state: memoryview, folder: Path) -> tuple[Work, Work]:
    """`torch.save` into and `torch.load` from its S3Checkpoint."""
    import torch
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    config = S3ClientConfig(force_path_style=True)
    checkpoint = S3Checkpoint("us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)
    tensors = _tensors(state)

    def save() -> None:
        with checkpoint.writer("s3://bucket/connector") as writer:
            torch.save(tensors, writer)

    def load() -> None:
        with checkpoint.reader("s3://bucket/connector") as reader:
            torch.load(reader)

    return save, load


def obstore(state: memoryview, folder: Path) -> tuple[Work, Work]:
    """From memory in parts like ours; ranges into memory."""
    import obstore as library
    from obstore.store import S3Store

    store = S3Store(
        "bucket", endpoint=os.environ["AWS_ENDPOINT_URL"], region="us-east-1", virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "300s"},
    )  # fmt: skip
    into = memoryview(bytearray(len(state)))

    def pieces():
        for at in range(0, len(state), _PIECE):
            yield state[at : at + _PIECE]

    def save() -> None:
        library.put(store, "obstore", pieces(), chunk_size=_PIECE, max_concurrency=4)

    def load() -> None:
        for at in range(0, len(state), _PIECE):
            part = into[at : at + _PIECE]
            part[:] = memoryview(library.get_range(store, "obstore", start=at, length=len(part)))

    return save, load


CANDIDATES = {
    "ours": ours,
    "directory": directory,
    "disk": disk,
    "torch_save": torch_save,
    "dcp": dcp,
    "boto3": boto3_file,
    "crt": crt,
    "crt_file": crt_file,
    "s3torchconnector": s3torchconnector,
    "obstore": obstore,
}
IN_FILES = {"boto3", "crt_file"}


def _state(size: int) -> memoryview:
    # No two parts are alike, and the pages have been touched.
    state = memoryview(bytearray(size))
    block = os.urandom(1 << 20)
    for at in range(0, size, len(block)):
        stop = min(at + len(block), size)
        state[at:stop] = block[: stop - at]
        state[at] = at % 251
    return state


def _measured(work: Work, tries: int = TRIES) -> dict[str, float]:
    found: list[tuple[float, float, float]] = []
    for _ in range(tries):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before, cpu, began = _status("VmRSS"), _cpu_s(), time.perf_counter()
        work()
        found.append((time.perf_counter() - began, _cpu_s() - cpu, _status("VmHWM") - before))
    # What the warm-up imports and opens once counts as memory, not as time.
    return {
        "seconds": min(one[0] for one in found[1:]),
        "cpu_s": min(one[1] for one in found[1:]),
        "extra_mib": max(one[2] for one in found) / 1024,
    }


def _status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(name)))


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
