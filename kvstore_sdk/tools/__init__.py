"""What people do to a store: look into it, verify it, mend it, move it. On any backend that lists, while engines use it or not."""

__all__: list[str] = []
