"""The operator's pod templates are pinned: a change of one replaces every pod of such services at an upgrade.

A failure means that the upgrade to this version rolls pods. If that is wanted, pin the new revision, and say so in the
table of docs/rollouts.md ("Upgrading").
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from builders import CONFIG, isvc

from argosy_operator.desired.children import plan_children
from argosy_operator.names import KEY_FILE_ANNOTATION, REQUESTS_ANNOTATION, REVISION_LABEL
from argosy_operator.observation import Observation

HUB = {"source": "hf://org/model"}
CLAIM = {"source": "pvc://claim/model"}

PINNED: list[tuple[str, dict[str, Any], str]] = [
    ("the model of the image", {}, "afaa6db88c"),
    ("a claim", {"model": CLAIM}, "b14fc8e8bb"),
    ("a fetched model", {"model": HUB}, "be988b0854"),
    (
        "a fetched model, kept on a claim",
        {"model": {**HUB, "cache": {"type": "claim", "claimName": "models"}}},
        "b09bdfef18",
    ),
    ("vLLM", {"model": CLAIM, "engine": {"type": "vllm"}}, "d01ee7375b"),
    ("SGLang", {"model": CLAIM, "engine": {"type": "sglang"}}, "d8e28fb0a2"),
    ("a GPU", {"resources": {"gpu": {}}}, "25dd36e8b3"),
    ("vLLM on a GPU", {"model": CLAIM, "engine": {"type": "vllm"}, "resources": {"gpu": {}}}, "534558201b"),
]

KEPT: list[tuple[str, dict[str, Any], str]] = [
    ("the model of the image", {}, "6e10503144"),
    ("a claim", {"model": CLAIM}, "84598aba01"),
    ("a fetched model", {"model": HUB}, "87c87ecd75"),
    (
        "a fetched model, kept on a claim",
        {"model": {**HUB, "cache": {"type": "claim", "claimName": "models"}}},
        "b8ac264aab",
    ),
    *PINNED[-4:-2],
]
"""Of services that were rolled out before engines followed a file of internal keys."""

WITHOUT_REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("a GPU", {"resources": {"gpu": {}}}, "da80aedb7f"),
    ("vLLM on a GPU", {"model": CLAIM, "engine": {"type": "vllm"}, "resources": {"gpu": {}}}, "666ad1564f"),
]
"""Of services that were rolled out before engines with GPUs requested CPUs and memory."""


def revision(spec: dict[str, Any]) -> str:
    template = plan_children(isvc(**spec), Observation(), CONFIG).deployment["spec"]["template"]
    return str(template["metadata"]["labels"][REVISION_LABEL])


@pytest.mark.parametrize(("spec", "pinned"), [each[1:] for each in PINNED], ids=[each[0] for each in PINNED])
def test_an_upgrade_rolls_no_pod_unawares(spec: dict[str, Any], pinned: str) -> None:
    assert revision(spec) == pinned, "see this file's docstring"


@pytest.mark.parametrize(("spec", "pinned"), [each[1:] for each in KEPT], ids=[each[0] for each in KEPT])
def test_a_file_of_keys_rolls_no_pod_of_a_service_that_has_none(spec: dict[str, Any], pinned: str) -> None:
    live = copy.deepcopy(plan_children(isvc(**spec), Observation(), CONFIG).deployment)
    del live["metadata"]["annotations"][KEY_FILE_ANNOTATION]
    kept = plan_children(isvc(**spec), Observation(deployment=live), CONFIG)
    assert kept.revision == pinned, "see this file's docstring"
    assert KEY_FILE_ANNOTATION not in kept.deployment["metadata"]["annotations"]
    engine = {**spec.get("engine", {}), "env": [{"name": "A", "value": "1"}]}
    edited = plan_children(isvc(**{**spec, "engine": engine}), Observation(deployment=live), CONFIG)
    assert edited.deployment["metadata"]["annotations"][KEY_FILE_ANNOTATION] == "true"


@pytest.mark.parametrize(
    ("spec", "pinned"), [each[1:] for each in WITHOUT_REQUESTS], ids=[each[0] for each in WITHOUT_REQUESTS]
)
def test_default_requests_roll_no_pod_of_a_service_that_has_none(spec: dict[str, Any], pinned: str) -> None:
    live = copy.deepcopy(plan_children(isvc(**spec), Observation(), CONFIG).deployment)
    del live["metadata"]["annotations"][REQUESTS_ANNOTATION]
    assert plan_children(isvc(**spec), Observation(deployment=live), CONFIG).revision == pinned


def test_the_pinned_templates_differ() -> None:
    assert len({pinned for _, _, pinned in PINNED}) == len(PINNED)
