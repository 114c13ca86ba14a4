"""What was asked of the emulated AWS: one Call for each request, read from the request in its own protocol."""

from __future__ import annotations

import dataclasses
import json
import re
import time
import urllib.parse
from dataclasses import dataclass
from typing import Any

_SCOPE = re.compile(r"Credential=([^/]+)/\d+/([\w-]+)/([\w-]+)/aws4_request")
_BUCKET_PARTS = {
    "versioning": "BucketVersioning",
    "encryption": "BucketEncryption",
    "publicAccessBlock": "PublicAccessBlock",
    "policy": "BucketPolicy",
    "tagging": "BucketTagging",
    "lifecycle": "BucketLifecycleConfiguration",
    "ownershipControls": "BucketOwnershipControls",
    "location": "BucketLocation",
    "acl": "BucketAcl",
    "cors": "BucketCors",
    "versions": "ObjectVersions",
    "uploads": "MultipartUploads",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. `status` is what was answered; 0: the reply was lost on its way."""

    at: float  # seconds since the epoch
    service: str
    action: str
    params: dict[str, Any]
    region: str
    key: str  # the access key that signed
    agent: str
    status: int = -1
    code: str = ""  # of an error that the lab put in

    def line(self) -> str:
        """Return the call as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), default=str)


def read(environ: dict[str, Any], body: bytes) -> Call:
    """Return the call that a request is."""
    scope = _SCOPE.search(environ.get("HTTP_AUTHORIZATION", ""))
    key, region, service = scope.groups() if scope else ("", "us-east-1", "")
    service = service or _unsigned(environ, body)
    action, params = _action(environ, body, service)
    return Call(
        at=time.time(), service=service, action=action, params=params, region=region, key=key,
        agent=environ.get("HTTP_USER_AGENT", ""),
    )  # fmt: skip


def _unsigned(environ: dict[str, Any], body: bytes) -> str:
    return "sts" if b"Action=AssumeRole" in body else "s3"


def _action(environ: dict[str, Any], body: bytes, service: str) -> tuple[str, dict[str, Any]]:
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    if target:
        return target.rsplit(".", 1)[-1], _json(body)
    if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        form = dict(urllib.parse.parse_qsl(body.decode(), keep_blank_values=True))
        return form.pop("Action", "?"), form
    path, query = environ.get("PATH_INFO", "/"), environ.get("QUERY_STRING", "")
    asked = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    if service == "s3":
        bucket, _, key = path.lstrip("/").partition("/")
        return _s3(environ["REQUEST_METHOD"], bucket, key, asked), {"Bucket": bucket, "Key": key, **asked}
    return f"{environ['REQUEST_METHOD']} {path}", {**asked, **_json(body)}


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _s3(method: str, bucket: str, key: str, asked: dict[str, str]) -> str:
    if not bucket:
        return "ListBuckets"
    verb = {"GET": "Get", "PUT": "Put", "DELETE": "Delete", "HEAD": "Head", "POST": "Post"}.get(method, method)
    if key:
        return _s3_object(verb, asked)
    for part, name in _BUCKET_PARTS.items():
        if part in asked:
            return f"{'List' if part in {'versions', 'uploads'} else verb}{name}"
    if "delete" in asked:
        return "DeleteObjects"
    return {"Get": "ListObjectsV2", "Put": "CreateBucket", "Head": "HeadBucket"}.get(verb, f"{verb}Bucket")


def _s3_object(verb: str, asked: dict[str, str]) -> str:
    if "uploadId" in asked:
        names = {"Put": "UploadPart", "Post": "CompleteMultipartUpload", "Delete": "AbortMultipartUpload"}
        return names.get(verb, "ListParts")
    if "uploads" in asked:
        return "CreateMultipartUpload"
    return f"{verb}ObjectTagging" if "tagging" in asked else f"{verb}Object"
