"""From a name, a URL or `module:factory` to an open backend, with every option checked first."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from kvstore_sdk.backend.factories import is_factory_name, load_factory
from kvstore_sdk.backend.options import OptionInfo, options_of, parse_options
from kvstore_sdk.backend.protocol import Backend, Capabilities
from kvstore_sdk.errors import BackendError, ConfigError, KVStoreError, error_from_os

__all__ = ["ENTRY_POINT_GROUP", "BackendFactory", "backend_options", "open_backend", "registered_backends"]

ENTRY_POINT_GROUP = "kvstore_sdk.backends"


class BackendFactory(Protocol):
    """What a vendor registers: `factory(location, *, option=default, ...)` opens the store at `location` and returns a `Backend`.

    - `location` is a string whose form is the backend's own. Of a URL it is what stands between the scheme and the query, without the two
      slashes and with %-codes decoded: `/mnt/a b` of `file:///mnt/a%20b`, `127.0.0.1:6399/0` of `redikv://127.0.0.1:6399/0`, nothing of
      `memory:`. URLs with a password or a fragment (`#...`) are refused before the factory is called.
    - Keyword-only parameters are options: `kvstore_sdk.backend.options` says how their names, types and defaults are read. They arrive
      checked and converted; those that were not given are left to their defaults.
    - Opening one location twice, in one process or two, gives two views of the same store. Another location is another store: no name
      reaches the records of this one from there.
    - Within 60 seconds it returns, or raises `ConfigError` for what its user can set right, a `BackendError` for a store that cannot be
      opened. An `OSError` is taken for the `BackendError` that `error_from_os` makes of it; any other exception is a fault of the factory.
    """

    def __call__(self, location: str, /, *args: Any, **options: Any) -> Backend: ...


_METHODS = ("exists", "put", "get", "close")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def registered_backends() -> dict[str, EntryPoint]:
    """Every installed backend by its name, which is its URL scheme as well. Nothing is imported."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def backend_options(target: str) -> dict[str, OptionInfo]:
    """The options of a backend, given its name, a URL of it, or `module:factory`.

    Raises:
        ConfigError: there is no such backend, or it cannot be imported.
    """
    name, factory, _ = _find(target)
    return _options(f"backend {name}", factory)


def open_backend(target: str, options: Mapping[str, object] | None = None, *, location: str | None = None) -> Backend:
    """Open a backend.

    Args:
        target: A URL (`file:///mnt/kv?direct_io=never`, `memory:`), the name of a registered backend (`fs`), or `module:factory`.
        options: Options of the backend; those of a tier (`TierSettings`) are none. With a URL they are added to those of its query.
        location: Where the store is, as `BackendFactory` gets it. A URL says that itself.

    Raises:
        ConfigError: the backend, its location or an option is unknown, missing or wrong; nothing was opened. Or what the factory
            returned is no backend.
        BackendError: the store could not be opened, or the factory raised something else.
    """
    name, factory, url = _find(target, located=location is not None)
    where = f"backend {name}"
    given = dict(options or {})
    if url is not None:
        url_location, query = _split_url(where, url)
        if location is not None and location != url_location:
            raise ConfigError(where, "location", "is given twice: by the URL and by itself; leave one out")
        if twice := sorted(set(query) & set(given)):
            raise ConfigError(where, twice[0], "is given twice: in the URL and as an option; leave one out")
        location, given = url_location, given | query
    if location is None:
        raise ConfigError(where, "location", "must be given: where the store is, a folder for example, or host:port for p2p")
    schema = _options(where, factory)
    try:
        parsed = parse_options(where, schema, given)
    except ConfigError as error:
        if url is None or error.field in schema:
            raise
        hint = "options of a tier (kvstore backends lists them) stand in its entry, beside the URL"
        raise ConfigError(where, error.field, f"{error.problem}; {hint}") from None
    try:
        backend = factory(location, **parsed)
    except KVStoreError:
        raise
    except OSError as cause:
        raise error_from_os(f"{where}: open", cause) from cause
    except Exception as cause:
        # A vendor's code may fail in any way, and say what it was given.
        text = f"{type(cause).__name__} ({cause})"
        for name, value in parsed.items():
            if schema[name].secret and value:
                text = text.replace(str(value), "***")
        raise BackendError(f"{where}: open: the factory raised {text}; that is for its vendor to fix") from cause
    _check(where, backend)
    return backend


