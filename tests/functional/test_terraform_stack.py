"""A stack whose state is in the store: nothing runs without need, and no loss of a record loses a resource."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from gpucloud.adapters.terraform import guard
from gpucloud.adapters.terraform.history import Run, write
from gpucloud.adapters.terraform.runner import failure
from gpucloud.adapters.terraform.stack import Stack
from gpucloud.adapters.terraform.workfolder import in_bucket, in_directory
from gpucloud.domain.errors import CredentialsError, GpucloudError, ProvisionError, ToolMissing
from gpucloud.store import ObjectStore
from gpucloud.store.directory import DirectoryStore
from gpucloud.store.s3 import S3Store
from gpucloud.system import processes
from tests.lab.aws import Lab

MODULE = """
variable "word" { type = string }
resource "terraform_data" "thing" { input = var.word }
output "word" { value = var.word }
"""


def quiet(line: str) -> None:
    """A story that nobody listens to."""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    folder = tmp_path / "module"
    folder.mkdir()
    (folder / "main.tf").write_text(MODULE)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def stack(module: Path, store: DirectoryStore, machine: str = "here", **more: object) -> Stack:
    root = module.parent / machine / "terraform"
    return Stack(
        name="digits", module=module, root=root, env=dict(os.environ), home=in_directory(store, "digits"), **more
    )


def apply(one: Stack, word: str, story: list[str] | None = None) -> object:
    return one.apply(lambda _: {"word": word}, story=quiet if story is None else story.append)["word"]


def logs(one: Stack) -> list[str]:
    return sorted(path.name for path in one.logs.iterdir()) if one.logs.exists() else []


def state(store: ObjectStore) -> bytes:
    stored = store.get("terraform/digits/terraform.tfstate")
    assert stored is not None
    return stored.data


def thing(store: ObjectStore) -> str:
    """The id of the one resource."""
    return str(json.loads(state(store))["resources"][0]["instances"][0]["attributes"]["id"])


def test_what_is_proven_is_not_applied_again_on_this_machine_or_another(module: Path, store: DirectoryStore) -> None:
    one = stack(module, store)
    assert apply(one, "a") == "a"
    assert apply(one, "a") == "a"
    assert logs(one) == ["000001-init.jsonl", "000002-apply.jsonl"]
    other = stack(module, store, "other")
    assert apply(other, "a") == "a"
    assert logs(other) == []


def test_any_change_is_applied(module: Path, store: DirectoryStore) -> None:
    one = stack(module, store)
    apply(one, "a")
    assert apply(one, "b") == "b"
    (module / "main.tf").write_text(MODULE + 'output "more" { value = 1 }\n')
    apply(one, "b")
    assert len(logs(one)) == 5  # the changed module is initialised too


def test_the_variables_of_the_last_good_apply_are_known(module: Path, store: DirectoryStore) -> None:
    apply(stack(module, store), "a")
    told: list[object] = []

    def wanted(last: object) -> dict[str, str]:
        told.append(last)
        return {"word": "b"}

    stack(module, store, "other").apply(wanted, story=quiet)
    assert told == [{"word": "a"}]


def test_a_torn_state_is_kept_aside_and_what_stands_is_taken_into_a_new_one(
    module: Path, store: DirectoryStore
) -> None:
    found: dict[str, str] = {}
    one = stack(module, store, adopt=lambda _: found)
    apply(one, "a")
    first = thing(store)
    found["terraform_data.thing"] = first
    store.put("terraform/digits/terraform.tfstate", state(store)[:100])
    told: list[str] = []
    assert apply(one, "a", told) == "a"
    assert thing(store) == first
    assert "taking 1 resources that stand already into Terraform's state" in told
    assert len(store.list("terraform/digits/terraform.tfstate.damaged-")) == 1


def test_a_flipped_state_gives_way_to_the_version_before(module: Path, store: DirectoryStore) -> None:
    one = stack(module, store)
    apply(one, "a")
    apply(one, "b")
    whole, first = state(store), thing(store)
    backup = store.root / "terraform/digits/terraform.tfstate.backup"
    backup.write_bytes(whole)
    store.put("terraform/digits/terraform.tfstate", whole.replace(first.encode(), first[::-1].encode()))
    told: list[str] = []
    apply(one, "b", told)
    assert thing(store) == first
    assert told[1] == "its last whole version is back in place"


def test_a_lost_state_is_rebuilt_from_what_stands(module: Path, store: DirectoryStore) -> None:
    found: dict[str, str] = {}
    one = stack(module, store, adopt=lambda _: found)
    apply(one, "a")
    found["terraform_data.thing"] = thing(store)
    store.delete("terraform/digits/terraform.tfstate")
    (store.root / "terraform/digits/terraform.tfstate.backup").unlink(missing_ok=True)
    apply(one, "a")
    assert thing(store) == found["terraform_data.thing"]


def test_a_lost_state_still_lets_everything_be_destroyed(module: Path, store: DirectoryStore) -> None:
    one = stack(module, store, adopt=lambda _: {"terraform_data.thing": "stands-1"})
    apply(one, "a")
    store.delete("terraform/digits/terraform.tfstate")
    told: list[str] = []
    one.destroy(story=told.append)
    assert "Terraform removed 1 resource" in told
    assert [key for key in store.list("terraform/") if "backup" not in key] == []


def test_what_was_never_made_is_destroyed_without_a_word(module: Path, store: DirectoryStore) -> None:
    told: list[str] = []
    stack(module, store).destroy(story=told.append)
    assert told == []


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    with Lab(tmp_path / "lab") as lab:
        for name, value in lab.settings.items():
            monkeypatch.setenv(name, value)
        s3 = lab.client("s3")
        s3.create_bucket(Bucket="states")
        s3.close()
        store = S3Store("s3://states/below")
        yield store
        store.close()


def in_s3(module: Path, bucket: ObjectStore, **more: object) -> Stack:
    home = in_bucket(bucket, "digits", region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"])
    root = module.parent / "here" / "terraform"
    return Stack(name="digits", module=module, root=root, env=dict(os.environ), home=home, wait_s=0.2, **more)


def locked(bucket: ObjectStore, who: str) -> None:
    lock = {"ID": "5e1f", "Operation": "OperationTypeApply", "Info": "", "Who": who, "Version": "1.11.4"}
    lock |= {"Created": datetime.now(timezone.utc).isoformat(), "Path": "states/below/terraform/digits"}
    bucket.put("terraform/digits/terraform.tfstate.tflock", json.dumps(lock).encode())


def begun(bucket: ObjectStore, *, host: str, group: int, ends_within_s: float = 900.0) -> None:
    run = Run(
        id="a",
        command="apply",
        host=host,
        space=processes.space(),
        group=group,
        ends_within_s=ends_within_s,
        variables={},
    )
    bucket.put("terraform/digits/run.json", write(run))


def dead_group() -> int:
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait()
    return process.pid


def test_no_key_is_written_anywhere(module: Path, bucket: ObjectStore) -> None:
    one = in_s3(module, bucket)
    apply(one, "a")
    written = [path.read_bytes() for path in one.root.rglob("*") if path.is_file()]
    written += [stored.data for key in bucket.list("") if (stored := bucket.get(key))]
    assert not [data for data in written if os.environ["AWS_SECRET_ACCESS_KEY"].encode() in data]
    assert bucket.list("") == (
        "terraform/digits/applied.json",
        "terraform/digits/run.json",
        "terraform/digits/terraform.tfstate",
    )


def test_a_lock_left_by_a_dead_run_of_this_machine_is_removed(module: Path, bucket: ObjectStore) -> None:
    locked(bucket, f"me@{socket.gethostname()}")
    begun(bucket, host=socket.gethostname(), group=dead_group())
    assert apply(in_s3(module, bucket), "a") == "a"
    assert bucket.get("terraform/digits/terraform.tfstate.tflock") is None


def test_a_lock_from_elsewhere_is_removed_when_its_run_must_have_ended(module: Path, bucket: ObjectStore) -> None:
    locked(bucket, "me@elsewhere")
    begun(bucket, host="elsewhere", group=1, ends_within_s=-1.0)
    assert apply(in_s3(module, bucket), "a") == "a"


def test_a_living_lock_is_left_alone_and_named(module: Path, bucket: ObjectStore) -> None:
    locked(bucket, "me@elsewhere")
    begun(bucket, host="elsewhere", group=1)
    with pytest.raises(ProvisionError, match="me@elsewhere holds Terraform's lock on digits since 20") as caught:
        apply(in_s3(module, bucket), "a")
    assert "the lock is taken over at 20" in (caught.value.hint or "")


def test_a_lock_taken_just_before_ours_is_told_like_any_other(module: Path, bucket: ObjectStore) -> None:
    def late(_: object) -> dict[str, str]:
        locked(bucket, "me@elsewhere")
        return {}

    with pytest.raises(ProvisionError, match="me@elsewhere holds the lock on the state since 20"):
        apply(in_s3(module, bucket, adopt=late), "a")


def test_the_lock_of_who_runs_terraform_by_hand_is_never_taken(module: Path, bucket: ObjectStore) -> None:
    locked(bucket, "admin@desk")
    begun(bucket, host=socket.gethostname(), group=dead_group(), ends_within_s=-1.0)
    with pytest.raises(ProvisionError, match="admin@desk holds"):
        apply(in_s3(module, bucket), "a")
    assert bucket.get("terraform/digits/terraform.tfstate.tflock") is not None


def test_a_living_run_of_this_machine_keeps_its_lock(module: Path, bucket: ObjectStore) -> None:
    locked(bucket, f"me@{socket.gethostname()}")
    begun(bucket, host=socket.gethostname(), group=os.getpgid(0))
    with pytest.raises(ProvisionError, match="holds Terraform's lock"):
        apply(in_s3(module, bucket), "a")


def kept(tmp_path: Path, limit_s: float, mercy_s: float, script: str) -> tuple[int, float]:
    """Exit code and seconds of a keeper over a shell script."""
    with (tmp_path / "lock").open("w") as lock:
        argv = [sys.executable, "-IS", guard.__file__, str(lock.fileno()), str(limit_s), str(mercy_s)]
        began = time.monotonic()
        process = subprocess.Popen(
            [*argv, "/bin/sh", "-c", script], stdin=subprocess.PIPE, pass_fds=(lock.fileno(),), start_new_session=True
        )
        process.communicate(b"\n", timeout=30)
    return process.returncode, time.monotonic() - began


def test_the_keeper_asks_a_command_to_end_after_its_limit(tmp_path: Path) -> None:
    code, seconds = kept(tmp_path, 0.1, 20.0, "trap 'exit 7' INT; while :; do sleep 0.1; done")
    assert code == 7
    assert seconds < 10


def test_the_keeper_kills_what_does_not_end_when_asked(tmp_path: Path) -> None:
    code, _ = kept(tmp_path, 0.1, 0.1, "trap '' INT; while :; do sleep 0.1; done")
    assert code == -signal.SIGKILL


def test_the_keeper_stops_its_clock_when_the_command_has_ended(tmp_path: Path) -> None:
    """While Python ends, a tick would kill it: a Terraform that ended well would count as failed, one time in fifty."""
    script = (
        "import signal, sys\n"
        "from gpucloud.adapters.terraform import guard\n"
        "code = guard.main(int(sys.argv[1]), 60.0, 60.0, ['/bin/sh', '-c', 'exit 7'])\n"
        "print(code, signal.getitimer(signal.ITIMER_REAL))"
    )
    with (tmp_path / "lock").open("w") as lock:
        done = subprocess.run(
            [sys.executable, "-c", script, str(lock.fileno())], input=b"\n", pass_fds=(lock.fileno(),),
            capture_output=True, timeout=60, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    assert done.stdout.decode().strip() == "7 (0.0, 0.0)"


def test_the_keeper_runs_nothing_for_a_caller_that_is_gone(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        argv = [sys.executable, "-IS", guard.__file__, str(lock.fileno()), "1", "1", "/bin/touch", str(tmp_path / "x")]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, pass_fds=(lock.fileno(),), timeout=30)
    assert done.returncode == 125
    assert not (tmp_path / "x").exists()


def explained(code: str, words: str) -> GpucloudError | None:
    if code == "ExpiredToken":
        return CredentialsError("the credentials have expired", hint="log in again")
    return ProvisionError(f"no room ({code})", hint="try elsewhere") if code == "VpcLimitExceeded" else None


@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        ("x: operation error STS: G, api error ExpiredToken: gone", CredentialsError, "the credentials have expired"),
        ("aws_vpc.this: creating, api error VpcLimitExceeded: 5", ProvisionError, "terraform apply: no room (VpcL"),
        (
            "aws_vpc.this: creating, api error Strange.Code: 5",
            ProvisionError,
            "terraform apply: aws_vpc.this: creating",
        ),
        ("Failed to query available provider packages: no route", ToolMissing, "terraform apply: Failed to query"),
        ("No valid credential sources found", CredentialsError, "terraform apply: No valid credential sources found"),
    ],
)
def test_a_failure_says_who_must_act(tmp_path: Path, said: str, kind: type[GpucloudError], message: str) -> None:
    error = failure("apply", (said,), tmp_path / "log", explained)
    assert type(error) is kind
    assert error.message.startswith(message)
    assert error.hint


def test_versions_of_the_record_that_are_torn_are_no_record(module: Path, store: DirectoryStore) -> None:
    apply(stack(module, store), "a")
    store.put("terraform/digits/applied.json", b"{")
    store.put("terraform/digits/run.json", b"")
    other = stack(module, store, "other")
    assert apply(other, "a") == "a"
    assert logs(other) == ["000001-init.jsonl", "000002-apply.jsonl"]
