"""The conformance suite. Empty in this version."""

__all__: list[str] = []
