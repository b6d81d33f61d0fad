"""Model names that an engine answers to, and the name in its answers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from argosy_engine.api.app import root_of
from argosy_engine.api.serve import parse_args
from argosy_engine.api.served_engine import OpenAIServing
from argosy_protocol.errors import NotFound


@pytest.fixture(params=[False, True])
def serving(request: pytest.FixtureRequest) -> Iterator[tuple[OpenAIServing, bool]]:
    llm = cast(Any, SimpleNamespace(config=SimpleNamespace(max_model_len=64)))
    made = OpenAIServing(llm, ("tiny", "small"), takes_any_name=request.param)
    yield made, request.param
    made.close()


def test_own_names_and_others(serving: tuple[OpenAIServing, bool]) -> None:
    made, takes_any_name = serving
    assert [made.check_model(name) for name in ("tiny", "small", "")] == ["tiny", "small", "tiny"]
    assert [card.id for card in made.models().data] == ["tiny", "small"]
    if takes_any_name:
        assert made.check_model("org/Tiny") == "org/Tiny"
        assert (made.model("org/Tiny").id, made.model("org/Tiny").root) == ("org/Tiny", "tiny")
    else:
        with pytest.raises(NotFound):
            made.check_model("org/Tiny")
        with pytest.raises(NotFound):
            made.model("org/Tiny")


def test_a_router_s_word_holds_for_one_request(serving: tuple[OpenAIServing, bool]) -> None:
    made, _ = serving
    told = made.answering_as("org/Tiny")
    assert [told.check_model(name) for name in ("tiny", "unknown", "")] == ["org/Tiny"] * 3
    assert made.check_model("small") == "small"


@pytest.mark.parametrize(
    ("count", "end"),
    [(1, "serves 'name-0'"), (8, "'name-6', 'name-7'"), (64, "'name-6', 'name-7' and 56 more")],
)
def test_an_unknown_name_is_answered_with_those_that_are_served(count: int, end: str) -> None:
    made = OpenAIServing(cast(Any, None), [f"name-{index}" for index in range(count)])
    try:
        with pytest.raises(NotFound) as refusal:
            made.check_model("org/Tiny")
    finally:
        made.close()
    assert str(refusal.value).startswith(
        "the model 'org/Tiny' does not exist here; this engine serves 'name-0'"
    )
    assert str(refusal.value).endswith(end)


@pytest.mark.parametrize("given", [False, True])
def test_the_flag(given: bool) -> None:
    options, _ = parse_args(["builtin://tiny", *(["--any-model-name"] if given else [])])
    assert options.any_model_name is given


@pytest.mark.parametrize(
    ("model", "root"),
    [
        ("builtin://tiny", "builtin://tiny"),
        ("org/Model", "org/Model"),
        ("hf://org/Model@main", "org/Model"),
        ("/mnt/models/m", "/mnt/models/m"),
        ("https://host/m.tar?X-Amz-Signature=secret", "name"),
        ("s3://bucket/m", "name"),
        ("oci://host/repository:tag", "name"),
    ],
)
def test_the_root_of_all_names_is_the_model_as_given(model: str, root: str) -> None:
    _, args = parse_args([model, "--served-model-name", "name", "alias"])
    assert root_of(args) == root
    llm = cast(Any, SimpleNamespace(config=SimpleNamespace(max_model_len=64)))
    made = OpenAIServing(llm, ("name", "alias"), root=root_of(args))
    assert [(card.id, card.root) for card in made.models().data] == [("name", root), ("alias", root)]
    made.close()
