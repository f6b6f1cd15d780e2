"""What is secret by its name is shown nowhere, in whatever form a text has it, and the rest of the text stays readable."""

from __future__ import annotations

import json
import shlex
import traceback
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_sdk_conformance.redact import SHORT, Redactor
from kvstore_sdk_conformance.target import Target

HOSTILE = "p%/ä'\"\\ +&=\n\tx?:@z"


def redactor(secret: str, **others: str) -> Redactor:
    return Redactor(Target("acme_store:open_store", {"secret_key": secret, **others}))


FORMS = {
    "as it is": lambda secret: secret,
    "quoted": lambda secret: quote(secret, safe=""),
    "quoted as a path": quote,
    "quoted in a query": quote_plus,
    "quoted in small letters": lambda secret: quote(secret, safe="").replace("%C3%A4", "%c3%a4").replace("%2F", "%2f"),
    "as a literal": repr,
    "as an ASCII literal": ascii,
    "as JSON": json.dumps,
    "in a command": lambda secret: shlex.join(["--kvstore-option", f"secret_key={secret}"]),
    "in an exception": lambda secret: "".join(traceback.format_exception(ConnectionError(f"bad credentials {secret}"))),
    "in an exception's repr": lambda secret: repr(ConnectionError(f"bad credentials {secret}")),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("secret", ["hunter22", HOSTILE, "a" * 500, "sk-live.[0-9]+(x)"])
def test_a_secret_is_hidden(form: str, secret: str) -> None:
    shown = FORMS[form](secret)
    hidden = redactor(secret)(f"before {shown} after")
    assert shown.strip("\"'\n") not in hidden
    assert secret not in hidden
    assert hidden.startswith("before ")
    assert hidden.endswith(" after")


@given(st.text(min_size=SHORT), st.text(max_size=20), st.text(max_size=20))
def test_no_text_holds_a_secret(secret: str, before: str, after: str) -> None:
    if secret in "***" or set(secret) == {"*"}:
        return
    assert secret not in redactor(secret)(f"{before}{secret}{after}")


def test_a_secret_of_one_character_leaves_words_as_they_are() -> None:
    redact = redactor("a")
    assert redact("a get of v1/aaaa: bad key 'a'") == "*** get of v1/aaaa: bad key '***'"


def test_a_secret_that_is_a_part_of_names_is_hidden_in_them() -> None:
    assert redactor("c0ffee")("MISSING for v1/00c0ffee/x") == "MISSING for v1/00***/x"


def test_the_longer_of_two_secrets_is_hidden_whole() -> None:
    redact = redactor("hunter22", session_token="hunter2222")
    assert redact("hunter2222, hunter22") == "***, ***"


def test_a_secret_of_stars_does_not_undo_what_was_hidden() -> None:
    redact = redactor("hunter22", session_token="*")
    assert "hunter22" not in redact("hunter22 and *")


def test_each_line_of_a_secret_is_hidden() -> None:
    key = "-----BEGIN KEY-----\nMIIEowIBAAKCAQEA\nq2Vv8sN0xg==\n-----END KEY-----"
    hidden = redactor(key)("cannot read:\n  MIIEowIBAAKCAQEA\n  q2Vv8sN0xg==")
    assert "MII" not in hidden
    assert "q2V" not in hidden


def test_options_in_a_url_are_not_shown_and_their_secrets_are_hidden_elsewhere() -> None:
    redact = Redactor(Target("s3://bucket/p?secret_key=hunter%2F22&region=eu"))
    assert redact("s3://bucket/p?secret_key=hunter%2F22&region=eu") == "s3://bucket/p?..."
    assert redact("denied for hunter/22 in eu") == "denied for *** in eu"
    assert redact("s3://bucket/p/fresh?region=eu&secret_key=hunter%2f22") == "s3://bucket/p/fresh?region=eu&secret_key=***"


def test_what_is_no_secret_is_shown() -> None:
    redact = redactor("hunter22", region="eu-central-1")
    assert redact("no bucket in eu-central-1") == "no bucket in eu-central-1"


def test_a_backend_that_cannot_be_imported_has_secrets_all_the_same() -> None:
    redact = Redactor(Target("no_such_module:open_store", {"password": "hunter22"}))
    assert redact("hunter22") == "***"


def test_who_logs_in_by_a_url_is_hidden_whatever_the_option_is_called() -> None:
    redact = Redactor(Target("acme:open_store", {"endpoint": "redis://me:hunter2@10.0.0.7/0"}))
    assert redact("cannot reach redis://me:hunter2@10.0.0.7/0 as me") == "cannot reach redis://***@10.0.0.7/0 as me"
