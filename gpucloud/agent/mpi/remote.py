"""What mpirun calls in SSH's place: hands one command to the head and waits for its exit code."""

from __future__ import annotations

import json
import os
import socket

from gpucloud.agent.mpi.head import SOCKET


def call(host: str, words: list[str]) -> int:
    """Return the exit code of the command on that node; 255, as SSH does, when it was not reached."""
    os.chdir(os.environ["GPUCLOUD_MPI_FOLDER"])
    with socket.socket(socket.AF_UNIX) as desk:
        desk.connect(SOCKET)
        desk.sendall(json.dumps({"host": host, "words": words}).encode() + b"\n")
        with desk.makefile("rb") as lines:
            answer = lines.readline()
    return int(answer) if answer else 255
