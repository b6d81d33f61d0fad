"""What clients are told while the replicas of a service fetch its model."""

from __future__ import annotations

import pytest

from argosy_protocol.fleet import FleetDocument, ModelFetchState

from .harness import rig, service


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("fetching 40 %", "; its model is being fetched (fetching 40 %)"),
        ("fetching", "; its model is being fetched"),
        ("waiting", "; its model is being fetched (waiting)"),
        ("failed", "; its model could not be fetched"),
        ("locked", "; its model could not be fetched"),
        ("cached", ""),
        ("", ""),
    ],
)
async def test_a_refused_request_says_how_far_the_fetch_is(state: str, told: str) -> None:
    fields = {"fetch": ModelFetchState(source="hf://org/name", state=state)}
    async with rig([], wait=False, fields=fields) as r:
        answer = await r.chat()
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == f"no replica of model 'tiny' is ready{told}"
        r.discovery.set(FleetDocument(services=(service([]),)))
        again = await r.chat()
        assert again.json()["error"]["message"] == "no replica of model 'tiny' is ready"
