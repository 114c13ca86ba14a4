"""A bucket in the strict emulated S3, in a process of its own: this one may be forked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpucloud.adapters.aws.session import Aws

_TELL = "import json, os, sys; print(json.dumps(dict(os.environ)), flush=True); sys.stdin.read()"


@contextmanager
def bucket(folder: Path) -> Iterator[str]:
    """Give the URL of an empty bucket, and make this process's AWS environment that of its server meanwhile."""
    folder.mkdir()
    argv = (sys.executable, "-m", "tests.lab.aws", "--no-machines", "--folder", str(folder), "--")
    kept = dict(os.environ)
    with (folder / "said").open("w") as said, subprocess.Popen(
        (*argv, sys.executable, "-c", _TELL), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
    ) as server:  # fmt: skip
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            line = server.stdout.readline()
            assert line, (folder / "said").read_text()
            os.environ |= {name: value for name, value in json.loads(line).items() if name.startswith("AWS_")}
            os.environ.pop("AWS_PROFILE", None)
            Aws().client("s3").create_bucket(Bucket="own")
            yield "s3://own"
        finally:
            os.environ.clear()
            os.environ.update(kept)
            server.stdin.close()
