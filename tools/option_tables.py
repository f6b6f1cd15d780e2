"""Write the tables of options and metrics in docs/configuration.md from the code that declares them: `make docs`.

A table stands between two comments, `<!-- options: NAME -->` or `<!-- metrics: KIND -->`, and `<!-- end -->`. A test compares the file with
what this would write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kvstore_sdk import store
from kvstore_sdk.backend import OptionInfo, backend_options
from kvstore_sdk.backend.options import options_of
from kvstore_sdk.cli.backends import describe
from kvstore_sdk.store import StoreSettings
from kvstore_sdk.tier import COUNTERS, GAUGES, HISTOGRAMS, TierSettings
from kvstore_sdk.vllm.metrics import HOST_COUNTERS, HOST_GAUGES, HOST_PREFIX, PREFIX, STORE_PREFIX
from kvstore_sdk.vllm.options import ISOLATION_OPTIONS, AdapterOptions, HostOptions

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
DECLARED = {"adapter": AdapterOptions, "host": HostOptions, "store": StoreSettings, "tier": TierSettings}
TABLE = re.compile(r"(<!-- (options|metrics): (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def options(name: str) -> Mapping[str, OptionInfo]:
    """One of `DECLARED`, `isolation`, or the name of a backend."""
    if name == "isolation":
        return ISOLATION_OPTIONS
    return options_of(DECLARED[name]) if name in DECLARED else backend_options(name)


def table(name: str) -> str:
    rows = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for option in options(name).values():
        label, kind, default, text = (cell.replace("|", " or ") for cell in describe(option))
        rows.append(f"| `{label}` | {kind} | {default.removeprefix('default ')} | {text} |")
    return "\n".join(rows) + "\n"


def metrics(kind: str) -> str:
    """`counters`, `gauges` or `histograms` of a tier, with `store-` or `host-` before it those of the store or of host memory.

    By the names that vLLM gives them.
    """
    ours, prefix = {"counters": COUNTERS, "gauges": GAUGES, "histograms": HISTOGRAMS}, PREFIX
    if kind.startswith("store-"):
        kind, prefix = kind.removeprefix("store-"), STORE_PREFIX
        ours = {"counters": store.COUNTERS, "gauges": store.GAUGES, "histograms": store.HISTOGRAMS}
    elif kind.startswith("host-"):
        kind, prefix = kind.removeprefix("host-"), HOST_PREFIX
        ours = {"counters": HOST_COUNTERS, "gauges": HOST_GAUGES}
    rows = [f"| {kind.removesuffix('s')} | labels | meaning |", "|---|---|---|"]
    for name, spec in ours[kind].items():
        rows.append(f"| `{prefix}{name}` | {', '.join(f'`{label}`' for label in spec.labels)} | {spec.doc} |")
    return "\n".join(rows) + "\n"


def rewritten(page: str) -> str:
    return TABLE.sub(lambda found: found[1] + {"options": table, "metrics": metrics}[found[2]](found[3]) + found[4], page)


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
