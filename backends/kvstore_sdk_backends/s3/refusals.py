"""What to change when a store refuses: each failure of a probe as one line that names an option."""

from __future__ import annotations

from kvstore_sdk.backend import BackendError, ConfigError, ThrottledError
from kvstore_sdk_backends.s3.client import AttemptError
from kvstore_sdk_backends.s3.settings import WHERE, S3Settings

__all__ = ["Refusals"]

_PATH_REFUSED = frozenset({"SecondLevelDomainForbidden", "PathStyleDomainForbidden", "VirtualHostDomainRequired"})
_ELSEWHERE = frozenset({"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
_TOKENS = frozenset({"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired", "RequestExpired"})
_ACTIONS = {"PUT": "s3:PutObject", "GET": "s3:GetObject", "HEAD": "s3:GetObject", "DELETE": "s3:DeleteObject"}


class Refusals:
    """Explains what requests to one location come to."""

    def __init__(self, bucket: str, prefix: str, settings: S3Settings) -> None:
        self._bucket = bucket
        self._objects = f"{bucket}/{prefix}/*" if prefix else f"{bucket}/*"
        self._settings = settings
        self._endpoint = settings.endpoint or "the store"

    def told(self, verb: str, failed: AttemptError, *, gone: bool = False) -> ConfigError | BackendError:
        """What to raise when a `verb` failed. `gone`: it was about an object that is not there."""
        field, advice = self._advice(verb, failed, gone)
        return ConfigError(WHERE, field, f"{failed.error}; {advice}") if field else failed.error

    def inconsistent(self, verb: str, found: str) -> ConfigError:
        """A request succeeded, and does not fit the ones before it."""
        problem = f"s3 {verb} {self._objects}: {found} after a PUT and before a DELETE of it that both succeeded" if verb != "HEAD" else ""
        problem = problem or f"s3 HEAD {self._objects}: answers {found}, which does not fit the requests before it"
        return ConfigError(WHERE, "endpoint", f"{problem}; does {self._endpoint} speak S3, and show at once what was stored?")

    def no_condition(self) -> ConfigError:
        return ConfigError(WHERE, "conditional_writes", "the store does not heed If-None-Match; write auto, or never")

    def no_checksums(self, what: str, instead: str) -> ConfigError:
        return ConfigError(WHERE, "checksums", f"the store refuses a {what} with checksums, and takes it without; write {instead}")

    def _advice(self, verb: str, failed: AttemptError, gone: bool) -> tuple[str, str]:
        """The option at fault and what to do about it. Without an option: the store cannot be used now."""
        for about in (self._about_the_way, self._about_the_request, self._about_permission):
            if found := about(verb, failed, gone):
                return found
        if failed.status >= 500 or isinstance(failed.error, ThrottledError) or not failed.status:
            return "", ""
        return "endpoint", f"does {self._endpoint} speak S3 as it is configured?"

    def _about_the_way(self, verb: str, failed: AttemptError, gone: bool) -> tuple[str, str] | None:
        settings = self._settings
        is_virtual = settings.addressing == "virtual"
        match failed.code:
            case "dns" if is_virtual:
                return "addressing", "virtual puts the bucket before the host: have that name resolve, or write path"
            case "dns" if settings.endpoint is None:
                return "endpoint", "without one this is AWS, or what its environment and profile say; write that of the store"
            case "dns":
                return "endpoint", "fix the host name, or the resolver of this host"
            case "connect":
                return "endpoint", "is the store up, and can this host reach it?"
            case "tls" if "certificate" in str(failed.error).lower():
                return "ca_bundle", "name a file with the CA that signed the store's certificate, or use the name that is in it"
            case "tls":
                return "endpoint", "does the store speak TLS there? else write http://"
            case "timeout":
                return "endpoint", f"does {self._endpoint} hang, or not speak S3, or TLS where it says https?"
            case "closed" | "body":
                return "endpoint", f"does {self._endpoint} speak S3, and with TLS exactly where it says https?"
            case "checksum":
                return "checksums", "the store's checksums are not those of S3; write when_required"
        return None

    def _about_the_request(self, verb: str, failed: AttemptError, gone: bool) -> tuple[str, str] | None:
        settings = self._settings
        code, status = failed.code, failed.status
        if code == "NoSuchBucket":
            also = ", or write addressing=path" if settings.addressing == "virtual" else ""
            return "location", f"create the bucket {self._bucket}, or fix its name{also}"
        if code in _PATH_REFUSED:
            return "addressing", "the store wants the bucket in the host name; write virtual"
        if code in _ELSEWHERE or 300 <= status < 400:
            return "region", "write the bucket's region, or its endpoint"
        if code == "RequestTimeTooSkewed":
            return "clock", "set the clock of this host, by NTP for example"
        if code == "InvalidStorageClass":
            return "storage_class", "the store has no such class; write one that it has, or leave it out"
        if code in ("InvalidTag", "MalformedTagging"):
            return "tags", "the store does not take them; leave them out"
        if code == str(status) and verb != "HEAD" and status not in (401, 403, 408, 429) and status < 502:
            return "endpoint", f"the answer has no error code, as those of S3 have: does {self._endpoint} speak S3?"
        if code == "NotImplemented" or status == 501:
            given = [name for name in ("storage_class", "tags") if getattr(settings, name) is not None]
            return (given[0], "the store may not know it; leave it out") if given else None
        return None

    def _about_permission(self, verb: str, failed: AttemptError, gone: bool) -> tuple[str, str] | None:
        settings = self._settings
        code, status = failed.code, failed.status
        source = "profile" if settings.profile is not None else "access_key_id"
        if code == "credentials":
            return source, "give access_key_id and secret_access_key, a profile, or what AWS's default chain looks for"
        if code == "InvalidAccessKeyId":
            return source, "the store does not know this key"
        if code == "SignatureDoesNotMatch":
            return ("secret_access_key" if settings.secret_access_key else source), "is the secret that of the key, and the region right?"
        if code in _TOKENS:
            return ("session_token" if settings.session_token else source), "get new temporary credentials"
        if status not in (401, 403):
            return None
        if gone:
            why = "without it S3 answers 403 for what is not there, and no miss could be told from a refusal"
            return "permission", f"grant s3:ListBucket on the bucket {self._bucket}: {why}"
        action = f"grant {_ACTIONS[verb]} on {self._objects}"
        if verb == "PUT":
            return "read_only", f"{action}{' and s3:PutObjectTagging' if settings.tags else ''}, or write read_only=true"
        if verb == "DELETE":
            return "probe", f"{action}, or write probe=read: a probe that writes leaves its scratch objects otherwise"
        return "permission", action
