"""What a checkpoint stores where its config says otherwise or nothing, found without torch: its output head, how its
experts are stored, and what is missing.

Many checkpoints whose config ties the output head to the embedding store both. In some the stored head is another
matrix, because the model was trained or merged with a head of its own; transformers then takes the stored head, and so
do we. The data of both matrices is compared up to the first difference.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import msgspec

from argosy_engine.checkpoint.shards import StoredTensor, read_shards
from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.model_configs.experts_config import ExpertsConfig
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.model_configs.wrapper_config import text_tensors

HEAD = "lm_head.weight"
SCORE = "score.weight"
"""Tensor of a decoder's head for sequence classification, by the name that all families have for it."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embeddings.weight")
"""How the families' names of the embedding end."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d{1,5})\.")
_PLAIN = ("BF16", "F16", "F32")
"""Dtypes of weights that are not quantised."""
_CHUNK_BYTES = 4 << 20
_MAX_SHOWN = 6
"""Layers that an error message lists."""

NO_HEAD = (
    "config.json does not tie the output head to the embedding: copy the whole checkpoint, or set "
    '"tie_word_embeddings": true in config.json if the embedding is its head'
)
"""What to do where there is no head."""

NO_SCORE = (
    "a classifier has a head of its own for its labels: take a checkpoint that was trained with one, let this one "
    "embed (--convert embed), or name tokens whose logits score a prompt, by --hf-overrides "
    '\'{"classifier_from_token": ["no", "yes"]}\''
)
"""The same for the labels' head."""

logger = logging.getLogger("argosy.models")

Config = TypeVar("Config", bound=ModelConfig)


def with_stored_head(path: Path, config: Config) -> Config:
    """Return the config of a checkpoint on disk, not tied if a head is stored that is not the embedding.

    A file that cannot be read is left for the load to name.
    """
    if not config.tie_word_embeddings:
        return config
    try:
        if not _has_own_head(path, is_wrapped=config.wrapper is not None):
            return config
    except (ConfigError, OSError):
        return config
    logger.warning(
        "config.json ties the output head to the embedding, and the checkpoint stores another head: the stored head is "
        "used, as transformers does"
    )
    return msgspec.structs.replace(config, tie_word_embeddings=False)


def with_stored_experts(path: Path, config: Config) -> Config:
    """Return the config of a checkpoint on disk, with stacked experts if it stores them so and its family may.

    Raises:
        ConfigError: a file is missing or malformed, or stacked experts are quantised.
    """
    experts: ExpertsConfig | None = getattr(config, "experts", None)  # not every family has them
    if experts is None or experts.names.or_stacked is None:
        return config
    names = experts.names
    ends = tuple(f".{experts.mlp}{names.experts}{each}" for each in experts.names.or_stacked)
    shape: tuple[int, ...] | None = None
    for shard in read_shards(path):
        for name, stored in shard.tensors.items():
            if not name.endswith(ends):
                continue
            if stored.dtype not in _PLAIN:
                raise ConfigError(
                    f"{name} of {path} has all experts of a layer in {stored.dtype}, which is not supported; take a "
                    f"checkpoint with unquantised experts, {OTHER_ENGINES}"
                )
            if shape is None and name.endswith(ends[0]):
                shape = tuple(stored.shape)
    if shape is None:
        return config
    names = msgspec.structs.replace(names, stacked=names.or_stacked, or_stacked=None)
    if names.may_be_transposed:  # a shape that is neither does not fit the plan of the weights
        names = msgspec.structs.replace(names, is_transposed=shape[1:2] != (2 * experts.inner,))
    return msgspec.structs.replace(config, experts=msgspec.structs.replace(experts, names=names))


def with_stored_layers(config: Config, names: Collection[str]) -> Config:
    """Return the config of a quantised checkpoint, with the layers that it stores as they are, where the format tells
    these so (`Scheme.is_told_by_storage`).

    Args:
        names: of all tensors.
    """
    if config.quantization is None:
        return config
    quantization = config.quantization.with_stored_layers(names)
    return msgspec.structs.replace(config, quantization=quantization)


