"""What a run found, as people and tools read it."""

from kvstore_sdk_conformance.report.report import Report, write

__all__ = ["Report", "write"]
