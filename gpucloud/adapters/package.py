"""gpucloud itself as one zip, which nodes run and training scripts import from."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import gpucloud

_LEFT_OUT = ("bundled", "adapters/markets/recordings")
"""What only a user's command reads: templates and Terraform's modules, recorded markets."""

_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that the format knows: equal files make equal bytes

# Written for any Python 3, so that an old one can say what it is.
_MAIN = """\
import sys

if sys.version_info < (3, 10):
    import json

    print(json.dumps({"python": sys.executable, "version": sys.version_info[:3]}))
    sys.exit(0)

from gpucloud.agent.__main__ import main

sys.exit(main(sys.argv[1:]))
"""


def package_zip() -> tuple[bytes, str]:
    """Return the zip and its SHA-256; the same source always gives the same bytes.

    `python3 <zip> agent|facts|layer|machine …` runs it, `PYTHONPATH=<zip>` makes `import gpucloud.resume` work.
    """
    root = Path(gpucloud.__file__).parent
    sources = {"__main__.py": _MAIN.encode()}
    # Prices, since a machine that drives its job counts money, and the lock of what it installs for that.
    for path in (*root.rglob("*.py"), *root.rglob("*.json"), *root.rglob("*.lock")):
        name = path.relative_to(root)
        if not any(name.is_relative_to(folder) for folder in _LEFT_OUT):
            sources[f"gpucloud/{name.as_posix()}"] = path.read_bytes()
    data = archived(sources)
    return data, hashlib.sha256(data).hexdigest()


def archived(sources: Mapping[str, bytes]) -> bytes:
    """Return a zip of the files; equal files make equal bytes, wherever and whenever it is made."""
    buffer = io.BytesIO()
    # Stored, not deflated: zlib's output differs between its versions, and imports from the zip are faster.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in sorted(sources.items()):
            entry = zipfile.ZipInfo(name, date_time=_DATE)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    return buffer.getvalue()
