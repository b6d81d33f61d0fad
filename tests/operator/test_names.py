"""Generated names fit into a DNS label."""

from __future__ import annotations

import pytest
from builders import CONFIG, isvc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argosy_operator.desired.children import plan_children
from argosy_operator.names import REVISION_LABEL, canary_name, pod_owners, shorten
from argosy_operator.observation import Observation


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.text("abc-", min_size=1, max_size=90).filter(lambda name: name[0] != "-"), st.integers(12, 63))
def test_shortened_names_fit(name: str, limit: int) -> None:
    short = shorten(name, limit)
    assert len(short) <= limit
    assert short == name or len(name) > limit
    assert short.startswith(name[:1])


@pytest.mark.parametrize("length", [1, 29, 30, 36, 37, 63])
def test_routers_know_the_replica_sets_of_a_service_by_their_names(length: int) -> None:
    """Kubernetes names a ReplicaSet after its Deployment."""
    service = isvc(name="a" * length)
    deployment = plan_children(service, Observation(), CONFIG).deployment
    revision = deployment["spec"]["template"]["metadata"]["labels"][REVISION_LABEL]
    ordinary, canary = pod_owners(service)
    assert f"{deployment['metadata']['name']}-5f7d9c".startswith(ordinary)
    assert f"{canary_name(service, revision)}-5f7d9c".startswith(canary)
    assert canary_name(service, revision) == canary + revision
