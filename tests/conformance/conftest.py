"""What the tests of the suite share."""

from __future__ import annotations

import sys
from pathlib import Path

# Where the backends that are wrong on purpose are found, by this process and by those that the suite starts.
sys.path.insert(0, str(Path(__file__).parent))
