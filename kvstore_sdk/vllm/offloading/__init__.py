"""vLLM's second way in: a host tier of whole records in one shared region, and storage tiers below it.

The scheduler's side (`spec`, `manager`) decides what lies where, and writes the plan of the region (`plan`). Each worker copies its share
of every chunk straight into the records (`device`, `copies`, `cuda`), and says of each what it wrote (`marks`).
"""

__all__: list[str] = []
