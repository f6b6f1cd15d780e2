"""What a run found, as people and tools read it."""

from kvstore_sdk_conformance.report.files import check_path, write
from kvstore_sdk_conformance.report.report import Report

__all__ = ["Report", "check_path", "write"]
