from __future__ import annotations

import hashlib
import io
import subprocess
import sys
import zipfile

from gpucloud.adapters.packaging import package_zip


def test_the_same_source_gives_the_same_bytes_under_their_own_hash():
    data, sha256 = package_zip()
    assert package_zip() == (data, sha256)
    assert hashlib.sha256(data).hexdigest() == sha256


def test_the_zip_holds_sources_and_price_lists_in_order_and_without_dates_of_this_machine():
    with zipfile.ZipFile(io.BytesIO(package_zip()[0])) as archive:
        entries = archive.infolist()
    names = [entry.filename for entry in entries]
    assert names == sorted(names)
    assert {"__main__.py", "gpucloud/__init__.py", "gpucloud/agent/__main__.py"} <= set(names)
    assert [name for name in names if not name.endswith(".py")] == [
        "gpucloud/adapters/aws/prices/catalog.json",
        "gpucloud/adapters/local/prices.json",
        "gpucloud/adapters/markets/prior.json",
        "gpucloud/agent/drive/requirements.lock",
    ]
    assert all(not name.startswith("gpucloud/bundled/") for name in names)
    assert {entry.date_time for entry in entries} == {(1980, 1, 1, 0, 0, 0)}


def test_the_agent_needs_the_standard_library_only(tmp_path):
    path = tmp_path / "g.zip"
    path.write_bytes(package_zip()[0])
    # -S hides every installed package; the list proves it from the other side.
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(path)!r})\n"
        "import gpucloud.agent.__main__\n"
        "known = {*sys.stdlib_module_names, 'gpucloud', '__main__'}\n"
        "print({name.partition('.')[0] for name in sys.modules} - known)\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n", "")
