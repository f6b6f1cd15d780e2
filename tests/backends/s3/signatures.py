"""Whether a request was signed with a key: AWS Signature Version 4, as its reader sees it.

https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
import re
from urllib.parse import urlsplit

from fault_proxy import Seen

__all__ = ["key_of", "signed_with"]

_FIELDS = re.compile(r"AWS4-HMAC-SHA256 Credential=([^/]+)/([^,]+), ?SignedHeaders=([^,]+), ?Signature=([0-9a-f]{64})")


def key_of(seen: Seen) -> str:
    """The access key id that the request names; empty if it names none."""
    found = _FIELDS.fullmatch(seen.headers.get("authorization", ""))
    return found[1] if found else ""


def signed_with(seen: Seen, secret: str) -> bool:
    """Whether the request's signature was made with `secret`."""
    found = _FIELDS.fullmatch(seen.headers.get("authorization", ""))
    if found is None:
        return False
    _, scope, names, signature = found.groups()
    parts = urlsplit(seen.target)
    query = "&".join(sorted(f"{pair}" if "=" in pair else f"{pair}=" for pair in parts.query.split("&") if pair))
    headers = "".join(f"{name}:{' '.join(seen.headers[name].split())}\n" for name in names.split(";"))
    body = seen.headers["x-amz-content-sha256"]
    request = "\n".join([seen.method, parts.path, query, headers, names, body])
    to_sign = "\n".join(["AWS4-HMAC-SHA256", seen.headers["x-amz-date"], scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, to_sign.encode(), "sha256").hex() == signature
