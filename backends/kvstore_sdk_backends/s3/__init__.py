"""An object store as a tier: one object a record, its bytes and nothing else."""

from kvstore_sdk_backends.s3.backend import S3Backend
from kvstore_sdk_backends.s3.opening import open_s3

__all__ = ["S3Backend", "open_s3"]
