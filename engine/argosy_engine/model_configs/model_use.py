"""How a model is used: to generate, or for pooling; what the flags say of that (ModelUse), and what a pooling model
computes of a prompt instead of generating (PoolingSpec). No torch. Names are vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from argosy_engine.errors import ConfigError

PoolingType = Literal["last", "mean", "cls"]
"""Which hidden states become the vector: the last token's, the mean over all tokens, or the first token's."""
PoolingTask = Literal["embed", "classify"]
"""`embed`: the vector of hidden states; `classify`: a score for each label, from a head over that vector."""
MAX_LABELS = 1 << 16


class PoolingSpec(Struct, frozen=True, kw_only=True):
    """Resolved from the checkpoint and the flags (`models.pooling_file`)."""

    task: PoolingTask = "embed"
    pooling_type: PoolingType = "last"
    use_activation: bool = True
    """Whether requests that do not say get `activation`."""
    activation: Literal["normalize", "softmax", "sigmoid", "none"] = "normalize"
    """Of embeddings: `normalize` scales them to length 1. Of scores: as in transformers, by the problem type."""
    dimensions: int | None = None
    """Leading elements that embeddings have unless a request says otherwise; None: all."""
    labels: Annotated[tuple[str, ...], Meta(max_length=MAX_LABELS)] = ()
    """Names of the scores."""
    label_token_ids: tuple[int, ...] = ()
    """Tokens whose rows of the output head are the head of the scores; empty: the checkpoint has one of its own."""
    is_two_way: bool = False
    """Whether there are two such tokens, and the head is the second one's row less the first one's, so that the sigmoid
    of the score is the second one's share in the softmax over both."""
    has_separate_texts: bool = True
    """Whether the two texts of a pair are tokenised as a pair, as the tokenizer joins them, rather than as one text."""
    logit_mean: float = 0.0
    """Subtracted from scores before the activation, and"""
    logit_sigma: float = 1.0
    """the number that they are divided by then."""

    @property
    def num_labels(self) -> int:
        return len(self.labels)


Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]
ModelImpl = Literal["auto", "argosy", "transformers"]
SequencePooling = Literal["LAST", "MEAN", "CLS"]
Finite = Annotated[float, Meta(ge=-1e6, le=1e6)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]


class PoolerConfig(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`--pooler-config`: how a pooling model pools, over what its checkpoint says."""

    task: PoolingTask | None = None
    pooling_type: SequencePooling | None = None
    seq_pooling_type: SequencePooling | None = None
    """The same as `pooling_type`."""
    use_activation: bool | None = None
    """Whether embeddings are normalised and scores become probabilities."""
    dimensions: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    logit_mean: Finite | None = None
    logit_sigma: Finite | None = None

    def check(self) -> None:
        """
        Raises:
            ConfigError: fields contradict each other, or are out of bounds.
        """
        if self.pooling_type is not None and self.seq_pooling_type is not None:
            raise ConfigError("--pooler-config: give pooling_type or seq_pooling_type, not both")
        if self.logit_sigma == 0:
            raise ConfigError("--pooler-config: logit_sigma must not be 0, because scores are divided by it")


class HfOverrides(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of config.json that `--hf-overrides` overrides; these are checked by type, `others` as config.json is."""

    is_matryoshka: bool | None = None
    matryoshka_dimensions: (
        Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 24)], ...], Meta(max_length=256)] | None
    ) = None
    architectures: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=1)] | None = None
    classifier_from_token: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=256)] | None = None
    """Tokens whose rows of the output head score a prompt."""
    method: Literal["from_2_way_softmax", "no_post_processing"] | None = None
    """How `classifier_from_token` is used."""
    is_original_qwen3_reranker: bool | None = None
    """Short for the method `from_2_way_softmax`."""
    use_sep_token: bool | None = None
    """Whether the texts of a pair are tokenised as a pair."""
    others: dict[str, Any] = {}
    """All other fields, most of which affect the decoder's computation."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> HfOverrides:
        """
        Raises:
            ConfigError: a field has a value of the wrong type, or too many values.
        """
        known = {
            name: value
            for name, value in fields.items()
            if name in cls.__struct_fields__ and name != "others"
        }
        others = {name: value for name, value in fields.items() if name not in known}
        try:
            return msgspec.convert({**known, "others": others}, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--hf-overrides: {error}") from None

    def of_config(self) -> dict[str, Any]:
        """Return the fields that are set and say how the model is loaded, as config.json has them. The others are read
        where requests are checked."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        others = fields.pop("others", {})
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in fields.items()
            if "matryoshka" not in name and value is not None
        } | others


class ModelUse(Struct, frozen=True, kw_only=True):
    """The flags together."""

    runner: Runner = "auto"
    convert: Convert = "auto"
    pooler_config: PoolerConfig = PoolerConfig()
    hf_overrides: HfOverrides = HfOverrides()
    model_impl: ModelImpl = "auto"


AS_IT_IS = ModelUse()
"""Without flags."""
