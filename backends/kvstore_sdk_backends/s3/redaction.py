"""What the libraries below log at level DEBUG, without the secrets in it."""

from __future__ import annotations

import logging
import re

__all__ = ["Redaction", "redact_logs"]

_LOGGERS = (
    "aiobotocore.awsrequest",
    "aiobotocore.credentials",
    "aiobotocore.endpoint",
    "aiobotocore.httpsession",
    "aiobotocore.parsers",
    "aiobotocore.regions",
    "aiobotocore.tokens",
    "aiobotocore.utils",
    "botocore.auth",
    "botocore.awsrequest",
    "botocore.client",
    "botocore.credentials",
    "botocore.endpoint",
    "botocore.hooks",
    "botocore.httpsession",
    "botocore.parsers",
    "botocore.regions",
    "botocore.tokens",
    "botocore.utils",
    "s3fs",
)
_SOURCES = (".credentials", ".tokens", ".utils")
"""Loggers of what asks for credentials: an answer that was not understood may hold them in any form."""
_NAMES = (
    r"x-amz-security-token|x-amz-s3session-token|x-aws-ec2-metadata-token|x-amz-sso_bearer_token|authorization|"
    r"aws_session_token|(?:aws_)?secret_?access_?key|session_?token|"
    r"web_?identity_?token|saml_?assertion|refresh_?token|access_?token|client_?secret|token"
)
_SECRETS = (
    # A header or a field: `name: value`, `'name': 'value'`, `"name": b"value"`, also with its quotes escaped.
    re.compile(rf"""(?P<name>\b(?:{_NAMES})\\?['"]?\s*[:=]\s*(?:b?\\?['"])?)(?P<value>[^'"\\\n\r]+)""", re.IGNORECASE),
    # An element of XML.
    re.compile(r"(?P<name><(?:SecretAccessKey|SessionToken|Token[-\d]*)>)(?P<value>[^<]+)", re.IGNORECASE),
    # A token that says who a process is, wherever it is repeated.
    re.compile(r"(?P<name>\beyJ)(?P<value>[\w-]{8,}\.[\w.-]+)"),
    # Of a URL.
    re.compile(r"(?P<name>//)(?P<value>[^/@\s'\"]+)(?=@)"),
    re.compile(r"(?P<name>\bSignature[:=]\s*)(?P<value>[0-9a-f]{16,})", re.IGNORECASE),
)


class Redaction(logging.Filter):
    """Replaces values of the headers and fields that hold credentials, also in tracebacks. Costs nothing while a logger is silent."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            text = record.getMessage()
        except Exception:  # noqa: BLE001  # the handler will say what is wrong with it
            return True
        if (redacted := _redacted(text)) != text:
            record.msg, record.args = redacted, None
        if record.exc_info:
            # As text alone: the exceptions themselves hold requests and answers.
            if record.name.endswith(_SOURCES) and record.exc_info[0]:
                text = record.exc_info[0].__name__
            else:
                text = _formatter.formatException(record.exc_info)
            record.exc_text, record.exc_info = _redacted(text), None
        return True


def _redacted(text: str) -> str:
    for pattern in _SECRETS:
        text = pattern.sub(r"\g<name>***", text)
    return text


_formatter = logging.Formatter()
_redaction = Redaction()


def redact_logs() -> None:
    """Add one filter to each logger that shows requests or answers: botocore writes session tokens and signatures there. Idempotent."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_redaction)
