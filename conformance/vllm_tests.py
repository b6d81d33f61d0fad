"""The files of vLLM's tests that are run, in an order in which neighbours share a server, and what is left out of
them. A test that only the conformance model's skill decides stays in: the report names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PROMPT_EMBEDS = "needs prompt embeddings as input"
LORA = "needs LoRA adapters"
OTHER_PARSERS = {r"\[(?!hermes\])": "needs a model that writes tool calls in another form"}


@dataclass(frozen=True)
class TestFile:
    """A file of tests.

    Attributes:
        skip: patterns of test names, and why these tests are left out.
        kept: flags that the tests depend on, and that are left out of the command lines of other files.
        thinks: leave reasoning on although the file names no reasoning parser, because tests render prompts, too.
        own_server: start a server for each use, because the tests count what it did.
    """

    __test__ = False
    skip: Mapping[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    thinks: bool = False
    own_server: bool = False


NOT_RUN = {
    "entrypoints/pooling": "need models that embed or classify (multilingual-e5, bge, ms-marco, ColBERT)",
    "entrypoints/launchers/test_run_batch.py": "start vLLM's command run-batch; the router has OpenAI's Batch API",
    "entrypoints/launchers/test_shutdown.py": "look for vLLM's processes by their names",
    "entrypoints/multimodal": "need models for images, audio and video",
    "entrypoints/speech_to_text": "need models for audio",
    "entrypoints/openai/responses/test_harmony.py": "needs gpt-oss-20b",
    "entrypoints/openai/responses/test_mcp_tools.py": "needs gpt-oss-20b and tools on the server's side",
    "entrypoints/openai/responses/test_parsable_context.py": "needs tools on the server's side",
    "entrypoints/openai/test_openai_schema.py": "needs a model for images; make fuzz does the same with ours",
    "entrypoints/openai/models/test_models.py": LORA,
    "entrypoints/serve/lora": LORA,
    "entrypoints/serve/sagemaker": "need a package that replaces handlers within vLLM's process",
    "entrypoints/tool_parsers": "need models with adapters, granite and gpt-oss-20b",
    "entrypoints/rl": "need several devices or vLLM's ways to exchange weights",
    "entrypoints/scale_out": "test vLLM's endpoints between its own parts",
    "entrypoints/cohere": "test Cohere's chat API, which the engine does not have",
    "entrypoints/generate": "test scores of vLLM's own endpoints /generative_scoring and structured decisions",
}
"""Files and folders with tests of servers that are not run, and why."""

SKIPPED = {
    r"lora|zephyr-lora": LORA,
    r"watermarked": "needs vLLM's watermarks",
    r"multimodal": "needs a model for images",
    r"kv_transfer": "needs a KV connector",
}
"""Patterns of test names in any file, and why these tests are left out."""

MODEL_NAMES = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen2-1.5B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
    "HuggingFaceH4/zephyr-7b-beta",
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "NousResearch/Hermes-3-Llama-3.1-8B",
    "facebook/opt-125m",
    "openai-community/gpt2",
    "intfloat/multilingual-e5-small",
)
"""Names of models in the tests, under all of which each server knows the conformance model."""

CHAT = "entrypoints/openai/chat_completion"
COMPLETION = "entrypoints/openai/completion"
RESPONSES = "entrypoints/openai/responses"
SERVE = "entrypoints/serve"

TESTS: dict[str, TestFile] = {
    f"{CHAT}/test_chat_completion.py": TestFile(),
    f"{CHAT}/test_chat_logit_bias_validation.py": TestFile(),
    f"{CHAT}/test_logprob_token_ids.py": TestFile(),
    f"{CHAT}/test_batched_chat_completions.py": TestFile(),
    f"{CHAT}/test_chat.py": TestFile(),
    f"{COMPLETION}/test_prompt_validation.py": TestFile(skip={"prompt_embeds": PROMPT_EMBEDS}),
    "entrypoints/openai/test_chunked_prompt.py": TestFile(),
    f"{SERVE}/instrumentator/test_orca_metrics.py": TestFile(),
    f"{CHAT}/test_chat_echo.py": TestFile(),
    f"{CHAT}/test_completion_with_function_calling.py": TestFile(),
    f"{CHAT}/test_include_reasoning.py": TestFile(),
    f"{CHAT}/test_thinking_token_budget.py": TestFile(
        skip={"spec_decode|speculative|mtp": "needs a draft model and several GPUs"}
    ),
    f"{CHAT}/test_enable_force_include_usage.py": TestFile(),
    f"{CHAT}/test_root_path.py": TestFile(),
    f"{COMPLETION}/test_completion.py": TestFile(),
    f"{COMPLETION}/test_token_in_token_out.py": TestFile(),
    "entrypoints/openai/test_return_token_ids.py": TestFile(),
    "entrypoints/openai/test_return_tokens_as_ids.py": TestFile(),
    f"{RESPONSES}/test_basic.py": TestFile(),
    f"{RESPONSES}/test_stateful.py": TestFile(),
    f"{RESPONSES}/test_structured_output.py": TestFile(),
    f"{RESPONSES}/test_function_call.py": TestFile(),
    f"{RESPONSES}/test_simple.py": TestFile(),
    "entrypoints/anthropic/test_messages.py": TestFile(),
    f"{SERVE}/tokenize/test_tokenization.py": TestFile(thinks=True),
    f"{SERVE}/instrumentator/test_basic.py": TestFile(kept=frozenset({"max-model-len"})),
    f"{SERVE}/instrumentator/test_metrics.py": TestFile(
        own_server=True, skip={"run_batch": "starts vLLM's batch program in this process's environment"}
    ),
    f"{SERVE}/instrumentator/test_uds.py": TestFile(),
    f"{SERVE}/middleware/test_optional_middleware.py": TestFile(
        skip={"v2_endpoint_accepts": "needs an embedding model"}
    ),
    "tool_use/test_chat_completions.py": TestFile(skip=OTHER_PARSERS),
    "tool_use/test_parallel_tool_calls.py": TestFile(skip=OTHER_PARSERS),
    "tool_use/test_tool_calls.py": TestFile(skip=OTHER_PARSERS),
}
"""Maps files, below vLLM's `tests`, to what is particular about them."""

