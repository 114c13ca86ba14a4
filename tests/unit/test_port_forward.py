"""What `gpucloud ssh JOB -L` takes."""

from __future__ import annotations

import socket

import pytest

from gpucloud.adapters.ssh.terminal import listening
from gpucloud.cli.commands.reaching import port_forward
from gpucloud.domain.errors import UsageError
from gpucloud.ports import PortForward


@pytest.mark.parametrize(
    ("written", "bind", "port", "host", "host_port"),
    [
        ("6006", "127.0.0.1", 6006, "localhost", 6006),
        ("8000:localhost:6006", "127.0.0.1", 8000, "localhost", 6006),
        ("8000:10.0.0.7:6006", "127.0.0.1", 8000, "10.0.0.7", 6006),
        ("0.0.0.0:8000:localhost:6006", "0.0.0.0", 8000, "localhost", 6006),
        ("[::1]:8000:[fd00::7]:6006", "::1", 8000, "fd00::7", 6006),
    ],
)
def test_a_port_is_written_as_for_ssh_or_as_its_number(written: str, bind: str, port: int, host: str, host_port: int):
    assert port_forward(written) == PortForward(bind=bind, port=port, host=host, host_port=host_port)


@pytest.mark.parametrize(
    "written", ["", "http", "6006:", "6006:localhost", "6006:localhost:http", "0", "65536", "1:h:0"]
)
def test_what_is_no_port_is_refused_with_the_way_to_write_one(written: str):
    with pytest.raises(UsageError) as refused:
        port_forward(written)
    assert refused.value.hint == "-L 6006:localhost:6006, or -L 6006 for the same"


@pytest.mark.parametrize(
    ("taken", "hint"),
    [
        (PortForward(bind="127.0.0.1", port=8000, host="localhost", host_port=80), "-L 8001:localhost:80"),
        (PortForward(bind="127.0.0.1", port=65535, host="::1", host_port=80), "-L 11023:[::1]:80"),
        (PortForward(bind="::1", port=8000, host="h", host_port=80), "-L [::1]:8001:h:80"),
        (PortForward(bind="127.0.0.1", port=80, host="h", host_port=80), "-L 10080:h:80"),
    ],
)
def test_another_port_is_offered_as_it_is_written(taken: PortForward, hint: str, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_args: object, **_options: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(UsageError) as refused, listening(taken, lambda _: None):
        pass
    assert refused.value.hint == f"another port of this machine: {hint}"
    option = hint.removeprefix("-L ")
    assert port_forward(option).host_port == 80
