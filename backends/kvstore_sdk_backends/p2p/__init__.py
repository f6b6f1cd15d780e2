"""Records from the host memory of one engine to that of another."""

__all__: list[str] = []