ANTHROPIC_USAGE = (
    "by design: input_tokens of message_start leaves out tokens that the cache had, as Anthropic defines it"
)
CUT_OFF = (
    "the model's arguments of a required call go on until they are cut off: the stream ends with response.incomplete, "
    "as OpenAI's does, where vLLM always sends response.completed"
)
LAST_EVENT = "by design: the finish reason has an event of its own, without text or tokens, as OpenAI's"
SHORT_ANSWER = "the model's answer may end before the test looks for a running request"
_TYPES = f"{RESPONSES}/test_function_call.py::test_function_calling_with_streaming_types"
_LONG_PROMPTS = "entrypoints/openai/test_chunked_prompt.py"
DIFFERENCES: dict[str, str] = {
    f"{CHAT}/test_chat.py::test_custom_role": "by design: a role that the chat template does not render is refused",
    f"{CHAT}/test_chat.py::test_chat_completion_stream_options[HuggingFaceH4/zephyr-7b-beta]": LAST_EVENT,
    f"{CHAT}/test_chat.py::test_chat_streaming[HuggingFaceH4/zephyr-7b-beta]": LAST_EVENT,
    f"{CHAT}/test_enable_force_include_usage.py::test_chat_with_enable_force_include_usage": LAST_EVENT,
    f"{_LONG_PROMPTS}::test_chat_completion_stream_options_and_logprobs_with_long_prompts": LAST_EVENT,
    "entrypoints/anthropic/test_messages.py::test_anthropic_streaming": ANTHROPIC_USAGE,
    "entrypoints/anthropic/test_messages.py::test_anthropic_streaming_cache_usage": ANTHROPIC_USAGE,
    **{
        f"{_TYPES}[{thinking}-{choice}-Qwen/Qwen3-1.7B]": CUT_OFF
        for thinking in (True, False)
        for choice in ("required", "tool_choice2")
    },
    **{
        f"{SERVE}/instrumentator/test_metrics.py::test_abort_metrics_reset[{flag}-text]": SHORT_ANSWER
        for flag in ("", "--enable-chunked-prefill", "--show-hidden-metrics-for-version=0")
    },
    f"{SERVE}/instrumentator/test_basic.py::test_server_load[enable-server-load-tracking]": SHORT_ANSWER,
}
"""Maps tests that only vLLM's server passes to the reason: a decision of ours, or what the model cannot do."""
