"""What an operator may write in a tier's entry, all checked before anything opens."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from kvstore_sdk.backend.options import Bounds, OptionInfo, options_of, parse_options
from kvstore_sdk.backend.registry import backend_options, registered_backends
from kvstore_sdk.errors import ConfigError
from kvstore_sdk.isolation import IsolationLimits
from kvstore_sdk.store import StoreSettings
from kvstore_sdk.tier import TierSettings

__all__ = [
    "ISOLATION_OPTIONS",
    "LORA_DIGESTS",
    "PER_TIER",
    "AdapterOptions",
    "HostOptions",
    "TierOptions",
    "parse_adapter_options",
    "parse_tier_options",
    "refuse_unknown",
    "shown_settings",
    "written_by_operator",
]

logger = logging.getLogger(__name__)

_NOT_OURS = ("type", "module_path", "backpressure")
"""Part of a tier's entry, but vLLM's; before 0.28 and 0.31 it passes them on to us."""

LORA_DIGESTS = "lora_digests"
"""The one option that is a table."""

_REPLICA = "data_parallel_index"
"""The option of a backend that differs between the replicas of an engine."""

_ISOLATION_PREFIX = "isolation_"

ISOLATION_OPTIONS: dict[str, OptionInfo] = {
    _ISOLATION_PREFIX + name: replace(option, name=_ISOLATION_PREFIX + name) for name, option in options_of(IsolationLimits).items()
}
"""Those of `IsolationLimits`, by the names that they have in a tier's entry."""

PER_TIER = ("may_store", "locality", "start_timeout_s", "isolation", *ISOLATION_OPTIONS)
"""Options of the adapter that each tier has for itself. The others say what the bytes are, and hold for all tiers."""

_HARMLESS = re.compile(r"[\w.-]+(:[A-Za-z_][\w.]*)?")
"""A backend's name, or `module:factory`."""


class AdapterOptions:
    """Options of the adapter itself, beside those of the Tier and of the backend."""

    def __init__(
        self,
        *,
        may_store: Annotated[bool, "store chunks, not only look them up"] = True,
        private: Annotated[bool, "keep the chunks of this engine to itself, under names that nobody else can know"] = False,
        weights_version: Annotated[str, "names the weights, in place of a fingerprint of them"] = "",
        tenant_salt: Annotated[
            str, "secret of a tenant: other salts, other names. The SDK shows it nowhere, but vLLM logs its configuration"
        ] = "",
        tenant_salt_env: Annotated[str, "name of the environment variable that holds the salt instead"] = "",
        trusted_hash_seed: Annotated[
            bool, "share chunks although the engine hashes with xxHash: PYTHONHASHSEED is set, secret, and the same everywhere"
        ] = False,
        only_listed_adapters: Annotated[
            bool, "no request uses a LoRA adapter that lora_digests does not list; else nothing is stored"
        ] = False,
        locality: Annotated[Literal["LOCAL", "REMOTE"] | None, "where the store is, for vLLM's tier filters and events"] = None,
        peer_wait_s: Annotated[
            float, Bounds(ge=0, le=3600), "longest that a request waits for chunks that the peer which it names has not computed yet"
        ] = 10.0,
        start_timeout_s: Annotated[
            float, Bounds(ge=0.01, le=86400), "longest that the engine's start waits for the backend to open and to be told of memory"
        ] = 120.0,
        isolation: Annotated[
            Literal["none", "process"],
            "process: the backend runs in a child process, whose crash, leak or endless loop costs misses and not the engine; "
            "none: in the engine's own",
        ] = "none",
    ) -> None:
        self.may_store = may_store
        self.private = private
        self.weights_version = weights_version
        self.tenant_salt = tenant_salt
        self.tenant_salt_env = tenant_salt_env
        self.trusted_hash_seed = trusted_hash_seed
        self.only_listed_adapters = only_listed_adapters
        self.locality = locality
        self.peer_wait_s = peer_wait_s
        self.start_timeout_s = start_timeout_s
        self.isolation = isolation
        self.lora_digests: Mapping[str, str] = {}
        """Adapter name -> digest of its weights. A table, so checked by hand."""


