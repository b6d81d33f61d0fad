"""EncoderConfig: the config of an encoder for texts (BERT and its like), which transformers' modelling code computes.

Each token attends to all tokens of its prompt, so a prompt is computed whole in one step, and nothing is kept of it. No
torch.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from argosy_engine.attention.params import AttentionParams
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import RawConfig, Size
from argosy_engine.model_configs.pooling_spec import PoolingTask, PoolingType
from argosy_engine.model_configs.transformers_config import TransformersConfig, read_hf_config

_FAMILIES = (
    *(
        "Bert",
        "Camembert",
        "Deberta",
        "DebertaV2",
        "DistilBert",
        "Electra",
        "EuroBert",
        "Gte",
        "JinaEmbeddingsV3",
    ),
    *("MPNet", "ModernBert", "NomicBert", "Roberta", "XLMRoberta", "XLMRobertaXL"),
)
_TASKS: dict[str, PoolingTask] = {
    "ForSequenceClassification": "classify",
    "Model": "embed",
    "ForMaskedLM": "embed",
}
_TASK_OF = {f"{family}{end}": task for family in _FAMILIES for end, task in _TASKS.items()}
_OFFSET_POSITIONS = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"})
"""Model types that count positions from behind the padding token's id, so that their last ones are not used."""


class EncoderConfig(TransformersConfig, frozen=True, kw_only=True):
    """An encoder of transformers'."""

    computes_whole_prompts: ClassVar[bool] = True

    windows: tuple[Size | None, ...] = ()
    """Of each call of attention, how many tokens before and after itself a token attends to; None: all."""
    has_token_types: bool = False
    """Whether the tokens of a pair's second text are of another type."""
    first_position: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """Of a prompt's first token, where tokens that are padding do not count; 0: they do."""
    padding_id: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    """The token that counts as padding, if `first_position` is not 0."""
    runs_alone: bool = False
    """Whether its attention is not known from transformers' interface, so that each prompt is a pass of its own."""
    head_pooling: PoolingType = "cls"
    """Which states its head for labels takes."""

    @property
    def undivided_layers(self) -> str | None:
        return "an encoder runs on one device"

    @property
    def attention_layers(self) -> tuple[AttentionParams, ...]:
        return ()

    @classmethod
    def fields_of(cls, raw: RawConfig) -> dict[str, Any]:
        if raw.get("is_decoder"):
            raise ConfigError(
                "is_decoder: an encoder is served for pooling, not to generate; take that field out"
            )
        fields = super().fields_of(raw)
        config = read_hf_config(raw)
        first = padding = 0
        if config.model_type in _OFFSET_POSITIONS:
            # MPNet's is 1 whatever the config says, as in transformers.
            padding = 1 if config.model_type == "mpnet" else config.pad_token_id
            first = padding + 1
        pooling = getattr(config, "classifier_pooling", None)
        return {
            **fields,
            "max_position_embeddings": fields["max_position_embeddings"] - first,
            "first_position": first,
            "padding_id": padding,
            "has_token_types": (getattr(config, "type_vocab_size", None) or 1) > 1,
            "head_pooling": pooling if pooling in ("cls", "mean") else "cls",
        }


def encoder_task(architecture: str) -> PoolingTask | None:
    """Return what an encoder's architecture is for; None if it is none that we know."""
    return _TASK_OF.get(architecture)
