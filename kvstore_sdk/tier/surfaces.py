"""What a backend is told of beside its calls, where it offers to listen. Whatever it raises is logged and survived."""

from __future__ import annotations

import logging

from kvstore_sdk.backend import Backend, RecordSource, SupportsIdentity, SupportsServe
from kvstore_sdk.identity import KVIdentity

__all__ = ["serve", "tell_identity"]

logger = logging.getLogger(__name__)


def tell_identity(name: str, backend: Backend, identity: KVIdentity) -> None:
    """Say whose records it holds from now on."""
    if isinstance(backend, SupportsIdentity):
        try:
            backend.use_identity(identity.namespace, identity.layout)
        except (Exception, SystemExit):
            logger.exception("%s: the backend did not take the identity", name)


def serve(name: str, backend: Backend, source: RecordSource) -> bool:
    """Have it serve these records. Returns whether it does."""
    if not isinstance(backend, SupportsServe):
        return False
    try:
        backend.serve(source)
    except (Exception, SystemExit):
        logger.exception("%s: the backend does not serve what is in host memory", name)
        return False
    return True
