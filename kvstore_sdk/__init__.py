"""kvstore-sdk: the storage half of tiered KV caches.

A vendor needs `kvstore_sdk.backend`; an operator the settings in the documentation; an engine `kvstore_sdk.tier`.
"""

from kvstore_sdk.identity import GroupIdentity, KVIdentity, WriterIdentity
from kvstore_sdk.keys import ChunkKey

__all__ = ["ChunkKey", "GroupIdentity", "KVIdentity", "WriterIdentity"]
