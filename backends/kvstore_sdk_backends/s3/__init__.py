"""Object stores as a tier: one object a record, its bytes and nothing else. Importing this imports no client of any store."""

from kvstore_sdk_backends.s3.backend import S3Backend
from kvstore_sdk_backends.s3.fsspec_opening import open_abfs, open_gs
from kvstore_sdk_backends.s3.opening import open_s3

__all__ = ["S3Backend", "open_abfs", "open_gs", "open_s3"]
