"""What every Shell does: the fake, paramiko against the embedded node of both tiers, paramiko against OpenSSH."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpucloud.adapters.ssh.shell import SshShell
from gpucloud.domain.errors import HostUnreachable, UsageError
from gpucloud.domain.node.node import Node
from gpucloud.ports import Host, Shell
from tests.fakes.nodes import embedded_server, node_at, openssh_server
from tests.fakes.shell import FakeShell
from tests.standins.own_spaces import spaces


@dataclass(frozen=True)
class Case:
    shell: Shell
    node: Node
    nobody: Node  # a node that does not answer


OPENSSH = [pytest.mark.slow, pytest.mark.engine(name="openssh")]


@pytest.fixture(scope="module", params=["fake", "embedded", "embedded-a", pytest.param("openssh", marks=OPENSSH)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    folder = tmp_path_factory.mktemp("node")
    if request.param == "fake":
        fake = FakeShell(folder)
        fake.unreachable.add("nobody")
        yield Case(fake, node_at(22, None), node_at(22, None, name="nobody"))
        return
    if request.param == "embedded-a":
        with spaces(folder) as one:
            (node,) = one.size(1)
            yield Case(one.shell, node, node_at(1, node.host_key, name="nobody"))
        return
    with (embedded_server if request.param == "embedded" else openssh_server)(folder) as server:
        patient = SshShell(server.key_file)
        patient.host(server.node)  # the server is up from here on
        patient.close()
        shell = SshShell(server.key_file, connect_timeout_s=3, python=sys.executable)
        yield Case(shell, server.node, node_at(1, server.node.host_key, name="nobody"))
        shell.close()


@pytest.fixture
def host(case: Case) -> Host:
    return case.shell.host(case.node)


def test_exit_code_and_both_streams_come_back(host: Host):
    completed = host.run(("sh", "-c", "printf out; printf err >&2; exit 7"))
    assert (completed.exit_code, completed.stdout, completed.stderr) == (7, b"out", b"err")


def test_commands_start_in_the_home_folder(host: Host):
    completed = host.run(("sh", "-c", 'test "$(pwd -P)" = "$(cd "$HOME" && pwd -P)"'))
    assert completed.exit_code == 0


def test_unknown_program_is_exit_code_127(host: Host):
    assert host.run(("no-such-program-here",)).exit_code == 127


def test_death_by_signal_is_128_plus_its_number(host: Host):
    assert host.run(("sh", "-c", "kill -TERM $$")).exit_code == 143


words = st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20), min_size=20)


@settings(max_examples=25)
@given(hostile=words)
def test_hostile_words_arrive_byte_for_byte(case: Case, hostile: list[str]):
    fixed = ["", "'", '"; rm -rf /', "$(id)", "`id`", "a\nb", "\\", "*", "~", "!!", "-n", "\r\x1b[0m", "caf\udce9"]
    sent = tuple(fixed + hostile)
    completed = case.shell.host(case.node).run(("printf", "%s\\0", *sent))
    assert completed.stdout == b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in sent)


def test_word_with_a_nul_is_refused(case: Case):
    if not isinstance(case.shell, FakeShell):
        with pytest.raises(UsageError):
            case.shell.host(case.node).run(("echo", "a\0b"))


def test_megabytes_go_in_while_they_come_out(host: Host):
    data = bytes(range(256)) * (1 << 15)
    assert host.run(("cat",), stdin=data).stdout == data


def test_command_need_not_read_its_input(host: Host):
    assert host.run(("true",), stdin=b"x" * (8 << 20)).exit_code == 0


def test_stderr_alone_may_be_long(host: Host):
    completed = host.run(("sh", "-c", "head -c 5000000 /dev/zero >&2; exit 3"))
    assert (completed.exit_code, len(completed.stderr)) == (3, 5_000_000)


def test_command_that_does_not_end_is_given_up(host: Host):
    with pytest.raises(HostUnreachable, match="did not end within"):
        host.run(("sleep", "60"), timeout_s=0.3)
    assert host.run(("true",)).exit_code == 0


def test_more_commands_at_once_than_a_server_has_channels(host: Host):
    codes: list[int] = []

    def one(number: int) -> None:
        codes.append(host.run(("sh", "-c", f"sleep 0.1; exit {number}")).exit_code)

    together([lambda number=number: one(number) for number in range(24)])
    assert sorted(codes) == list(range(24))


def test_a_renewed_host_logs_in_anew_and_ends_nothing_that_goes_on(host: Host):
    codes: list[int] = []
    begun = threading.Event()

    def goes_on() -> None:
        begun.set()
        codes.append(host.run(("sh", "-c", "sleep 0.3; exit 5")).exit_code)

    thread = threading.Thread(target=goes_on)
    thread.start()
    begun.wait()
    host.renew()
    assert host.run(("true",)).exit_code == 0
    thread.join()
    assert codes == [5]


def test_closed_host_opens_itself_again(host: Host):
    host.close()
    assert host.run(("true",)).exit_code == 0


def test_node_that_nobody_answers_for_is_unreachable(case: Case):
    with pytest.raises(HostUnreachable, match="nobody"):
        case.shell.host(case.nobody)


def test_shell_gives_the_same_node_again(case: Case):
    assert case.shell.host(case.node).node == case.node


def together(work: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=one) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def read(tree: str | Path) -> dict[str, str]:
    return {str(p.relative_to(tree)): p.read_text() for p in sorted(Path(tree).rglob("*")) if p.is_file()}


# Every server here shares the test's file system, so a remote absolute path can be looked at.


@pytest.fixture
def target(tmp_path: Path) -> str:
    return str(tmp_path / "remote")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return write(tmp_path / "code", {"train.py": "print()", "pkg/model.py": "x = 1", "data/big.bin": "0" * 100_000})


def test_sync_makes_an_equal_tree_named_by_its_content(host: Host, code: Path, target: str):
    path = host.sync(code, target)
    assert path.startswith(f"{target}/")
    assert len(path.removeprefix(f"{target}/")) == 64
    assert read(path) == read(code)
    assert host.sync(code, target) == path


def test_sync_keeps_programs_links_empty_folders_and_times(host: Host, code: Path, target: str):
    script = code / "run.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    (code / "link").symlink_to("pkg/model.py")
    (code / "out").mkdir()
    tree = Path(host.sync(code, target))
    assert (tree / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (tree / "train.py").stat().st_mode & 0o777 == 0o644
    assert (tree / "link").readlink() == Path("pkg/model.py")
    assert (tree / "out").is_dir()
    assert (tree / "train.py").stat().st_mtime_ns == (code / "train.py").stat().st_mtime_ns


def test_sync_leaves_ignored_files_at_home(host: Host, code: Path, target: str):
    write(code, {".gitignore": "*.bin\n*.env\n", ".gpucloudignore": "!ship.env\nnotes/\n"})
    write(code, {"secret.env": "s", "ship.env": "e", "notes/a": "n", ".git/config": "g", "pkg/__pycache__/m.pyc": "c"})
    shipped = read(host.sync(code, target))
    assert set(shipped) == {".gitignore", ".gpucloudignore", "train.py", "pkg/model.py", "ship.env"}


def test_changed_tree_is_a_new_one_and_the_old_one_stays(host: Host, code: Path, target: str):
    before = host.sync(code, target)
    old = read(code)
    write(code, {"train.py": "print(2)", "new.py": ""})
    (code / "pkg/model.py").unlink()
    after = host.sync(code, target)
    assert (read(after), read(before)) == (read(code), old)


def test_sync_puts_right_what_a_job_changed_and_leaves_what_it_added(host: Host, code: Path, target: str):
    tree = Path(host.sync(code, target))
    write(tree, {"results/loss.csv": "1", "train.py": "broken"})
    (tree / "pkg/model.py").unlink()
    (tree / "pkg").rmdir()
    (tree / "pkg").symlink_to("/tmp")
    host.sync(code, str(target))
    assert read(tree) == {**read(code), "results/loss.csv": "1"}
    assert not (tree / "pkg").is_symlink()


def test_hostile_file_names_arrive(host: Host, code: Path, target: str):
    names = ["a b", "-rf", "$(id)", "`", "'", '"', "a\nb", "\\", "*", "é", "~", "a" * 200, "caf\udce9"]
    write(code, {f"{name}/{name}": name.encode("utf-8", "replace").decode() for name in names})
    assert read(host.sync(code, target)) == read(code)


def test_two_syncs_at_once_end_in_one_tree(host: Host, code: Path, target: str):
    paths: list[str] = []
    together([lambda: paths.append(host.sync(code, target))] * 4)
    assert len(set(paths)) == 1
    assert len(paths) == 4
    assert read(paths[0]) == read(code)


def test_only_the_newest_trees_are_kept(host: Host, code: Path, target: str):
    paths = []
    for number in range(6):
        write(code, {"train.py": str(number)})
        paths.append(Path(host.sync(code, target)))
    assert [path.exists() for path in paths] == [False, False, True, True, True, True]
    assert {path.name for path in (Path(target) / ".manifests").iterdir()} == {path.name for path in paths[2:]}
    assert list((Path(target) / ".incoming").iterdir()) == []
