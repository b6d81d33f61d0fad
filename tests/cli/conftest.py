from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `local_fleet`: importlib mode adds no folder by itself

from local_fleet import LocalFleet


@pytest.fixture
def own_fleet(tmp_path: Path) -> Iterator[LocalFleet]:
    fleet = LocalFleet(tmp_path)
    yield fleet
    fleet.close()


@pytest.fixture(scope="session")
def lasting_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    fleet = LocalFleet(tmp_path_factory.mktemp("fleet"))
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(lasting_fleet: LocalFleet) -> LocalFleet:
    """A fleet of several tests. Each has its own service, whose first `up` starts it and removes the one before."""
    number = int(lasting_fleet.service.removeprefix("tiny") or 0) + 1
    lasting_fleet.service = f"tiny{number}"
    return lasting_fleet
