"""Where each rank's bytes lie in a canonical chunk, so that a chunk is the same bytes under every topology.

A canonical payload holds all layers and all heads of a group: layer by layer, in it block by block, in it head by head. What is inside
(block, head) is the interior, which this package takes as it is; its name is in the layout id. Who may use which interior is decided by
the adapter of the engine, by name. Everything else is opaque: the parts of the ranks one after another.
"""

from kvstore_sdk.layout.runs import Run, page_bytes, prove, runs, write_runs
from kvstore_sdk.layout.shapes import (
    LAYOUT_VERSION,
    OPAQUE,
    AttentionShape,
    CanonicalShape,
    LatentShape,
    LayoutError,
    OpaqueShape,
    Section,
    Shape,
    StatePart,
    StateShape,
    Topology,
    layout_id,
    payload_bytes,
    shape_from_plain,
    shape_to_plain,
)

__all__ = [
    "LAYOUT_VERSION",
    "OPAQUE",
    "AttentionShape",
    "CanonicalShape",
    "LatentShape",
    "LayoutError",
    "OpaqueShape",
    "Run",
    "Section",
    "Shape",
    "StatePart",
    "StateShape",
    "Topology",
    "layout_id",
    "page_bytes",
    "payload_bytes",
    "prove",
    "runs",
    "shape_from_plain",
    "shape_to_plain",
    "write_runs",
]
