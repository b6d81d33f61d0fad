from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `local_fleet`: importlib mode adds no folder by itself

from local_fleet import LocalFleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LocalFleet]:
    fleet = LocalFleet(tmp_path)
    yield fleet
    fleet.close()
