"""The fields of a request that are forwarded to an engine of another make.

Owns: the list of fields. Must not know: what the fields mean to an engine.

Engines of other makes take fields by which their own routers direct them: where to fetch a KV cache, which rank
computes, which adapter to load, which session to continue, which id to abort by. So only documented fields of a
client's request pass: OpenAI's and Anthropic's, and vLLM's and SGLang's for sampling, templates and output. All others
are dropped, as engines themselves ignore fields they do not know: clients send many fields of other vendors, and to
refuse those would break the clients. Fields known to be internal are refused by name
(`protocol.openai.InternalFields`). Of an endpoint whose requests the router does not decode in full, only the fields of
that endpoint pass, because the others were checked by nobody.
"""

from __future__ import annotations

from typing import Final

import msgspec

from argosy_protocol.anthropic import CountTokensRequest, MessagesRequest
from argosy_protocol.embeddings import EmbeddingRequest
from argosy_protocol.openai import InternalFields
from argosy_protocol.pooling import ClassificationRequest, PoolingRequest
from argosy_protocol.responses import ResponsesRequest
from argosy_protocol.scoring import RerankRequest, ScoreRequest

_OPENAI: Final = frozenset(
    (
        *(
            "best_of",
            "echo",
            "frequency_penalty",
            "function_call",
            "functions",
        ),
        *("logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "messages", "metadata"),
        *("modalities", "model", "n", "parallel_tool_calls", "prediction", "presence_penalty", "prompt"),
        *("prompt_cache_key", "reasoning_effort", "response_format", "safety_identifier", "seed"),
        *(
            "service_tier",
            "stop",
            "store",
            "stream",
            "stream_options",
            "suffix",
            "temperature",
            "tool_choice",
        ),
        *("tools", "top_logprobs", "top_p", "user", "verbosity", "web_search_options"),
    )
)
_VLLM: Final = frozenset(
    (
        *("add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words", "cache_salt"),
        *("chat_template", "chat_template_kwargs", "continue_final_message", "documents", "guided_choice"),
        *("guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex"),
        *("guided_whitespace_pattern", "ignore_eos", "include_reasoning", "include_stop_str_in_output"),
        *("length_penalty", "logprob_token_ids", "min_p", "min_tokens", "mm_processor_kwargs"),
        *("priority", "prompt_logprobs", "repetition_detection", "repetition_penalty", "return_prompt_text"),
        *("return_token_ids", "return_token_offsets", "return_token_strs", "return_tokens_as_token_ids"),
        *("skip_special_tokens", "spaces_between_special_tokens", "stop_token_ids", "stream_interval"),
        *("structural_tag", "structured_outputs", "thinking_token_budget", "top_k"),
        *("truncate_prompt_tokens", "truncation_side", "use_beam_search"),
    )
)
"""Not among them: `prompt_embeds` (a pickled tensor), `media_io_kwargs` (options of decoders), `request_id`."""
_SGLANG: Final = frozenset(
    (
        *("ebnf", "json_schema", "no_stop_trim", "reasoning", "regex", "return_prompt_token_ids"),
        *("separate_reasoning", "stop_regex", "stream_reasoning", "task"),
    )
)
"""Not among them: `input_ids` of a chat (the router could not tell its prefix), `extra_key`, `rid`, `session_id`, and
what makes answers large (`return_hidden_states`, `return_routed_experts`)."""
_INTERNAL: Final = frozenset(
    (
        *(*InternalFields.__struct_fields__, "data_parallel_rank", "resume"),
        *("mcp_servers", "container", "context_management"),  # refused if they ask for something
    )
)
_OWN: Final = frozenset(("background", "previous_response_id", "request_id", "session_id"))
"""What the router keeps or names itself: the state of responses, sessions and requests."""
_GENERATION: Final = _OPENAI | _VLLM | _SGLANG | {"vllm_xargs"}
_POOLING: Final = {
    "embeddings": EmbeddingRequest,
    "classify": ClassificationRequest,
    "pooling": PoolingRequest,
    "score": ScoreRequest,
    "rerank": RerankRequest,
}
_OTHER_NAMES: Final = frozenset(("data_1", "data_2", "normalize", "text_1", "text_2"))
"""Names that other versions of vLLM and other servers have for fields of ours."""
_TOKENIZE: Final = frozenset(
    (
        *("add_generation_prompt", "add_special_tokens", "chat_template", "chat_template_kwargs"),
        *("continue_final_message", "messages", "mm_processor_kwargs", "model", "prompt", "reasoning_effort"),
        *("return_token_strs", "tools"),
    )
)
_FIELDS: Final = {
    "chat/completions": _GENERATION,
    "chat/completions/batch": _GENERATION,
    "completions": _GENERATION,
    **{
        endpoint: frozenset(request.__struct_encode_fields__) - _INTERNAL - _OWN | _OTHER_NAMES
        for endpoint, request in _POOLING.items()
    },
    "messages": frozenset(MessagesRequest.__struct_encode_fields__) - _INTERNAL,
    "messages/count_tokens": frozenset(CountTokensRequest.__struct_encode_fields__) - _INTERNAL,
    "responses": frozenset(ResponsesRequest.__struct_encode_fields__) - _INTERNAL - _OWN,
    "responses/input_tokens": frozenset(ResponsesRequest.__struct_encode_fields__) - _INTERNAL - _OWN,
    "tokenize": _TOKENIZE,
    "detokenize": frozenset(("model", "tokens")),
}
"""By endpoint. `vllm_xargs` reach an engine's connectors of KV caches too, so that they pass only where their names are
checked."""

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def keep_foreign_fields(body: bytes, endpoint: str) -> bytes:
    """Return the JSON object `body` with foreign engines' fields of `endpoint` only, unchanged if it has no others."""
    known = _FIELDS[endpoint]
    fields = _fields.decode(body)
    if known.issuperset(fields):
        return body
    return msgspec.json.encode({name: value for name, value in fields.items() if name in known})
