"""Redis, or Valkey, as a backend of kvstore-sdk."""

from acme_redis.backend import AcmeRedisBackend, open_acmeredis

__all__ = ["AcmeRedisBackend", "open_acmeredis"]