def check_names(path: Path, config: ModelConfig, names: Collection[str]) -> None:
    """Check that the head, the embedding and every layer are among the names of a checkpoint's tensors. A load checks
    each tensor (`weights`).

    Raises:
        ConfigError: something is missing.
    """
    check_label_head(path, config, names)
    missing = []
    if not any(name.endswith(EMBEDDINGS) for name in names):
        missing.append("the embedding is missing")
    has_head = any(name.startswith("lm_head.") for name in names)  # quantised it has other names
    if not has_head and config.pooling is None and not config.tie_word_embeddings:
        missing.append(f"{HEAD} is missing, and {NO_HEAD}")
    layers = {int(found[1]) for name in names if (found := _LAYER.search(name))}
    if absent := [index for index in range(config.num_hidden_layers) if index not in layers]:
        shown = ", ".join(map(str, absent[:_MAX_SHOWN])) + (" and more" if len(absent) > _MAX_SHOWN else "")
        missing.append(f"of {config.num_hidden_layers} layers there are no tensors of {shown}")
    if missing:
        raise ConfigError(f"the tensors of {path} do not fit its config.json: {'; '.join(missing)}")


def check_label_head(path: Path, config: ModelConfig, names: Collection[str]) -> None:
    """Check that a decoder that classifies has a head for that among its tensors.

    Raises:
        ConfigError: it has none.
    """
    pooling = config.pooling
    if pooling is None or pooling.task != "classify":
        return
    if not pooling.label_token_ids and SCORE not in names:
        raise ConfigError(f"the checkpoint in {path} has no head for labels by the name {SCORE}; {NO_SCORE}")
    if pooling.label_token_ids and HEAD not in names and not config.tie_word_embeddings:
        raise ConfigError(f"the checkpoint in {path} has no {HEAD}, of which scores are rows; {NO_HEAD}")


def check_further_layers(path: Path, config: ModelConfig, names: Collection[str]) -> None:
    """Check that the layers after those of config.json are no ordinary ones, which would be left out without a word.

    Layers that predict further tokens follow the others and are not used. Such a layer has tensors that no other has,
    because it joins the hidden state with an embedding.

    Args:
        names: of all tensors, those that are not used included.

    Raises:
        ConfigError: there are ordinary layers among them.
    """
    count, predicting = config.num_hidden_layers, config.multi_token_tensors[0]
    ordinary: set[tuple[str, str]] = set()
    further: dict[int, set[tuple[str, str]]] = {}
    for name in names:
        if (found := _LAYER.search(name)) is not None and not re.fullmatch(predicting, name):
            index, parts = int(found[1]), (name[: found.start()], name[found.end() :])
            (ordinary if index < count else further.setdefault(index, set())).add(parts)
    if extra := sorted(index for index, parts in further.items() if parts <= ordinary):
        shown = ", ".join(map(str, extra[:_MAX_SHOWN])) + (" and more" if len(extra) > _MAX_SHOWN else "")
        raise ConfigError(
            f"the tensors of {path} do not fit its config.json: num_hidden_layers is {count}, and there are further "
            f"layers like the others: {shown}; correct config.json, or copy the whole checkpoint"
        )


def _has_own_head(path: Path, *, is_wrapped: bool) -> bool:
    heads, embeddings = [], []
    for shard in read_shards(path):
        for name, tensor in (text_tensors(shard.tensors) if is_wrapped else shard.tensors).items():
            place = (shard.file, shard.data_start, tensor)
            if name == HEAD:
                heads.append(place)
            elif name.endswith(EMBEDDINGS):
                embeddings.append(place)
    if not heads or len(embeddings) != 1:
        return False  # the check against the plan of the weights names what is missing
    return not _is_equal(heads[0], embeddings[0])


def _is_equal(first: tuple[Path, int, StoredTensor], second: tuple[Path, int, StoredTensor]) -> bool:
    one, other = first[2], second[2]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left = one.data_offsets[1] - one.data_offsets[0]
    with first[0].open("rb") as head, second[0].open("rb") as embedding:
        head.seek(first[1] + one.data_offsets[0])
        embedding.seek(second[1] + other.data_offsets[0])
        while left > 0:
            wanted = min(left, _CHUNK_BYTES)
            if head.read(wanted) != embedding.read(wanted):
                return False
            left -= wanted
    return True
