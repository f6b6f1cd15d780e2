"""A folder as a store, local or on a shared mount: one file a record, its bytes and nothing else."""

from kvstore_sdk_backends.fs.backend import FsBackend, open_fs

__all__ = ["FsBackend", "open_fs"]
