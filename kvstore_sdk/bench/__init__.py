"""How fast a backend is, beside the limits of its machine: what `kvstore bench` measures, and what comparisons share."""

__all__: list[str] = []
