"""Staging from S3 by the node's own command: against an S3 server on loopback, with real processes and real disks."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpucloud.adapters.transfer.sync import Sources
from gpucloud.agent.data import fetching
from gpucloud.agent.data.fetching import beside
from gpucloud.agent.facts import staged
from gpucloud.domain.codec import to_json
from gpucloud.domain.errors import StoreError, UsageError
from gpucloud.domain.job.data import DataFile, data_set, wanted
from gpucloud.domain.job.spec import Cloud
from gpucloud.system import processes
from tests.standins.bucket import serving

FILES = {f"train/{n:03d}.bin": bytes([n]) * (1000 + n) for n in range(150)}
SOURCE = "s3://sets/tiny"
BIG_PART = 8 << 20


@pytest.fixture
def s3(monkeypatch):
    with serving() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def tiny(s3):
    s3.put({f"tiny/{path}": data for path, data in FILES.items()})
    s3.put({"tiny-not/x": b"a neighbour", "tiny/train/": b""})
    return s3


def node(folder: Path) -> Path:
    root = folder / ".gpucloud"
    root.mkdir(parents=True)
    return root


def wish(source=SOURCE, target="/data", cloud=Cloud.LOCAL):
    return wanted(Sources().listed(source), target, cloud)


def order(one):
    asked = {"key": one.key, "content": one.content, "target": one.target, "below_root": one.below_root}
    return to_json({"do": "stage", "order": asked, "env": []}).encode() + b"\n" + one.packed


def start(root, **env):
    argv = (sys.executable, "-m", "gpucloud.agent", "data", "--root", str(root))
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **env}
    )


def stage(root, one, **env):
    process = start(root, **env)
    out, err = process.communicate(order(one), timeout=100)
    assert b"Traceback" not in err, err.decode()
    return process.returncode, out.decode().strip()


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".gpucloud")
    }  # fmt: skip


def test_a_set_is_whole_at_its_target_and_a_second_time_nothing_is_read(tiny, tmp_path):
    root, one = node(tmp_path), wish()
    assert staged(root, (one.key,)) == ()
    code, said = stage(root, one)
    assert code == 0, said
    assert content(root / "data" / "at" / "data") == FILES
    assert said.startswith("note: data: /data: 0.2 MB in ")
    assert said.endswith(", 150 files")
    assert staged(root, (one.key, "another")) == (one.key,)
    assert len(tiny.reads) == 150
    assert stage(root, one) == (0, "note: data: /data: 0.2 MB were there")
    assert len(tiny.reads) == 150


def test_a_set_with_the_same_bytes_at_another_target_is_the_same_folder(tiny, tmp_path):
    root = node(tmp_path)
    stage(root, wish())
    code, said = stage(root, wish(target="/sets/mine/"))
    assert (code, said) == (0, "note: data: /sets/mine: 0.2 MB were there")
    at = root / "data" / "at"
    assert (at / "sets" / "mine").resolve() == (at / "data").resolve()


def test_killed_in_the_middle_it_reads_only_the_rest_when_run_again(tiny, tmp_path):
    root, one = node(tmp_path), wish()
    tiny.hold_after = 100
    process = start(root)
    process.stdin.write(order(one))
    process.stdin.close()
    until(tiny.held)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()
    whole = {path: data for path, data in content(root / "data" / "sets").items() if not path.endswith(".part")}
    assert 80 <= len(whole) < 150
    assert staged(root, (one.key,)) == ()
    tiny.release()
    before = len(tiny.reads)
    assert stage(root, one)[0] == 0
    rest = FILES.keys() - {path.partition("/")[2] for path in whole}
    read = [path.removeprefix("sets/tiny/") for path, _ in tiny.reads[before:]]
    assert set(read) == rest
    assert len(read) < len(rest) + 50  # of the killed one, what it had asked for last may be read late
    assert content(root / "data" / "at" / "data") == FILES


def test_one_object_that_changed_is_the_only_one_read_for_the_new_set(tiny, tmp_path):
    root = node(tmp_path)
    stage(root, wish())
    old = (root / "data" / "at" / "data").resolve()
    tiny.put({"tiny/train/007.bin": b"anew"})
    before = len(tiny.reads)
    assert stage(root, wish())[0] == 0
    assert [path for path, _ in tiny.reads[before:] if "list" not in path] == ["sets/tiny/train/007.bin"]
    now = content(root / "data" / "at" / "data")
    assert now == {**FILES, "train/007.bin": b"anew"}
    assert content(old) == FILES  # an attempt that reads the old one is not disturbed


def test_an_object_that_changed_after_it_was_listed_is_refused_by_name(tiny, tmp_path):
    one = wish()
    tiny.put({"tiny/train/007.bin": b"anew"})
    code, said = stage(node(tmp_path), one)
    assert code == 1
    assert "tiny/train/007.bin is not the object that was listed when the job began" in said
    assert "give the job another `name:`" in said


def test_a_file_torn_on_the_disk_is_seen_and_only_it_is_read_again(tiny, tmp_path):
    root, one = node(tmp_path), wish()
    stage(root, one)
    torn = root / "data" / "at" / "data" / "train" / "099.bin"
    os.truncate(torn, 10)
    assert staged(root, (one.key,)) == ()
    assert stage(root, one)[1].endswith("1 file, 149 were there")
    assert torn.read_bytes() == FILES["train/099.bin"]
    assert staged(root, (one.key,)) == (one.key,)


def test_files_of_an_unfinished_run_before_a_reboot_are_not_believed(tiny, tmp_path):
    root, one = node(tmp_path), wish()
    stage(root, one)
    folder = (root / "data" / "at" / "data").resolve()
    (folder / ".gpucloud-data.json").unlink()
    (folder / ".gpucloud-begun").write_text("another boot")
    before = len(tiny.reads)
    stage(root, one)
    assert len(tiny.reads) - before == 150


def test_a_disk_that_is_too_small_is_refused_with_the_numbers_before_any_byte(tiny, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(("mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(small)), check=True)
    try:
        code, said = stage(node(tmp_path), wish(), GPUCLOUD_DATA_ROOT=str(small))
    finally:
        subprocess.run(("umount", str(small)), check=True)
    assert code == 1
    assert said.startswith(
        f"no disk has room for a data set of 0.2 MB: {small}/gpucloud-data: 0.1 MB free, 0.2 MB needed"
    )
    assert tiny.reads == []


def test_a_missing_permission_is_named(tiny, tmp_path):
    one = wish()
    tiny.refuse = lambda path: path.endswith("042.bin")
    code, said = stage(node(tmp_path), one)
    assert code == 1
    assert said.startswith("s3:GetObject on the objects is missing for s3://sets/tiny")


def test_a_bucket_that_is_not_there_is_said_when_it_is_listed(s3):
    with pytest.raises(StoreError, match="cannot list the bucket in s3://nowhere"):
        Sources().listed("s3://nowhere/x")


def test_nothing_below_a_prefix_and_keys_that_no_folder_can_hold_are_said(s3):
    s3.put({"both": b"1", "both/below": b"2", "up/../x": b"3"})
    with pytest.raises(UsageError, match="there is nothing at s3://sets/none"):
        Sources().listed("s3://sets/none")
    with pytest.raises(UsageError, match=r"'both' is a file and a folder at once"):
        Sources().listed("s3://sets")


def test_a_single_object_is_a_set_of_one(s3, tmp_path):
    s3.put({"one/file.bin": b"x" * 10})
    root = node(tmp_path)
    assert stage(root, wish("s3://sets/one/file.bin"))[0] == 0
    assert content(root / "data" / "at" / "data") == {"file.bin": b"x" * 10}


@pytest.fixture
def big(s3):
    data = os.urandom(fetching.LARGE_BYTES + BIG_PART + 12345)
    s3.put({"big/small": b"small"})
    client = s3.client()
    upload = client.create_multipart_upload(Bucket="sets", Key="big/parts.bin")["UploadId"]
    parts = []
    for number, first in enumerate(range(0, len(data), BIG_PART), 1):
        reply = client.upload_part(
            Bucket="sets", Key="big/parts.bin", UploadId=upload, PartNumber=number, Body=data[first : first + BIG_PART]
        )
        parts.append({"PartNumber": number, "ETag": reply["ETag"]})
    client.complete_multipart_upload(
        Bucket="sets", Key="big/parts.bin", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    client.put_object(Bucket="sets", Key="big/whole.bin", Body=data)
    client.close()
    s3.data = data
    return s3


def test_large_objects_are_read_in_parts_and_proven_by_both_kinds_of_etags(big, tmp_path):
    root, one = node(tmp_path), wish("s3://sets/big")
    code, said = stage(root, one)
    assert code == 0, said
    assert "proven by their length" not in said
    found = content(root / "data" / "at" / "data")
    assert found["parts.bin"] == found["whole.bin"] == big.data
    assert sorted(found) == ["parts.bin", "small", "whole.bin"]
    ranges = [span for path, span in big.reads if path == "sets/big/parts.bin" and span]
    assert len(ranges) == 10
    assert f"bytes=0-{BIG_PART - 1}" in ranges  # side by side: any part may be first


def test_killed_in_a_large_object_it_reads_only_the_parts_that_are_missing(big, tmp_path):
    root, one = node(tmp_path), wish("s3://sets/big/parts.bin")
    big.hold_after = 6
    process = start(root)
    process.stdin.write(order(one))
    process.stdin.close()
    until(big.held)
    journal = beside(root / "data" / "sets" / one.content / "parts.bin").with_suffix(".parts")
    until(lambda: journal.exists() and len(journal.read_text().splitlines()) >= 5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()
    done = len(journal.read_text().splitlines()) - 1
    big.release()
    big.reads.clear()
    assert stage(root, one)[0] == 0
    assert len(big.reads) == 10 - done
    assert content(root / "data" / "at" / "data") == {"parts.bin": big.data}


def test_no_worker_outlives_a_killed_parent(big, tmp_path):
    root, one = node(tmp_path), wish("s3://sets/big")
    big.hold_after = 2
    process = start(root)
    process.stdin.write(order(one))
    process.stdin.close()
    until(big.held)
    workers = (Path("/proc") / str(process.pid) / "task" / str(process.pid) / "children").read_text().split()
    assert workers
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()
    # A process that nobody has reaped yet is dead too.
    until(lambda: not any(processes.started(int(worker)) for worker in workers))


def test_two_nodes_stage_at_the_same_time_and_two_calls_on_one_node_read_once(tiny, tmp_path):
    one, nodes = wish(), [node(tmp_path / name) for name in ("a", "b")]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda root: stage(root, one), [*nodes, *nodes]))
    assert [code for code, _ in answers] == [0, 0, 0, 0]
    assert len(tiny.reads) == 300
    assert all(content(root / "data" / "at" / "data") == FILES for root in nodes)


def test_files_whose_long_names_begin_alike_and_names_of_parts_are_files_like_others(s3, tmp_path):
    files = {f"{'shard-' * 35}{n:02d}": bytes([n]) * 100_000 for n in range(40)}
    files |= {"x": b"one", ".x.part": b"two", ".x.parts": b"six"}
    s3.put({f"tiny/{path}": data for path, data in files.items()})
    root = node(tmp_path)
    code, said = stage(root, wish())
    assert code == 0, said
    assert content(root / "data" / "at" / "data") == files


def test_the_target_itself_is_made_where_the_node_is_a_machine(tiny, tmp_path):
    root, target = node(tmp_path), tmp_path / "machine" / "data"
    one = wish(target=str(target), cloud=Cloud.AWS)
    assert stage(root, one, GPUCLOUD_DATA_ROOT=str(tmp_path / "fast"))[0] == 0
    assert content(target) == FILES
    assert target.resolve() == tmp_path / "fast" / "gpucloud-data" / one.content
    assert staged(root, (one.key,)) == (one.key,)


@pytest.mark.parametrize("there", ["file", "link"])
def test_what_is_not_ours_at_the_target_stays(tiny, tmp_path, there):
    root, target = node(tmp_path), tmp_path / "data"
    (tmp_path / "theirs").mkdir()
    target.symlink_to(tmp_path / "theirs") if there == "link" else target.write_text("theirs")
    code, said = stage(root, wish(target=str(target), cloud=Cloud.AWS), GPUCLOUD_DATA_ROOT=str(tmp_path / "fast"))
    assert code == 1
    assert "name another folder under `data:`" in said
    assert target.is_symlink() if there == "link" else target.read_text() == "theirs"
    assert tiny.reads == []


def test_a_mark_that_a_script_has_spoiled_is_none_until_it_is_made_anew(tiny, tmp_path):
    root, one = node(tmp_path), wish()
    stage(root, one)
    mark = root / "data" / "at" / "data" / ".gpucloud-data.json"
    for files in (7, None, [7], [[]], [["train/000.bin"]], [["a", "b", 1]], [[{}, 1, "1 x"]], [["x\0y", 1, "1 x"]]):
        mark.write_text(json.dumps({"files": files}))
        assert staged(root, (one.key,)) == ()
    tiny.put({"tiny/more": b"more"})
    assert stage(root, wish())[0] == 0  # beside it, on the same disk
    assert stage(root, one)[0] == 0
    assert staged(root, (one.key,)) == (one.key,)


def test_a_mark_that_tells_of_other_folders_gives_none_of_their_files_away(tiny, tmp_path):
    root, one = node(tmp_path), wish()
    stage(root, one)
    sets = root / "data" / "sets"
    (sets / "theirs").write_bytes(b"more")
    new = data_set("x", [DataFile(path="more", size=4, etag=hashlib.md5(b"more").hexdigest())]).files[0]
    os.utime(sets / "theirs", (new.stamp_s, new.stamp_s))
    mark = sets / one.content / ".gpucloud-data.json"
    mark.write_text(json.dumps({"files": [["../theirs", 4, new.identity]]}))
    tiny.put({"tiny/more": b"more"})
    other = wish()
    assert stage(root, other)[0] == 0
    assert not (sets / other.content / "more").samefile(sets / "theirs")


def until(holds, limit_s=30.0):
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_the_mark_names_the_source_and_every_file(tiny, tmp_path):
    root = node(tmp_path)
    stage(root, wish())
    mark = json.loads((root / "data" / "at" / "data" / ".gpucloud-data.json").read_text())
    assert (mark["version"], mark["source"], len(mark["files"])) == (1, SOURCE, 150)
    assert mark["files"][0][:2] == ["train/000.bin", 1000]
