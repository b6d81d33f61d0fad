"""Pooling file: finds out whether a checkpoint is served for pooling, and how, from its files and the flags.

Sources, the first that says something wins: the flags, sentence-transformers' modules.json with the files that it
names, config.json, the architecture's name. Design: vLLM's `ModelConfig` and `get_pooling_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import RawConfig, read_json, read_json_value
from argosy_engine.model_configs.model_use import (
    MAX_LABELS,
    ModelUse,
    PoolerConfig,
    PoolingSpec,
    PoolingTask,
    PoolingType,
)
from argosy_engine.models import registry

MODULES = "modules.json"
_POOLING_TYPES: Mapping[str, PoolingType] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
}
"""sentence-transformers' names of what we compute."""
_KNOWN_MODULES = ("Transformer", "Pooling", "Normalize")
_MAX_MODULES = 16
_LABEL_ACTIVATIONS = {"Identity": "none", "Sigmoid": "classes", "Softmax": "classes"}
"""Classes of torch.nn.modules that a config may name as the activation of a cross-encoder."""


class _Modules(NamedTuple):
    """What modules.json says."""

    pooling_type: PoolingType | None
    normalizes: bool


def pooling_spec(
    path: Path, raw: RawConfig, use: ModelUse, *, is_wrapped: bool, encoder_head: PoolingType | None = None
) -> PoolingSpec | None:
    """Return how a checkpoint pools; None if it is served to generate.

    Args:
        raw: config.json with the overrides.
        is_wrapped: whether it is the text part of a model for images that transformers' code runs.
        encoder_head: of an encoder, which states its head for labels takes; None: it is a decoder.

    Raises:
        ConfigError: the checkpoint cannot be used so, flags contradict each other, or a file is malformed.
    """
    architecture = raw["architectures"][0]
    own_task = registry.pooling_task(architecture)
    asked = use.pooler_config.task or (use.convert if use.convert in ("embed", "classify") else None)
    if use.convert in ("embed", "classify") and asked != use.convert:
        raise ConfigError(f"--pooler-config asks for the task {asked}, and --convert for {use.convert}")
    runner = use.runner
    if is_wrapped:
        if asked is not None or runner == "pooling":
            raise ConfigError(
                f"{architecture} is run by transformers' modelling code with parts for images, which only generates "
                "here: leave out what asks for pooling, or serve a model for texts"
            )
        runner = "generate"
    if runner == "auto":
        is_pooled = own_task is not None or asked is not None or (path / MODULES).is_file()
        runner = "pooling" if is_pooled else "generate"
    if runner == "generate":
        if own_task is not None:
            raise ConfigError(f"{architecture} does not generate; leave --runner generate out")
        if asked is not None:
            raise ConfigError(f"--runner generate does not pool; leave out what asks for {asked}")
        if use.pooler_config != PoolerConfig():
            raise ConfigError("--pooler-config needs --runner pooling: this model generates")
        return None
    if use.convert == "none" and own_task is None:
        raise ConfigError(
            f"{architecture} generates: --runner pooling needs --convert embed or classify, or auto"
        )
    task: PoolingTask = asked or own_task or "embed"
    config = use.pooler_config
    asked_type = config.pooling_type or config.seq_pooling_type
    modules = _modules(path, reads_pooling=asked_type is None)
    default: PoolingType = "last" if encoder_head is None else "cls"
    pooling_type: PoolingType = modules.pooling_type or default if modules is not None else default
    if asked_type is not None:
        pooling_type = asked_type.lower()  # type: ignore[assignment]
    if task == "embed":
        return PoolingSpec(
            pooling_type=pooling_type,
            use_activation=_first(config.use_activation, modules.normalizes if modules else None, True),
            dimensions=config.dimensions,
        )
    if config.dimensions is not None:
        raise ConfigError("--pooler-config: dimensions are of embeddings, and this model classifies")
    tokens, is_two_way = _label_tokens(raw)
    if encoder_head is not None:
        if tokens:
            raise ConfigError(
                "classifier_from_token is of models that generate; an encoder has a head of its own"
            )
        if asked_type is not None and pooling_type != encoder_head:
            raise ConfigError(
                f"--pooler-config: the head of {architecture} takes {encoder_head.upper()}, not {asked_type}"
            )
        pooling_type = encoder_head
    labels = ("LABEL_0",) if is_two_way else tokens or _labels(raw)
    return PoolingSpec(
        task="classify",
        pooling_type=pooling_type,
        use_activation=_first(config.use_activation, None, True),
        activation=_activation(raw, len(labels)),
        labels=labels,
        label_token_ids=_token_ids(path, tokens),
        is_two_way=is_two_way,
        has_separate_texts=bool(_first(raw.get("use_sep_token"), None, not tokens)),
        logit_mean=_first(config.logit_mean, None, 0.0),
        logit_sigma=_first(config.logit_sigma, None, 1.0),
    )


def _first(asked: Any, found: Any, default: Any) -> Any:
    return asked if asked is not None else found if found is not None else default


def _modules(path: Path, *, reads_pooling: bool) -> _Modules | None:
    """Read modules.json; None if there is none.

    Args:
        reads_pooling: whether the file that it names for the pooling matters.

    Raises:
        ConfigError: it is malformed, or names a module that we do not compute.
    """
    file = path / MODULES
    if not file.is_file():
        return None
    entries = _read_list(file)
    pooling_type: PoolingType | None = None
    kinds = []
    for entry in entries:
        kind = str(entry.get("type", "")).rpartition(".")[2]
        if kind not in _KNOWN_MODULES:
            raise ConfigError(
                f"{file} names the module {kind[:100]!r}, which is not computed; there is: {', '.join(_KNOWN_MODULES)}"
            )
        kinds.append(kind)
        if kind == "Pooling" and reads_pooling:
            pooling_type = _pooling_type(path, entry.get("path"))
    return _Modules(pooling_type, "Normalize" in kinds)