class HostOptions:
    """Options of the host tier that the table `kvstore` may hold."""

    def __init__(
        self,
        *,
        reserve_bytes: Annotated[
            int | None, Bounds(ge=0), "host memory that promotions and cascades leave to running requests; a quarter unless given"
        ] = None,
    ) -> None:
        self.reserve_bytes = reserve_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """One tier's entry, checked. Its `repr` shows nothing that may hold a secret.

    Attributes:
        adapter: Options of the adapter.
        settings: Of the Tier.
        backend: Name, URL or `module:factory`.
        location: Where the store is, unless the URL says it.
        backend_options: As given; `open_backend` parses them.
        isolation: Of the child process that the backend runs in; None: it runs in this one.
    """

    adapter: AdapterOptions = field(repr=False)
    settings: TierSettings
    backend: str = field(repr=False)
    location: str | None = field(repr=False)
    backend_options: Mapping[str, Any] = field(repr=False)
    isolation: IsolationLimits | None = None

    @property
    def shown(self) -> str:
        """The backend, for people: its name, `module:factory`, or of a URL the scheme."""
        return _shown(self.backend)

    @property
    def shown_given(self) -> str:
        """The same, with the names of its options that were given. What they were given may be secret."""
        names = ", ".join(sorted(name for name in self.backend_options if name != _REPLICA))
        return f"{self.shown} with {names}" if names else self.shown

    def of_replica(self, where: str, index: int) -> TierOptions:
        """The same for one of several data parallel replicas, which share a configuration: a backend that listens learns which one it is.

        Raises:
            ConfigError: an operator wrote the number, which would be that of every replica.
        """
        if _REPLICA not in backend_options(self.backend):
            return self
        if _REPLICA in self.backend_options:
            raise ConfigError(where, _REPLICA, "is set by the engine, for each replica its own; leave it out")
        return replace(self, backend_options={**self.backend_options, _REPLICA: index})


def parse_tier_options(where: str, given: Mapping[str, Any]) -> TierOptions:
    """Sort out and check a tier's entry.

    Raises:
        ConfigError: an option is unknown, missing, wrong, or claimed by two parts.
    """
    ours, settings = options_of(AdapterOptions) | ISOLATION_OPTIONS, options_of(TierSettings)
    entry = {name: value for name, value in given.items() if name not in _NOT_OURS}
    backend = entry.pop("backend", None)
    if not isinstance(backend, str) or not backend:
        names = ", ".join(sorted(registered_backends()))
        raise ConfigError(where, "backend", f"must be given: one of {names}, a URL such as file:///mnt/kv, or module:factory")
    location = entry.pop("location", None)
    if location is not None and not isinstance(location, str):
        raise ConfigError(where, "location", f"is not a string but of type {type(location).__name__}")
    theirs = backend_options(backend)
    for name in entry:
        parts = (("the adapter", ours), ("the tier", settings), (f"backend {_shown(backend)}", theirs))
        owners = [who for who, names in parts if name in names]
        if len(owners) > 1:
            raise ConfigError(where, name, f"is an option of {' and of '.join(owners)}; give the backend's in its URL")
    known = {LORA_DIGESTS} | set(ours | settings | theirs)
    elsewhere = dict.fromkeys(
        options_of(HostOptions) | options_of(StoreSettings), "stands in the table kvstore, with KVStoreOffloadingSpec"
    )
    refuse_unknown(where, ("backend", "location", *known), entry, elsewhere)
    limits = {name: entry.pop(name) for name in ISOLATION_OPTIONS if name in entry}
    adapter = parse_adapter_options(where, {name: entry[name] for name in entry if name in ours or name == LORA_DIGESTS})
    tier = TierSettings(**parse_options(where, settings, {name: entry[name] for name in entry if name in settings}))
    rest = {name: entry[name] for name in entry if name in theirs}
    return TierOptions(
        adapter=adapter,
        settings=tier,
        backend=backend,
        location=location,
        backend_options=rest,
        isolation=_isolation(where, adapter, limits),
    )


