"""The AWS CLI's `ssm start-session`, and the mark of its plugin: what SSH goes through to a machine without an address.

It asks AWS for the session as the real one does, with the keys of its environment, and joins SSH to the stream; when
SSH goes, it ends the session.
"""

from __future__ import annotations

import sys
from pathlib import Path

_AWS = """#!{python}
import os, signal, socket, sys, threading
from urllib.parse import urlsplit
import boto3

signal.signal(signal.SIGHUP, signal.SIG_IGN)  # ssh sends it when it is through; the session is to be ended all the same
words = sys.argv[1:]
if words[:2] != ["ssm", "start-session"]:
    sys.exit("this stands for `aws ssm start-session` alone")
said = dict(zip(words[2::2], words[3::2]))
key, _, value = said["--parameters"].partition("=")
ssm = boto3.client("ssm", region_name=said["--region"])
session = ssm.start_session(
    Target=said["--target"], DocumentName=said["--document-name"], Parameters={{key: [value]}}
)
stream = urlsplit(session["StreamUrl"])


def out():
    while data := os.read(0, 65536):
        joined.sendall(data)
    joined.shutdown(socket.SHUT_WR)


try:
    joined = socket.create_connection((stream.hostname, stream.port), 10)
    joined.settimeout(None)
    threading.Thread(target=out, daemon=True).start()
    while data := joined.recv(65536):
        os.write(1, data)
except OSError as error:
    print(error, file=sys.stderr)
finally:
    ssm.terminate_session(SessionId=session["SessionId"])
os._exit(0)
"""


def install(folder: Path) -> Path:
    """Write both programs into the folder, which is to be first on PATH, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("aws", _AWS.format(python=sys.executable)), ("session-manager-plugin", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder
