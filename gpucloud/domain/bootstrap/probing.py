"""Asking a node for its facts, and putting the package there that answers."""

from __future__ import annotations

from gpucloud.domain.bootstrap.facts import Asked
from gpucloud.domain.bootstrap.wanted import Wanted
from gpucloud.domain.codec import to_json

PROBE_LIMIT_S = 120.0
"""How long facts may take: an nvidia-smi that does not answer is a fact, and has a minute of its own (`smi`)."""

# $1 is the package's SHA-256, $2 the agent's folder from the home; the question comes on standard input. One round trip
# answers everything; a package that cannot run (a damaged disk) is as good as none.
PROBE = """\
py="${GPUCLOUD_PYTHON:-python3}"; root="$HOME/$2"; zip="$root/lib/gpucloud-$1.zip"
command -v "$py" >/dev/null || { echo '{"python": null, "version": null}'; exit 0; }
[ -f "$zip" ] && "$py" "$zip" facts --root "$root" && exit 0
exec "$py" -c 'import sys, json; print(json.dumps({"python": sys.executable, "version": sys.version_info[:3]}))'
"""

# The rename comes after the hash: a connection that breaks in the middle leaves no package behind.
_RECEIVE = """\
import hashlib, os, sys
data = sys.stdin.buffer.read()
if hashlib.sha256(data).hexdigest() != sys.argv[1]:
    sys.exit("the package arrived torn")
folder = os.path.join(os.path.expanduser("~"), sys.argv[2], "lib")
os.makedirs(folder, mode=0o700, exist_ok=True)
path = os.path.join(folder, "gpucloud-%s.zip" % sys.argv[1])
with open("%s.%d" % (path, os.getpid()), "wb") as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
os.replace(file.name, path)
"""


def probe(sha256: str, root: str) -> tuple[str, ...]:
    """Return the command that answers with facts, if the package with this hash is there; `question` is its input.

    `root` is the agent's folder, from the login's home (`Node.root`).
    """
    return ("/bin/sh", "-c", PROBE, "sh", sha256, root)


def question(wanted: Wanted, *, visit: bool = True) -> bytes:
    """Return what the node is asked for this job; `visit` says that a supervisor asks."""
    data = tuple(one.key for one in wanted.data)
    image = wanted.image.reference if wanted.image else ""
    return to_json(Asked(layer=wanted.layer, data=data, image=image, visit=visit)).encode()


def ship(python: str, sha256: str, root: str) -> tuple[str, ...]:
    """Return the command that puts the package, its standard input, on the node, whole or not at all."""
    return (python, "-c", _RECEIVE, sha256, root)


def awaiting(python: str, root: str, sha256: str) -> tuple[str, ...]:
    """Return the command that ends when the node's own bootstrap has ended."""
    return (python, package_path(root, sha256), "await", "--root", root)


def package_path(root: str, sha256: str) -> str:
    """Return where the package lies below the agent's root."""
    return f"{root}/lib/gpucloud-{sha256}.zip"
