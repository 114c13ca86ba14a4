"""A node's first boot: it publishes its SSH host key under its role's own name, and ends itself if no agent ever comes.

    python3 -I - s3://bucket/prefix CLUSTER REGION       as root, from the user data; standard library, Python >= 3.8

The key's object is `clusters/<cluster>/hosts/<role id>:<instance id>`: its role may write under that name only, so
that no other machine can speak for this one. AWS_ENDPOINT_URL and AWS_EC2_METADATA_SERVICE_ENDPOINT are honoured;
GPUCLOUD_HOST_KEY_FILE, GPUCLOUD_PUBLISH_S and GPUCLOUD_DEAD_MAN_S move the file and the two limits. Nothing secret is
printed: of an answer of AWS, its status and its error code only.
"""

import hashlib
import hmac
import http.client
import json
import os
import random
import re
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from urllib.parse import quote, urlsplit

PUBLISH_S = 300.0  # a new role's keys, and what they may do, take some minutes to be known everywhere
DEAD_MAN_S = 1800.0
HOST_KEY_FILE = "/etc/ssh/ssh_host_ed25519_key.pub"


class NotYet(Exception):
    """Worth another try."""


def main(store, cluster, region):
    watch_for_agent()
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
            return 0
        time.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, 20.0)


def publish(store, cluster, region):
    """Put the key into the store; return its name there."""
    keys, instance_id = own_keys()
    role_id, _, session = caller(keys, region).partition(":")
    if session != instance_id:
        raise NotYet("the role's session is not this instance's")
    line = " ".join(Path(os.environ.get("GPUCLOUD_HOST_KEY_FILE", HOST_KEY_FILE)).read_text().split()[:2])
    bucket, _, prefix = store[len("s3://") :].partition("/")
    key = "/".join(part for part in (prefix.strip("/"), "clusters", cluster, "hosts") if part)
    key += "/" + role_id + ":" + instance_id
    put(bucket, key, (line + "\n").encode(), keys, region)
    return key


def put(bucket, key, body, keys, region):
    status, headers, text = exchange("PUT", object_url(bucket, key, region), body, keys, (region, "s3"))
    elsewhere = headers.get("x-amz-bucket-region")
    if status not in (200, 204) and elsewhere not in (None, region):
        status, _, text = exchange("PUT", object_url(bucket, key, elsewhere), body, keys, (elsewhere, "s3"))
    if status not in (200, 204):
        raise NotYet("S3 " + explained(status, text))


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
    status, _, text = exchange("POST", url.rstrip("/") + "/", body, keys, (region, "sts"))
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
    status, _, text = send(method, endpoint.rstrip("/") + path, b"", headers)
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
        return reply.status, told, reply.read(65536).decode("utf-8", "replace")
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


def watch_for_agent():
    """Leave a process behind that powers the machine off if no agent was ever started on it.

    The cloud's schedule is the first to end a machine; this is for one that nobody could reach while the schedule was
    renewed. Once an agent was there it keeps the time itself. After a restart nobody watches: the schedule does.
    """
    if os.fork():
        return
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # the log of the first boot ends with it, not with us
        os.dup2(nothing, number)
    started = time.time()
    deadline = time.monotonic() + float(os.environ.get("GPUCLOUD_DEAD_MAN_S", DEAD_MAN_S))
    while time.monotonic() < deadline:
        if agent_came(started):
            os._exit(0)
        time.sleep(max(0.0, min(20.0, deadline - time.monotonic())))
    if not agent_came(started):
        subprocess.call(["shutdown", "-h", "now"])
    os._exit(0)


def agent_came(started):
    """Whether an agent was started on this machine: one that an image was made with does not count."""
    homes = (Path.home(), *Path("/home").glob("*"))
    marks = [home / ".gpucloud" / "agent" / "agent.json" for home in homes]
    return any(mark.exists() and mark.stat().st_mtime > started - 600 for mark in marks)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
