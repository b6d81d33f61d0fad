"""Makes the packages of e2e importable: what of them needs no cluster is tested here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "e2e"))
