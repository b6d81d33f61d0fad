"""Answers of /v1/models in the forms of those who ask: OpenAI's, Anthropic's, and the list that the agent Codex reads.

Anthropic's clients send a header, and Codex (0.171) its version as a query parameter. What Codex does not find in its
own list of models it takes from ours: the context that a model has, and that it reads text only. Without it Codex warns
at each start, and assumes a context of its own.

Owns: the forms. Must not know: where models come from, who may use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from argosy_protocol.openai import ModelCard, ModelList

ANTHROPIC_HEADER: Final = "anthropic-version"
CODEX_QUERY: Final = "client_version"

_MAX_OUTPUT_TOKENS: Final = 10_000
"""Tokens of a tool's output that Codex shows its own models."""
_OUTPUT_SHARE: Final = 8
"""A tool's output takes this part of a small context at most."""
_INSTRUCTIONS: Final = """\
You are a coding agent. You work in the user's terminal, in the directory that the conversation names, with the tools \
that you are given.

- Look before you change: read the files that matter, and search with `rg`, or with `grep` where there is none.
- Do the whole task, and nothing beside it. Keep to the style of the code that is there.
- Edit files by commands, a few lines by `apply_patch`. Do not commit unless you are asked to.
- Run what shows that your change works, such as the tests nearest to it. If something fails, find out why.
- Say in a sentence what you are about to do before you call tools. At the end say briefly what you have done, and \
what is left. Claim nothing that you have not seen.
"""
"""What Codex tells a model before everything else. The field is required; Codex's own texts are for its own models."""


class AnthropicModel(Struct, frozen=True, kw_only=True, tag="model", tag_field="type"):
    id: str
    display_name: str
    created_at: str
    lifecycle: str = "active"
    max_input_tokens: int | None = None
    max_tokens: int | None = None


class AnthropicModelList(Struct, frozen=True, kw_only=True):
    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class CodexTruncation(Struct, frozen=True, kw_only=True):
    mode: str = "tokens"
    limit: int


class CodexModel(Struct, frozen=True, kw_only=True):
    """The fields that Codex requires, and those in which a model of ours differs from its defaults."""

    slug: str
    display_name: str
    base_instructions: str = _INSTRUCTIONS
    context_window: int | None
    default_reasoning_level: None = None
    supported_reasoning_levels: tuple[()] = ()
    supports_reasoning_summaries: bool = False
    shell_type: str = "unified_exec"
    visibility: str = "list"
    supported_in_api: bool = True
    priority: int
    support_verbosity: bool = False
    supports_parallel_tool_calls: bool = True
    truncation_policy: CodexTruncation
    input_modalities: tuple[str, ...] = ("text",)
    experimental_supported_tools: tuple[()] = ()


class CodexModelList(ModelList, frozen=True, kw_only=True):
    models: list[CodexModel]


def encoded_models(cards: Sequence[ModelCard], *, is_anthropic: bool, is_codex: bool) -> bytes:
    """Encode a list of models.

    Args:
        is_anthropic: the request has `ANTHROPIC_HEADER`.
        is_codex: its query has `CODEX_QUERY`.
    """
    if is_anthropic:
        models = [_anthropic_model(card) for card in cards]
        first, last = (models[0].id, models[-1].id) if models else (None, None)
        return msgspec.json.encode(AnthropicModelList(data=models, first_id=first, last_id=last))
    if is_codex:
        known = [_codex_model(card, priority) for priority, card in enumerate(cards)]
        return msgspec.json.encode(CodexModelList(data=list(cards), models=known))
    return msgspec.json.encode(ModelList(data=list(cards)))


def encoded_model(card: ModelCard, *, is_anthropic: bool) -> bytes:
    """Encode one model; see `encoded_models`."""
    shown: Any = _anthropic_model(card) if is_anthropic else card
    return msgspec.json.encode(shown)


def _anthropic_model(card: ModelCard) -> AnthropicModel:
    created = datetime.fromtimestamp(card.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    limit = card.max_model_len
    return AnthropicModel(
        id=card.id, display_name=card.id, created_at=created, max_input_tokens=limit, max_tokens=limit
    )


def _codex_model(card: ModelCard, priority: int) -> CodexModel:
    limit = card.max_model_len
    shown = _MAX_OUTPUT_TOKENS if limit is None else min(_MAX_OUTPUT_TOKENS, limit // _OUTPUT_SHARE)
    return CodexModel(
        slug=card.id,
        display_name=card.id,
        context_window=limit,
        priority=priority,
        truncation_policy=CodexTruncation(limit=max(1, shown)),
    )
