"""PoolingSpec: what a model that is served for pooling computes of a prompt, instead of generating. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

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
