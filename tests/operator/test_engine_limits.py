"""The custom resource's bounds are the engine's own."""

from __future__ import annotations

import re
from typing import Any

import pytest
from builders import isvc
from hypothesis import given
from hypothesis import strategies as st

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_resource import crd
from argosy_resource.engine_command import engine_args
from argosy_resource.schema_types import CACHE_PATTERN, quantity_bytes

ENGINE: dict[str, Any] = crd.schema()["properties"]["spec"]["properties"]["engine"]["properties"]
NUMBERS = {
    "maxModelLen": "max_model_len",
    "maxNumSeqs": "max_num_seqs",
    "maxNumBatchedTokens": "max_num_batched_tokens",
    "blockSize": "block_size",
    "threads": "threads",
}


@pytest.mark.parametrize(("field", "flag"), NUMBERS.items())
def test_a_number_is_accepted_by_both_or_by_none(field: str, flag: str) -> None:
    low, high = ENGINE[field]["minimum"], ENGINE[field]["maximum"]
    for value in (low, high):
        EngineArgs.of(model="m", **{flag: value})
    for value in (low - 1, high + 1):
        with pytest.raises(ConfigError):
            EngineArgs.of(model="m", **{flag: value})


@pytest.mark.parametrize(
    ("field", "flag"),
    [("device", "device"), ("dtype", "dtype"), ("attentionBackend", "attention_backend")],
)
def test_the_choices_are_those_of_the_engine(field: str, flag: str) -> None:
    for choice in ENGINE[field]["enum"]:
        EngineArgs.of(model="m", **{flag: choice})
    with pytest.raises(ConfigError) as refused:
        EngineArgs.of(model="m", **{flag: "other"})
    _, _, told = str(refused.value).partition("must be one of ")
    choices, _, given = told.rpartition(", not ")
    assert given == "'other'"
    assert set(choices.split(", ")) == set(ENGINE[field]["enum"])


def test_no_numeric_field_is_left_out() -> None:
    own = {"shutdownTimeoutSeconds", "gpuMemoryUtilization"}  # a flag of the server; a share
    found = {name for name, schema in ENGINE.items() if schema.get("type") in ("integer", "number")}
    assert found - own == NUMBERS.keys()


@given(st.from_regex(CACHE_PATTERN, fullmatch=True))
def test_every_cache_size_is_accepted_by_the_engine(quantity: str) -> None:
    EngineArgs.of(model="m", kv_cache_memory_bytes=quantity_bytes(quantity))


@pytest.mark.parametrize("quantity", ["1M", "64Mi", "2Gi", "9999Gi", "63Ti", "1000000", "1000k", "1024Ki"])
def test_usual_cache_sizes_are_accepted(quantity: str) -> None:
    assert re.fullmatch(CACHE_PATTERN, quantity)


@pytest.mark.parametrize("bound", ["minimum", "maximum"])
def test_the_extremes_of_a_cache_size_in_digits_are_accepted(bound: str) -> None:
    size = ENGINE["kvCacheMemory"][bound]
    assert EngineArgs.of(model="m", kv_cache_memory_bytes=size).kv_cache_memory_bytes == size


@pytest.mark.parametrize("bound", ["minimum", "maximum"])
def test_the_command_line_of_the_extremes_is_accepted(bound: str) -> None:
    """By the engine's own parser."""
    from argosy_engine.api.serve import parse_args

    service = isvc(engine={field: ENGINE[field][bound] for field in NUMBERS})
    _, args = parse_args(engine_args(service)[1:])
    assert (args.max_model_len, args.block_size) == tuple(
        ENGINE[field][bound] for field in ("maxModelLen", "blockSize")
    )
