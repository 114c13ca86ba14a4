"""A stand-in for a node's SSH server: greets as one, and ends with everything below it when its parent dies."""

import argparse
import os
import signal
import socket
import threading

from gpucloud.system import processes

parser = argparse.ArgumentParser()
for option in ("--host-key", "--authorized-keys", "--home"):
    parser.add_argument(option, required=True)
for option in ("--fd", "--parent-pipe"):
    parser.add_argument(option, type=int, required=True)
options = parser.parse_args()


def end_with_parent():
    os.read(options.parent_pipe, 1)
    processes.kill_below(os.getpid())
    os._exit(0)


processes.adopt_orphans()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans are reaped by the kernel
threading.Thread(target=end_with_parent, daemon=True).start()
listener = socket.socket(fileno=options.fd)
while True:
    connection, _ = listener.accept()
    connection.sendall(b"SSH-2.0-standin\r\n")
    connection.close()