def parse_adapter_options(where: str, given: Mapping[str, Any]) -> AdapterOptions:
    """Check options of the adapter, the table of LoRA adapters among them.

    Raises:
        ConfigError: an option is unknown or wrong.
    """
    rest = {name: value for name, value in given.items() if name != LORA_DIGESTS}
    adapter = AdapterOptions(**parse_options(where, options_of(AdapterOptions), rest))
    adapter.lora_digests = _lora_digests(where, given.get(LORA_DIGESTS, {}))
    _read_salt(where, adapter)
    return adapter


def refuse_unknown(where: str, known: Iterable[str], given: Iterable[str], elsewhere: Mapping[str, str]) -> None:
    """Refuse the first of the given names that is not known, in an error that lists those that are.

    Args:
        where: For the error.
        known: The names that are allowed.
        given: Those to be checked.
        elsewhere: Of names that belong somewhere else, what to say.

    Raises:
        ConfigError: one is not known.
    """
    known = list(known)
    for name in given:
        if name not in known:
            if name in elsewhere:
                raise ConfigError(where, name, elsewhere[name])
            parse_options(where, dict.fromkeys(known, next(iter(options_of(AdapterOptions).values()))), {name: None})


def shown_settings(settings: object) -> str:
    """Those that are not the defaults, for a log."""
    shown = repr(settings)
    return "default settings" if shown.endswith("()") else shown


def _isolation(where: str, adapter: AdapterOptions, given: Mapping[str, Any]) -> IsolationLimits | None:
    limits = parse_options(where, ISOLATION_OPTIONS, given)
    if adapter.isolation == "process":
        return IsolationLimits(**{name.removeprefix(_ISOLATION_PREFIX): value for name, value in limits.items()})
    for name in given:
        raise ConfigError(where, name, "is not looked at without isolation=process; write that too, or leave it out")
    return None


def _read_salt(where: str, adapter: AdapterOptions) -> None:
    """Take the tenant's salt from the environment, if that is where it is."""
    name = adapter.tenant_salt_env
    if not name:
        return
    if adapter.tenant_salt:
        raise ConfigError(where, "tenant_salt_env", "cannot be given beside tenant_salt; leave one out")
    adapter.tenant_salt = os.environ.get(name, "")
    if not adapter.tenant_salt:
        # Without it the tenant would share with everybody who has none.
        raise ConfigError(where, "tenant_salt_env", f"the environment variable {name} is empty or not set where the engine's core runs")


def _shown(backend: str) -> str:
    return backend if _HARMLESS.fullmatch(backend) else backend.partition(":")[0].rpartition("@")[2][:40]


def _lora_digests(where: str, given: object) -> dict[str, str]:
    """Check the table of adapters."""
    if not isinstance(given, Mapping) or not all(isinstance(part, str) and part for pair in given.items() for part in pair):
        raise ConfigError(where, "lora_digests", "must be a table from the name of each adapter to a digest of its weights, both strings")
    return dict(given)


def written_by_operator(spec: Any, tier_type: str, passed: Mapping[str, Any]) -> dict[str, Any]:
    """Of the keywords that vLLM's factory passed, those that an operator wrote.

    A later factory may pass keywords of its own. They are told by their absence from every entry of this type in the configuration: None
    is ignored, anything else is ignored with a warning. A misspelt option is in the configuration, and stays.
    """
    entries = spec.extra_config.get("secondary_tiers", ())
    written = {name for entry in entries if isinstance(entry, Mapping) and entry.get("type") == tier_type for name in entry}
    for name, value in passed.items():
        if name not in written and value is not None:
            logger.warning("kvstore tier: vLLM passes %s=%r, which this version does not know; it is ignored", name, value)
    return {name: value for name, value in passed.items() if name in written}
