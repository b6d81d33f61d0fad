"""`dimensions` of embeddings: accepted for Matryoshka models, refused for all others."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from argosy_engine import LLM
from argosy_engine.errors import ConfigError, InvalidRequest
from argosy_engine.params import PoolingParams

TINY = Path(__file__).parents[2] / "models" / "argosy-tiny"
SIZE = 256
ALL_SIZES = (1, 8, 64, SIZE)


def engine(tmp_path: Path, in_config: dict[str, Any], overrides: dict[str, Any] | None) -> LLM:
    """The tiny model, with these keys in its config.json."""
    path = tmp_path / "model"
    shutil.copytree(TINY, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | in_config))
    return LLM(
        str(path),
        dtype="float32",
        device="cpu",
        threads=1,
        num_gpu_blocks_override=64,
        max_model_len=256,
        hf_overrides=overrides,
    )


def vector(llm: LLM, dimensions: int | None = None, *, normalize: bool = True) -> list[float]:
    params = PoolingParams(dimensions=dimensions, normalize=normalize)
    (result,) = llm.encode([[5, 6, 7]], params, use_tqdm=False)
    return list(result.outputs.embedding)


@pytest.mark.parametrize(
    ("in_config", "overrides", "allowed"),
    [
        ({}, None, ()),
        ({"is_matryoshka": False}, None, ()),
        ({"is_matryoshka": True}, None, ALL_SIZES),
        ({"matryoshka_dimensions": [8, 64]}, None, (8, 64)),
        ({"is_matryoshka": True, "matryoshka_dimensions": [8]}, None, (8,)),
        ({}, {"is_matryoshka": True}, ALL_SIZES),
        ({}, {"matryoshka_dimensions": [64]}, (64,)),
        ({"matryoshka_dimensions": [8, 64]}, {"matryoshka_dimensions": [1]}, (1,)),
        ({"is_matryoshka": True}, {"is_matryoshka": False}, ()),
    ],
    ids=str,
)
def test_the_dimensions_that_a_model_allows(
    in_config: dict[str, Any], overrides: dict[str, Any] | None, allowed: Sequence[int], tmp_path: Path
) -> None:
    llm = engine(tmp_path, in_config, overrides)
    try:
        whole = vector(llm, normalize=False)
        assert len(whole) == SIZE
        for dimensions in ALL_SIZES:
            if dimensions not in allowed:
                with pytest.raises(InvalidRequest, match=r"^dimensions ") as refused:
                    vector(llm, dimensions)
                assert refused.value.param == "dimensions"
                continue
            cut = vector(llm, dimensions)
            length = math.hypot(*whole[:dimensions])
            assert cut == pytest.approx([value / length for value in whole[:dimensions]], abs=1e-5)
    finally:
        llm.close()


def test_a_malformed_list_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="matryoshka_dimensions"):
        engine(tmp_path, {"matryoshka_dimensions": ["x"]}, None)
