"""The backends that come with the SDK, each shaped like a vendor's package."""

__all__: list[str] = []
