"""Resolves the engine's configuration from its arguments and what the worker has found: model, device and memory."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.device_defaults import async_scheduling
from argosy_engine.errors import ConfigError
from argosy_engine.messages.worker_info import WorkerInfo
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.resolved_config import ParserConfig, ResolvedConfig


def resolve_config(args: EngineArgs, info: WorkerInfo) -> ResolvedConfig:
    """Return the configuration of a new engine, with an epoch of its own."""
    is_matryoshka, dimensions = _matryoshka(args, info.config)
    parsers = ParserConfig(
        enable_auto_tool_choice=args.enable_auto_tool_choice,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        tool_parser_plugin=args.tool_parser_plugin,
    )
    return ResolvedConfig(
        model_path=info.model_path,
        model_name=args.canonical_name,
        model_fingerprint=_fingerprint(info.model_fingerprint, parsers),
        architecture=info.config.architecture,
        device=info.device,
        dtype=info.dtype,
        max_model_len=info.memory.max_model_len,
        vocab_size=info.config.vocab_size,
        embedding_size=info.config.pooled_size,
        is_matryoshka=is_matryoshka,
        matryoshka_dimensions=dimensions,
        block_size=args.block_size,
        num_gpu_blocks=info.memory.num_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_queued_reqs=args.max_num_queued_reqs,
        max_num_queued_tokens=args.max_num_queued_tokens,
        scheduling_policy=args.scheduling_policy,
        async_scheduling=async_scheduling(args, info.device),
        epoch=secrets.token_hex(8),
        eos_token_ids=info.config.eos_token_ids,
        logits_processors=args.logits_processors,
        max_logprobs=args.max_logprobs,
        logprobs_mode=args.logprobs_mode,
        startup_phases=info.phases,
        memory=info.memory,
        seed=info.seed if args.seed is None else args.seed,
        has_copies=args.executor_backend == "external_launcher",
        parsers=parsers,
        request_defaults=args.request_defaults,
        pooling=info.config.pooling,
        kv_cache_metrics=args.kv_cache_metrics,
    )


def _fingerprint(workers: str, parsers: ParserConfig) -> str:
    """Return the workers' fingerprint (`checkpoint.fingerprint`) together with how the model's output is parsed, which
    only processes with clients know. Without flags for that it is the workers'.

    Raises:
        ConfigError: the plugin cannot be read.
    """
    if parsers == ParserConfig():
        return workers
    named = msgspec.structs.replace(parsers, tool_parser_plugin=None)
    digest = hashlib.sha256(workers.encode() + msgspec.json.encode(named, order="deterministic"))
    if (plugin := parsers.tool_parser_plugin) is not None:
        try:
            digest.update(Path(plugin).read_bytes())
        except OSError as error:
            raise ConfigError(f"--tool-parser-plugin {plugin}: {error.strerror}") from None
    return digest.hexdigest()[: len(workers)]


def _matryoshka(args: EngineArgs, config: ModelConfig) -> tuple[bool, tuple[int, ...]]:
    """Return whether embeddings may be truncated, and to which dimensions.

    `--hf-overrides` takes precedence over the checkpoint's config.
    """
    asked = args.model_use.hf_overrides
    dimensions = config.matryoshka_dimensions
    if asked.matryoshka_dimensions is not None:
        dimensions = asked.matryoshka_dimensions
    is_matryoshka = config.is_matryoshka if asked.is_matryoshka is None else asked.is_matryoshka
    return is_matryoshka or bool(dimensions), dimensions
