"""A node's first boot: it publishes its SSH host key under its role's own name, makes itself fit for its job where its
cluster has a record, and ends itself if nobody ever comes.

    first_boot.py s3://bucket/prefix CLUSTER REGION      as root, from the user data; standard library, Python >= 3.8
    first_boot.py end                                    the same machine's, before it powers itself off

The key's object is `clusters/<cluster>/hosts/<role id>:<instance id>`: its role may write under that name only, so
that no other machine can speak for this one. Then, if there is `clusters/<cluster>/node.json`, the package that it
names is fetched, proven, and run in the background as the record's login (log: ~/.gpucloud/bootstrap.log); whatever
goes wrong with that is the supervisor's to mend. AWS_ENDPOINT_URL and AWS_EC2_METADATA_SERVICE_ENDPOINT are honoured;
GPUCLOUD_HOST_KEY_FILE, and GPUCLOUD_PUBLISH_S, _DEAD_MAN_S and _END_S, move the file and the limits. Nothing secret is
printed: of an answer of AWS, its status and its error code only.
"""

import hashlib
import hmac
import http.client
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote, urlsplit

PUBLISH_S = 300.0  # a new role's keys, and what they may do, take some minutes to be known everywhere
DEAD_MAN_S = 1800.0
END_S = 40.0
FETCH_S = 60.0
LARGEST = 256 << 20
HOST_KEY_FILE = "/etc/ssh/ssh_host_ed25519_key.pub"


class NotYet(Exception):
    """Worth another try."""


class Torn(NotYet):
    """No other try would help."""


def main(store, cluster, region):
    Path(__file__).with_name("first_boot.json").write_text(json.dumps([store, cluster, region]))
    watch_for_agent(store, cluster, region)
    deadline = time.monotonic() + float(os.environ.get("GPUCLOUD_PUBLISH_S", PUBLISH_S))
    pause = 0.5
    while True:
        try:
            print("gpucloud: the host key is published as " + publish(store, cluster, region))
        except (NotYet, OSError, http.client.HTTPException, ValueError, KeyError) as error:
            reason = str(error) if isinstance(error, NotYet) else type(error).__name__
            if time.monotonic() + pause > deadline:
                print("gpucloud: the host key is not published: " + reason)
                return 1
        else:
            make_fit(store, cluster, region)
            return 0
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, 20.0)


