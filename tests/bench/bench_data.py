"""Measures staging from S3 against a loop of download_file: `python -m tests.bench.bench_data [BYTES [SOURCE]]`.

The S3 server is on loopback, so that server and reader share the cores: the ratio says what our own work costs or gains
there. With an `s3://` source after the size, that one is read instead.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import boto3

from gpucloud.adapters.transfer.sync import Sources
from gpucloud.agent.data.staging import Order, stage
from gpucloud.domain.job.data import DataSet, wanted
from gpucloud.domain.job.spec import Cloud
from tests.bench.figures import figure
from tests.standins.bucket import serving

SMALL_FILES, SMALL_BYTES = 500, 40_000
LEAST_RATIO = 1.0
ROUNDS = 2


def main() -> int:
    size = int(float(sys.argv[1])) if len(sys.argv) > 1 else 80_000_000
    if len(sys.argv) > 2:
        return measure("bucket", sys.argv[2])
    with serving() as server:
        os.environ.update(server.environment)
        server.put({f"small/{n}": os.urandom(SMALL_BYTES) for n in range(SMALL_FILES)})
        server.put({f"large/{n}": os.urandom(size // 4) for n in range(4)})
        return measure("small", "s3://sets/small") | measure("large", "s3://sets/large")


def measure(name: str, source: str) -> int:
    found = Sources().listed(source)
    pairs = [(plain_s(found), staged_s(found)) for _ in range(ROUNDS)]  # alternating: both meet the same machine
    plain, ours = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
    figure(f"data_{name}_plain_gb_per_s", found.size / plain / 1e9)
    figure(f"data_{name}_staged_gb_per_s", found.size / ours / 1e9)
    return 0 if figure(f"data_{name}_time_over_plain", ours / plain, 1 / LEAST_RATIO) else 1


def plain_s(found: DataSet) -> float:
    bucket = found.source.removeprefix("s3://").partition("/")[0]
    client: Any = boto3.session.Session().client("s3")
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        for number, file in enumerate(found.files):
            client.download_file(bucket, file.key, f"{folder}/{number}")
        seconds = time.monotonic() - started
    client.close()
    return seconds


def staged_s(found: DataSet) -> float:
    one = wanted(found, "/data", Cloud.LOCAL)
    with tempfile.TemporaryDirectory() as folder:
        order = Order(key=one.key, content=one.content, target=one.target, below_root=True)
        started = time.monotonic()
        stage(Path(folder), order, found)
        return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