def _find(target: str, *, located: bool = False) -> tuple[str, BackendFactory, str | None]:
    """Resolve `target` to (name, factory, the URL if it is one). `located`: the location is given beside it."""
    # Asked once: it reads the metadata of everything that is installed.
    points = entry_points(group=ENTRY_POINT_GROUP)
    known = {point.name: point for point in points}
    # A module may be called like the backend it registers: with a location beside it, `acme:open_acme` is no URL.
    is_factory = located and is_factory_name(target)
    url = None if target in known or is_factory or not _URL.match(target) else target
    name = target if url is None else target.split(":", 1)[0].lower()
    if name in known:
        if len({point.value for point in points if point.name == name}) > 1:
            problem = "is registered by two packages; uninstall one, or write module:factory"
            raise ConfigError(f"backend {name}", "backend", problem)
        return name, _load(known[name]), url
    if is_factory_name(target):
        return target, _load(EntryPoint(target, target, ENTRY_POINT_GROUP)), None
    # Of a URL the scheme alone: that is what is not known, and anything after it may be a secret.
    shown = re.split(r"[:?#=]", target, maxsplit=1)[0].rsplit("@", 1)[-1] or "without a name"
    names = ", ".join(sorted(known)) or "none"
    raise ConfigError(f"backend {shown}", "backend", f"is not known; installed are {names}; or write module:factory")


def _load(point: EntryPoint) -> BackendFactory:
    # The value of an entry point may end in extras: "acme.store:open [fast]", and have spaces anywhere.
    target = "".join(point.value.partition("[")[0].split())
    return cast(BackendFactory, load_factory(f"backend {point.name}", "backend", target))


def _options(where: str, factory: BackendFactory) -> dict[str, OptionInfo]:
    try:
        return options_of(factory)
    except (NameError, TypeError, ValueError) as cause:
        raise ConfigError(where, "backend", f"the factory's parameters cannot be read ({cause}); that is for its vendor to fix") from cause


def _split_url(where: str, url: str) -> tuple[str, dict[str, str]]:
    try:
        parts = urlsplit(url)
    except ValueError:
        # Without what the parser says: it repeats the part that may hold a password.
        raise ConfigError(where, "location", "is no URL; write scheme://host/path, and %-codes for what is no letter or digit") from None
    if parts.password is not None:
        raise ConfigError(where, "location", "must not carry a password; use the backend's own credential options")
    if parts.fragment:
        raise ConfigError(where, "location", "must not carry a fragment (#...); write %23 for a # in a path")
    query = parse_qsl(parts.query, keep_blank_values=True)
    names = [name for name, _ in query]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(where, twice[0], "is given twice in the URL")
    location = unquote(f"{parts.netloc}{parts.path}")
    return location, dict(query)


def _check(where: str, backend: object) -> None:
    missing = [name for name in _METHODS if not callable(getattr(backend, name, None))]
    if inspect.iscoroutine(backend):
        backend.close()
        raise ConfigError(where, "backend", "the factory is a coroutine function; it must return an open backend")
    if missing:
        raise ConfigError(where, "backend", f"the factory returned a {type(backend).__name__}, which lacks {', '.join(missing)}")
    if not isinstance(getattr(backend, "capabilities", None), Capabilities):
        raise ConfigError(where, "backend", f"{type(backend).__name__}.capabilities must be a Capabilities")