def end(store, cluster, region):
    """Lower this machine's group to nothing, so that no other is started in place of one that powers itself off.

    Not while the job's state says that they are paid for: this one was only not told, and its peers work on.
    """
    deadline = time.monotonic() + float(os.environ.get("GPUCLOUD_END_S", END_S))
    while True:
        try:
            lower(store, cluster, region)
        except (NotYet, OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            reason = str(error) if isinstance(error, NotYet) else type(error).__name__
            if time.monotonic() > deadline or isinstance(error, Torn):
                print("gpucloud: the group is not lowered: " + reason)
                return 1
        else:
            return 0
        time.sleep(5)


def lower(store, cluster, region):
    keys, _ = own_keys()
    bucket, below = place(store)
    state = get(bucket, below + "jobs/" + cluster[len("gpucloud-") :] + "/state.json", keys, region) or b""
    paid = re.search('"paid_until": ?"([^"]+)"', state.decode("utf-8", "replace"))
    if paid and datetime.fromisoformat(paid.group(1).replace("Z", "+00:00")) > datetime.now(timezone.utc):
        return
    url = os.environ.get("AWS_ENDPOINT_URL") or "https://autoscaling." + region + "." + domain(region)
    asked = "Action=SetDesiredCapacity&Version=2011-01-01&DesiredCapacity=0&HonorCooldown=false&AutoScalingGroupName="
    body = (asked + quote(cluster, safe="")).encode()
    status, _, said = exchange("POST", url.rstrip("/") + "/", body, keys, (region, "autoscaling"))
    if status != 200:
        reason = "Auto Scaling " + explained(status, said.decode("utf-8", "replace"))
        raise NotYet(reason) if status >= 500 or "Thrott" in reason else Torn(reason)


def make_fit(store, cluster, region):
    """Start this machine's own bootstrap, if its cluster has a record; say what became of that."""
    deadline = time.monotonic() + FETCH_S
    while True:
        try:
            fetched = fetch(store, cluster, region)
            break
        except (NotYet, OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            reason = str(error) if isinstance(error, NotYet) else type(error).__name__
            if time.monotonic() > deadline or isinstance(error, Torn):
                print("gpucloud: not made fit by itself: " + reason)
                return
        time.sleep(2)
    if fetched is not None:
        print("gpucloud: makes itself fit; see ~/.gpucloud/bootstrap.log of " + fetched[0])
        sys.stdout.flush()
        start(*fetched)


def fetch(store, cluster, region):
    """Return the login, the package, and what that reads on standard input; None without a record."""
    keys, _ = own_keys()
    bucket, below = place(store)
    text = get(bucket, below + "clusters/" + cluster + "/node.json", keys, region)
    if text is None:
        return None
    record = json.loads(text.decode())
    package = get(bucket, below + record["package"]["key"], keys, region)
    if package is None or hashlib.sha256(package).hexdigest() != record["package"]["sha256"]:
        raise Torn("the package in the store is not the one that the record names")
    code = get(bucket, below + record["code"]["key"], keys, region) if record["code"] else b""
    if code is None:
        raise Torn("the code that the record names is not in the store")
    return str(record["login"]), package, text.replace(b"\n", b" ") + b"\n" + code


def start(login, package, given):
    """Run the package's bootstrap as the login, detached; one that is killed is run again, a few times."""
    if os.fork():
        return
    detach()
    folder = Path(tempfile.mkdtemp(prefix="gpucloud-"))
    path = folder / "gpucloud.zip"
    path.write_bytes(package)
    for place in (folder, path):  # the login reads it; only root writes
        place.chmod(0o755)
    logged = 'umask 022; mkdir -p -m 700 ~/.gpucloud; exec "$@" >>~/.gpucloud/bootstrap.log 2>&1'
    python = os.environ.get("GPUCLOUD_PYTHON", "python3")
    command = ["sudo", "-n", "-H", "-u", login, "--", "sh", "-c", logged, "sh", python, "-I", str(path), "bootstrap"]
    for _ in range(5):
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            process.communicate(given)
        except OSError:
            process.wait()
        if process.returncode not in (-9, 137):
            break
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def publish(store, cluster, region):
    """Put the key into the store; return its name there."""
    keys, instance_id = own_keys()
    role_id, _, session = caller(keys, region).partition(":")
    if session != instance_id:
        raise NotYet("the role's session is not this instance's")
    line = " ".join(Path(os.environ.get("GPUCLOUD_HOST_KEY_FILE", HOST_KEY_FILE)).read_text().split()[:2])
    bucket, below = place(store)
    key = below + "clusters/" + cluster + "/hosts/" + role_id + ":" + instance_id
    status, said = in_s3("PUT", bucket, key, (line + "\n").encode(), keys, region)
    if status not in (200, 204):
        raise NotYet("S3 " + explained(status, said.decode("utf-8", "replace")))
    return key


def place(store):
    """Return the store's bucket, and its prefix with a slash."""
    bucket, _, prefix = store[len("s3://") :].partition("/")
    return bucket, prefix.strip("/") + "/" if prefix.strip("/") else ""


def get(bucket, key, keys, region):
    """Return the object's bytes; None when there is none: a role that may not list is told 403, not 404."""
    status, body = in_s3("GET", bucket, key, b"", keys, region)
    if status not in (200, 403, 404):
        raise NotYet("S3 " + explained(status, body.decode("utf-8", "replace")))
    return body if status == 200 else None


def in_s3(method, bucket, key, body, keys, region):
    status, headers, said = exchange(method, object_url(bucket, key, region), body, keys, (region, "s3"))
    elsewhere = headers.get("x-amz-bucket-region")
    if status not in (200, 204) and elsewhere not in (None, region):
        status, _, said = exchange(method, object_url(bucket, key, elsewhere), body, keys, (elsewhere, "s3"))
    return status, said


def object_url(bucket, key, region):
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    path = quote(key, safe="/-_.~")
    if endpoint:
        return endpoint.rstrip("/") + "/" + bucket + "/" + path
    host = "s3." + region + "." + domain(region)
    if "." in bucket:  # no certificate is valid for a host name with a dotted bucket in front
        return "https://" + host + "/" + bucket + "/" + path
    return "https://" + bucket + "." + host + "/" + path


def caller(keys, region):
    """Return the caller's user id, `<role id>:<instance id>` for an instance's role; only STS knows the role's id."""
    url = os.environ.get("AWS_ENDPOINT_URL") or "https://sts." + region + "." + domain(region)
    body = b"Action=GetCallerIdentity&Version=2011-06-15"
    status, _, said = exchange("POST", url.rstrip("/") + "/", body, keys, (region, "sts"))
    text = said.decode("utf-8", "replace")
    found = re.search("<UserId>([^<]+)</UserId>", text)
    if status != 200 or found is None:
        raise NotYet("STS " + explained(status, text))
    return found.group(1)


def domain(region):
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"


def explained(status, text):
    code = re.search("<Code>([A-Za-z0-9.]+)</Code>", text)
    return f"answered {status} {code.group(1) if code else ''}"


def own_keys():
    """Return the role's keys and the instance's id, from the metadata service (version 2)."""
    token = metadata("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "300"})
    head = {"X-aws-ec2-metadata-token": token}
    base = "/latest/meta-data/"
    roles = base + "iam/security-credentials/"
    keys = json.loads(metadata("GET", roles + metadata("GET", roles, head).split()[0], head))
    if keys.get("Code") != "Success":
        raise NotYet("the role has no keys yet")
    return keys, metadata("GET", base + "instance-id", head).strip()


def metadata(method, path, headers):
    endpoint = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254"
    status, _, said = send(method, endpoint.rstrip("/") + path, b"", headers)
    text = said.decode("utf-8", "replace")
    if status != 200 or not text.strip():
        raise NotYet(f"the metadata service answered {status}")
    return text


def exchange(method, url, body, keys, scope):
    return send(method, url, body, signed(method, url, body, keys, scope))


def send(method, url, body, headers):
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=10)
    try:
        connection.request(method, parts.path, body or None, headers)
        reply = connection.getresponse()
        told = {name.lower(): value for name, value in reply.getheaders()}
        return reply.status, told, reply.read(LARGEST)
    finally:
        connection.close()


def signed(method, url, body, keys, scope, now=None):
    """Return the headers of a request in AWS's Signature Version 4; `scope` is the region and the service."""
    now = now or datetime.now(timezone.utc)
    parts, day, digest = urlsplit(url), now.strftime("%Y%m%d"), hashlib.sha256(body).hexdigest()
    headers = {"host": parts.netloc, "x-amz-content-sha256": digest, "x-amz-date": now.strftime("%Y%m%dT%H%M%SZ")}
    if method == "POST":
        headers["content-type"] = "application/x-www-form-urlencoded; charset=utf-8"
    if keys.get("Token"):
        headers["x-amz-security-token"] = keys["Token"]
    names = sorted(headers)
    lines = "".join(f"{name}:{headers[name]}\n" for name in names)
    canonical = "\n".join([method, parts.path, "", lines, ";".join(names), digest])
    words = (day, *scope, "aws4_request")
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", headers["x-amz-date"], "/".join(words), hashed])
    secret = ("AWS4" + keys["SecretAccessKey"]).encode()
    for word in words:
        secret = hmac.new(secret, word.encode(), hashlib.sha256).digest()
    signature = hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()
    credential = "/".join((keys["AccessKeyId"], *words))
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return headers


def watch_for_agent(store, cluster, region):
    """Leave a process behind that powers the machine off if no supervisor ever had an agent on it, its group first.

    The cloud's schedule is the first to end a machine; this is for one that nobody could reach while the schedule was
    renewed. Once an agent was there it keeps the time itself. After a restart nobody watches: the schedule does.
    """
    if os.fork():
        return
    detach()
    started = time.time()
    deadline = time.monotonic() + float(os.environ.get("GPUCLOUD_DEAD_MAN_S", DEAD_MAN_S))
    while time.monotonic() < deadline:
        if agent_came(started):
            os._exit(0)
        time.sleep(max(0.0, min(20.0, deadline - time.monotonic())))
    if not agent_came(started):
        end(store, cluster, region)
        subprocess.call(["shutdown", "-h", "now"])
    os._exit(0)


def detach():
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # the log of the first boot ends with it, not with us
        os.dup2(nothing, number)


def agent_came(started):
    """Whether an agent was started on this machine and a supervisor was here; what an image brought does not count.

    The machine's own bootstrap starts an agent too, which nobody told how long the machine is paid for.
    """
    folders = [home / ".gpucloud" / "agent" for home in (Path.home(), *Path("/home").glob("*"))]
    return any(is_new(folder / "agent.json", started) and is_new(folder / "visited", started) for folder in folders)


def is_new(mark, started):
    return mark.exists() and mark.stat().st_mtime > started - 600


if __name__ == "__main__":
    if sys.argv[1] == "end":
        sys.exit(end(*json.loads(Path(__file__).with_name("first_boot.json").read_text())))
    sys.exit(main(*sys.argv[1:]))
