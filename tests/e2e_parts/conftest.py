"""Makes the packages of e2e importable: what of them needs no cluster is tested here, some on the fake Kubernetes."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "e2e"), str(ROOT / "tests" / "operator")]
