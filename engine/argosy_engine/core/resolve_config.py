"""Resolves the engine's configuration from its arguments and what the worker has found: model, device and memory."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

import msgspec

from argosy_engine.checkpoint.tokenizer_files import prepare_tokenizer, tokenizer_source
from argosy_engine.config import EngineArgs, async_scheduling
from argosy_engine.errors import ConfigError
from argosy_engine.messages import WorkerInfo
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.resolved_config import ParserConfig, ResolvedConfig, TokenizerConfig


def resolve_config(args: EngineArgs, info: WorkerInfo) -> ResolvedConfig:
    """Return the configuration of a new engine, with an epoch of its own.

    Raises:
        ConfigError: the plugin, or the tokenizer, cannot be read.
    """
    is_matryoshka, dimensions = _matryoshka(args, info.config)
    parsers = ParserConfig(
        enable_auto_tool_choice=args.enable_auto_tool_choice,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        tool_parser_plugin=args.tool_parser_plugin,
    )
    tokenizer = _tokenizer(args, Path(info.model_path))
    media = args.media_config(info.config.vision)
    has_own = (Path(info.model_path) / "tokenizer.json").is_file()
    pooling = info.config.pooling
    if tokenizer != TokenizerConfig() and not has_own and pooling is not None and pooling.label_token_ids:
        raise ConfigError(
            "classifier_from_token names tokens of a tokenizer.json in the model's own folder, which has none; put one "
            "there"
        )
    return ResolvedConfig(
        model_path=info.model_path,
        model_name=args.canonical_name,
        model_fingerprint=_fingerprint(info.model_fingerprint, parsers, tokenizer, media.setting()),
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
        tokenizer=tokenizer,
        request_defaults=args.request_defaults,
        media=media,
        pooling=info.config.pooling,
        kv_cache_metrics=args.kv_cache_metrics,
    )


def _tokenizer(args: EngineArgs, model: Path) -> TokenizerConfig:
    """Return where the tokenizer is, converted if it is no tokenizer.json.

    Raises:
        ConfigError: there is none that can be read.
    """
    path = args.tokenizer_path or model
    if path == model and tokenizer_source(path, {file.name for file in path.iterdir()}, "auto") is None:
        return TokenizerConfig()  # the core reads tokens; a client that reads texts says what is missing
    prepared = prepare_tokenizer(path, args.tokenizer_mode)
    return TokenizerConfig(
        path=None if path == model else str(path),
        folder=None if prepared.folder == path else str(prepared.folder),
        mistral_file=None if prepared.mistral_file is None else str(prepared.mistral_file),
    )


def _fingerprint(workers: str, parsers: ParserConfig, tokenizer: TokenizerConfig, media: str) -> str:
    """Return the workers' fingerprint (`checkpoint.fingerprint`) together with how prompts are tokenised, images
    processed and output is parsed, which only processes with clients know. Without flags and conversions for that it is
    the workers'.

    Raises:
        ConfigError: the plugin, or the tokenizer, cannot be read.
    """
    if parsers == ParserConfig() and tokenizer == TokenizerConfig() and not media:
        return workers
    named = msgspec.structs.replace(parsers, tool_parser_plugin=None)
    digest = hashlib.sha256(workers.encode() + msgspec.json.encode(named, order="deterministic"))
    if tokenizer != TokenizerConfig():
        digest.update(_digest_of(tokenizer))
    digest.update(media.encode())
    if (plugin := parsers.tool_parser_plugin) is not None:
        try:
            digest.update(Path(plugin).read_bytes())
        except OSError as error:
            raise ConfigError(f"--tool-parser-plugin {plugin}: {error.strerror}") from None
    return digest.hexdigest()[: len(workers)]


def _digest_of(tokenizer: TokenizerConfig) -> bytes:
    files = [Path(tokenizer.mistral_file)] if tokenizer.mistral_file else []
    if (folder := tokenizer.folder or tokenizer.path) is not None:
        files.append(Path(folder) / "tokenizer.json")
    if tokenizer.path is not None:
        names = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
        files += [Path(tokenizer.path) / name for name in names]
    digest = hashlib.sha256()
    for file in files:
        try:
            content = file.read_bytes() if file.is_file() else b""
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from None
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


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