def _read_list(file: Path) -> list[dict[str, Any]]:
    entries = read_json_value(file)
    if (
        not isinstance(entries, list)
        or len(entries) > _MAX_MODULES
        or not all(isinstance(each, dict) for each in entries)
    ):
        raise ConfigError(f"{file} is not a list of at most {_MAX_MODULES} modules")
    return entries


def _pooling_type(path: Path, folder: object) -> PoolingType | None:
    if not isinstance(folder, str) or not folder or "/" in folder or folder in (".", ".."):
        raise ConfigError(
            f"{path / MODULES} names the folder {str(folder)[:100]!r}; it must be in the model's own"
        )
    file = path / folder / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{file}, which {MODULES} names, is missing; copy it from the model's source, or say how it pools, such as "
            """--pooler-config '{"pooling_type": "LAST"}'"""
        )
    config = read_json(file)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if isinstance(named := config.get("pooling_mode"), str):
        modes.append(named)
    if not modes:
        return None
    if len(modes) > 1 or modes[0] not in _POOLING_TYPES:
        raise ConfigError(
            f"{file} pools by {', '.join(modes)[:200]}, which is not computed; there is, one at a time: "
            "pooling_mode_lasttoken, pooling_mode_mean_tokens, pooling_mode_cls_token"
        )
    return _POOLING_TYPES[modes[0]]


def _labels(raw: RawConfig) -> tuple[str, ...]:
    """Return the labels of config.json: transformers' default are two."""
    given = raw.get("id2label")
    if given is None:
        count = raw.get("num_labels")
        if count is None:
            return ("LABEL_0", "LABEL_1")
        if type(count) is not int or not 1 <= count <= MAX_LABELS:
            raise ConfigError(f"num_labels must be between 1 and {MAX_LABELS}")
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(given, dict) or not 1 <= len(given) <= MAX_LABELS:
        raise ConfigError(f"id2label must be an object of 1 to {MAX_LABELS} labels")
    by_index = {str(index): str(label) for index, label in given.items()}
    if by_index.keys() != {str(index) for index in range(len(by_index))}:
        raise ConfigError("id2label must number its labels from 0")
    return tuple(by_index[str(index)] for index in range(len(by_index)))


def _label_tokens(raw: RawConfig) -> tuple[tuple[str, ...], bool]:
    """Return the tokens whose rows of the output head score a prompt, and whether the second is weighed against the
    first."""
    tokens, method = raw.get("classifier_from_token"), raw.get("method")
    if raw.get("is_original_qwen3_reranker"):
        method = "from_2_way_softmax"
        if not tokens:
            raise ConfigError(
                'is_original_qwen3_reranker needs the tokens of its answers: "classifier_from_token": ["no", "yes"]'
            )
    if not tokens:
        return (), False
    if (
        not isinstance(tokens, Sequence)
        or isinstance(tokens, str)
        or not all(isinstance(t, str) for t in tokens)
    ):
        raise ConfigError("classifier_from_token must be a list of tokens")
    if method not in (None, "from_2_way_softmax", "no_post_processing"):
        raise ConfigError(
            f"method {str(method)[:100]!r} is not supported, only from_2_way_softmax and no_post_processing"
        )
    if method == "from_2_way_softmax" and len(tokens) != 2:
        raise ConfigError(f"from_2_way_softmax needs two tokens in classifier_from_token, not {len(tokens)}")
    return tuple(tokens), method == "from_2_way_softmax"


def _token_ids(path: Path, tokens: Sequence[str]) -> tuple[int, ...]:
    file = path / "tokenizer.json"
    if not tokens or not file.is_file():
        return tuple(
            range(len(tokens))
        )  # no engine starts without a tokenizer; `argosy doctor` needs the number only
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"cannot read {file}: {error}") from None
    ids = []
    for token in tokens:
        id_ = tokenizer.token_to_id(token)
        if id_ is None:
            raise ConfigError(f"classifier_from_token: the tokenizer has no token {token[:100]!r}")
        ids.append(id_)
    return tuple(ids)


def _activation(raw: RawConfig, num_labels: int) -> Any:
    """Return the activation of scores, as transformers and sentence-transformers choose it."""
    classes = "sigmoid" if num_labels < 2 else "softmax"
    match raw.get("problem_type"):
        case "regression":
            return "none"
        case "multi_label_classification":
            return "sigmoid"
        case "single_label_classification":
            return classes
    of_encoder = raw.get("sentence_transformers")
    named = of_encoder.get("activation_fn") if isinstance(of_encoder, Mapping) else None
    named = named or raw.get("sbert_ce_default_activation_function")
    if named is None:
        return classes
    module, _, name = str(named).rpartition(".")
    if not module.startswith("torch.nn.modules") or name not in _LABEL_ACTIVATIONS:
        raise ConfigError(
            f"the activation {str(named)[:100]!r} is not supported; there is: {', '.join(_LABEL_ACTIVATIONS)} of "
            "torch.nn.modules"
        )
    return classes if _LABEL_ACTIVATIONS[name] == "classes" else "none"
