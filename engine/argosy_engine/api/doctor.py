"""`argosy doctor MODEL`: prints device, attention backend and the memory budget of a start with these flags.

Reads config.json and the safetensors headers, of a remote model nothing else, whose files its source is asked for;
starts no device, and imports torch only to follow transformers' modelling code. A folder without tokenizer, or with
missing or damaged weights, is refused. The KV cache is sized by the function the worker uses, from an estimate of the
activations, so a start with the same memory free agrees with it. Without a model the built-in one is taken, which shows
the device. Flags of the server itself are taken and not looked at, so that its command line need not be changed.

Exit codes: 0 it fits, 1 it does not, or the model's source does not answer or the disk is full, 2 wrong usage, or a
model or device that cannot work.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec
from msgspec import Struct

from argosy_engine.api.engine_flag_parser import EngineFlagParser
from argosy_engine.api.server_args import ServerArgs
from argosy_engine.attention.selector import AttentionNeeds, BackendChoice, select_backend
from argosy_engine.checkpoint.fingerprint import OF_IMAGES
from argosy_engine.checkpoint.gguf_folder import stored_types
from argosy_engine.checkpoint.model_folder import check_folder
from argosy_engine.checkpoint.shards import checkpoint_elements, read_shards
from argosy_engine.checkpoint.stored_tensors import (
    check_further_layers,
    check_label_head,
    check_names,
    with_stored_experts,
    with_stored_head,
)
from argosy_engine.checkpoint.tokenizer_files import TokenizerSource, find_tokenizer
from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError, DoesNotFit, FetchFailed, installation
from argosy_engine.frontend.chat_template import ChatTemplate
from argosy_engine.frontend.model_source import budget_table, is_remote, model_headers, size
from argosy_engine.model_configs.model_config import (
    ModelConfig,
    check_pipeline_parallel,
    check_tensor_parallel,
    read_json,
)
from argosy_engine.model_configs.quantization_config import (
    INTEGER_BITS,
    check_online_quantization,
    check_quantization,
    no_fp8_product,
    no_integer_product,
    what_becomes,
)
from argosy_engine.model_configs.sharding import Stage, all_stages
from argosy_engine.model_configs.transformers_config import WIDENS, EncoderConfig, TransformersConfig
from argosy_engine.model_configs.vision_config import LargestImage
from argosy_engine.model_configs.wrapper_config import encoder_elements, text_tensors, without_parts
from argosy_engine.models.config_file import REPLACED_CODE, load_model_config, why_not_ours
from argosy_engine.native.build import describe_choice, has_kernels
from argosy_engine.parsers.parser_registry import choose_parsers
from argosy_engine.resolved_config import MemoryBudget, sampling_defaults
from argosy_engine.sizing.kv_cache_sizing import (
    CUDA_CONTEXT_BYTES,
    as_served,
    dummy_elements,
    encoder_cache_bytes,
    estimate_activations,
    estimate_weights,
    find_largest_image,
    plan_memory,
    planned_groups,
    rank_elements,
    scarcest,
    stage_elements,
    used_elements,
)
from argosy_engine.sizing.resources import DeviceMemory, check_gpus, choose_dtype, cpu_memory, gpu_memory

_EXIT_CODES = (
    "Exit codes: 0 it fits, 1 it does not, or the model's source does not answer or the disk is full, 2 wrong usage, "
    "or a model or device that cannot work."
)
_BUILT_IN = "builtin://tiny"
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class Diagnosis(Struct, kw_only=True):
    """Output of `-o json`. If the model does not fit, `budget` is null and `problem` says why."""

    fits: bool
    model: str
    architecture: str
    dtype: str
    device: DeviceMemory
    attention_backend: str
    refused_backends: dict[str, str]
    """Attention backends that would have been preferred, and why each cannot serve."""
    data_parallel_size: int
    budget: MemoryBudget | None = None
    """Of each data-parallel rank."""
    kv_cache_bytes: int | None = None
    kv_cache_tokens: int | None = None
    max_concurrency: float | None = None
    problem: str | None = None
    modelling_code: str = "argosy"
    """Whose code runs the model: `argosy` or `transformers`."""
    modelling_reason: str | None = None
    """Why it is transformers': what argosy's own code does not compute."""
    notices: tuple[str, ...] = ()
    """What a server would warn of at its start."""
    tokenizer: str | None = None
    """File that the tokenizer is read from, and by which library, unless it is the tokenizer.json of a remote model."""
    parsers: str | None = None
    """How tool calls and reasoning are parsed, and what speaks against that, if the model generates and is on this
    machine."""
    weights: str | None = None
    """In which schemes quantised weights are, or which types those of a GGUF file have, what becomes of them at load
    and why, and their size in the files."""
    kernels: str | None = None
    """Which CPU kernels compute, and by what they were chosen, if any do."""
    images: str | None = None
    """What becomes of images, if the model sees any."""
    text_part_of: str | None = None
    """Architecture of the model for images whose text part is served."""


def build_parser() -> EngineFlagParser:
    """Make the parser of the flags, all of `argosy serve` among them."""
    parser = EngineFlagParser(
        "argosy doctor", "Print device, memory and KV budget before a load.", _EXIT_CODES
    )
    parser.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="format (default: %(default)s)"
    )
    parser.add_config(ServerArgs, "server (not looked at)")
    parser.add_engine_flags()
    parser.add_vllm_flags(is_listed=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(argv)
    if options.model is None and options.named_model is None:
        options.model = _BUILT_IN
        print(
            f"argosy doctor: no model is given: this machine is checked with {_BUILT_IN}; argosy doctor MODEL checks "
            "yours",
            file=sys.stderr,
        )
    args = parser.engine_args(options)
    parser.check_vllm_flags(options, args)
    try:
        diagnosis = diagnose(args)
    except (ConfigError, FetchFailed) as error:
        print(f"argosy doctor: {error}", file=sys.stderr)
        return 1 if isinstance(error, FetchFailed) else 2
    if options.output == "json":
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(diagnosis), indent=2) + b"\n")
    else:
        print(_render(diagnosis))
    return 0 if diagnosis.fits else 1


def diagnose(args: EngineArgs, device: DeviceMemory | None = None) -> Diagnosis:
    """
    Args:
        device: replaces the detected device.

    Raises:
        ConfigError: no such model, a checkpoint that cannot be served or lacks files, or no such device.
        FetchFailed: the model's source does not answer.
    """
    with model_headers(args) as path:
        config = as_served(args, load_model_config(path, args.model_use))
        image = find_largest_image(args, config, path)
        sampling_defaults(path, args.request_defaults)
        has_weights = args.load_format != "dummy"
        tokenizer = args.tokenizer_path
        has_tokenizer = tokenizer is not None or not is_remote(args)
        check_folder(
            path,
            has_tokenizer=has_tokenizer,
            has_weights=has_weights,
            tokenizer=tokenizer,
            tokenizer_mode=args.tokenizer_mode,
        )
        source = find_tokenizer(tokenizer or path, args.tokenizer_mode) if has_tokenizer else None
        images = _images(args, path, config, source)
        parsers = _parsers(args, path, source) if config.pooling is None and not is_remote(args) else None
        elements = checkpoint_elements(path) if has_weights else dummy_elements(config)
        types = stored_types(path) if has_weights else {}
        is_foreign, stored_bytes = isinstance(config, TransformersConfig), 0
        num_encoder = 0 if config.vision is None else encoder_elements(elements)
        reason = why_not_ours(path, args.model_use) if is_foreign else None
        if has_weights:
            if not is_foreign:  # whose loader knows other names
                config = with_stored_experts(path, config)
                elements = text_tensors(elements) if config.wrapper is not None else elements
                check_further_layers(path, config, elements)
                elements = used_elements(config, elements)
                check_names(path, config, elements)
                config = with_stored_experts(path, config)
            elif config.wrapper is None and not isinstance(config, EncoderConfig):
                check_further_layers(path, config, elements)
                check_label_head(path, config, elements)
            stored_bytes = sum(
                tensor.data_offsets[1] - tensor.data_offsets[0]
                for shard in read_shards(path)
                for tensor in shard.tensors.values()
            )
            if not is_remote(args):  # of which there are headers only
                config = with_stored_head(path, config)
    ranks, stages = args.tensor_parallel_size, args.pipeline_parallel_size
    check_tensor_parallel(config, ranks, args.enable_expert_parallel, args.data_parallel_size)
    check_pipeline_parallel(config, stages)
    if isinstance(config, TransformersConfig):
        from argosy_engine.models.loader import complete_config  # which imports torch

        config.check_flags(args.quantization, has_fp8_kv_cache=args.has_fp8_kv_cache)
        config = complete_config(config, ranks)
        if isinstance(config, TransformersConfig) and config.wrapper is not None:
            elements = without_parts(elements, config.unserved_parts)
    check_quantization(config.quantization, args.quantization)
    device = device or _find_device(args)
    dtype = choose_dtype(args.dtype, config.dtype, device.device)
    layers = [layer.of_rank(ranks) for layer in config.attention_layers]
    needs = AttentionNeeds(device.device, dtype, args.block_size, layers, args.has_fp8_kv_cache)
    backend = select_backend(needs, args.attention_backend)
    refusal = no_fp8_product(dtype, device.device, backend.uses_triton)
    packs = _packs_integers(device.device, dtype, backend)
    integer_refusal = no_integer_product(device.device, dtype, has_kernels=packs)
    check_online_quantization(config.quantization, args.quantization, refusal, integer_refusal)
    weights: str | None = None
    if config.quantization is not None:
        refusals = (WIDENS, WIDENS) if is_foreign else (refusal, integer_refusal)
        has_experts = config.num_routed_experts > 0
        weights = what_becomes(config.quantization, dtype, *refusals, device.device, has_experts=has_experts)
        weights += f"; {size(stored_bytes)} in the files" if stored_bytes else ""
    elif args.quantization in INTEGER_BITS:
        weights = f"quantised to {args.quantization} as they are loaded, and multiplied as they are packed"
    if types:
        where = "on disk" if args.quantization else "on disk and in memory"
        parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in types.items())
        told = (
            f"GGUF weights {parts}: {size(sum(types.values()))} in the file, {size(stored_bytes)} {where}, "
            f"because they are widened to {dtype}"
        )
        weights = told if weights is None else f"{told}; {weights}"
    diagnosis = Diagnosis(
        fits=False,
        model=args.canonical_name,
        architecture=config.architecture,
        dtype=dtype,
        device=device,
        attention_backend=backend.name,
        refused_backends=dict(backend.refused),
        modelling_code="transformers" if is_foreign else "argosy",
        modelling_reason=reason,
        notices=(REPLACED_CODE,) if config.replaced_code else (),
        text_part_of=config.wrapper,
        tokenizer=None if source is None else str(source),
        parsers=parsers,
        images=images,
        data_parallel_size=args.data_parallel_size,
        weights=weights,
        kernels=describe_choice() if has_kernels(dtype, device.device) else None,
    )
    try:
        budget = scarcest(
            [
                _stage_budget(args, config, elements, num_encoder, image, device, dtype, backend, each)
                for each in all_stages(stages)
            ]
        )
    except DoesNotFit as error:
        diagnosis.problem = str(error)
        return diagnosis
    diagnosis.fits, diagnosis.budget = True, budget
    diagnosis.kv_cache_bytes, diagnosis.kv_cache_tokens = budget.kv_cache_bytes, budget.kv_cache_tokens
    diagnosis.max_concurrency = budget.max_concurrency
    return diagnosis


def _packs_integers(device: str, dtype: str, backend: BackendChoice) -> bool:
    """Whether our kernels multiply by integers as they are packed."""
    if device == "cuda":
        return backend.uses_triton and dtype != "float32"
    return has_kernels(dtype, device)


def _stage_budget(
    args: EngineArgs,
    config: ModelConfig,
    elements: Mapping[str, int],
    num_encoder: int,
    image: LargestImage | None,
    device: DeviceMemory,
    dtype: str,
    backend: BackendChoice,
    stage: Stage,
) -> MemoryBudget:
    """Return the budget of a worker of a pipeline stage.

    Args:
        elements: of each tensor of the checkpoint.
        num_encoder: elements of the encoder of images, of which every worker of the first stage has the whole.
        image: the largest.

    Raises:
        DoesNotFit: there is not enough memory.
    """
    ranks, itemsize = args.tensor_parallel_size, _ITEMSIZE[dtype]
    elements = stage_elements(config, elements, stage)
    expert_size = args.parallel_config.expert_size if args.enable_expert_parallel else ranks
    if max(ranks, expert_size) > 1:
        elements = rank_elements(config, elements, ranks, expert_size, stage)
    if not stage.is_first:
        num_encoder, image = 0, None
    activations = estimate_activations(config, args, itemsize, backend.name, image)
    return plan_memory(
        args,
        config,
        device,
        groups=planned_groups(
            config,
            1 if args.has_fp8_kv_cache else itemsize,
            args.block_size,
            ranks,
            stage,
            state_itemsize=itemsize,
        ),
        weights_bytes=estimate_weights(
            config,
            elements,
            itemsize,
            device.device,
            ranks,
            stage,
            args.quantization,
            keeps_integers=not config.widens_fp8 and _packs_integers(device.device, dtype, backend),
        )
        + num_encoder * itemsize,
        activation_bytes=encoder_cache_bytes(args, config, itemsize, stage)
        + activations
        + (CUDA_CONTEXT_BYTES if device.device == "cuda" else 0),
    )


def _parsers(args: EngineArgs, path: Path, source: TokenizerSource | None) -> str:
    """Say how outputs are parsed, or that there are no chats.

    Raises:
        ConfigError: the chat template does not compile.
    """
    family = "mistral" if source is not None and source.kind == "mistral" else None
    template = None if family else ChatTemplate.load(args.tokenizer_path or path, args.request_defaults)
    if template is None and family is None:
        return "none, without a chat template, which --chat-template can give"
    chosen = choose_parsers(
        None if template is None else template.source,
        read_json(path / "config.json"),
        tool_call_parser=args.tool_call_parser or family,
        reasoning_parser=args.reasoning_parser or family,
    )
    reasons = args.reasoning_parser is not None or (template is not None and template.has_thinking)
    if source is not None and source.kind == "mistral":
        reasons = reasons or b"[THINK]" in source.file.read_bytes()
    return chosen.described(has_thinking=reasons)


def _images(args: EngineArgs, path: Path, config: ModelConfig, source: TokenizerSource | None) -> str | None:
    """Say what becomes of images in requests; None if the model sees none."""
    media = args.media_config(config.vision)
    if config.vision is None:
        return None
    if media.why_blind:
        return f"refused, by {media.why_blind}"
    missing = [name for name in ("PIL", "transformers") if find_spec(name) is None]
    if missing:
        return f"refused: {' and '.join(missing)} cannot be imported; {installation('transformers')}"
    if not is_remote(args) and not any((path / name).is_file() for name in OF_IMAGES):
        return f"refused: the model's folder has neither {' nor '.join(OF_IMAGES)}"
    if source is not None and source.kind == "mistral":
        return (
            "refused: mistral-common writes the chats; with a tokenizer.json, --tokenizer-mode hf serves them"
        )
    return f"processed by transformers as {OF_IMAGES[0]} says, up to {media.max_images} in a prompt"


def _find_device(args: EngineArgs) -> DeviceMemory:
    check_gpus(args)
    gpu = gpu_memory() if args.device != "cpu" else None
    if args.device == "cuda" and gpu is None:
        raise ConfigError("--device cuda: there is no NVIDIA driver or GPU here; use --device auto or cpu")
    return gpu or cpu_memory()


def _render(diagnosis: Diagnosis) -> str:
    device, architecture = diagnosis.device, diagnosis.architecture
    if diagnosis.text_part_of is not None:
        architecture += f" (text part of {diagnosis.text_part_of})"
    lines = [
        f"{diagnosis.model}: {architecture}, {diagnosis.dtype} on {device.device} ({device.name})",
        f"memory {size(device.total_bytes)}, available {size(device.available_bytes)}",
    ]
    backend = BackendChoice(diagnosis.attention_backend, diagnosis.refused_backends)
    if diagnosis.modelling_code == "argosy":
        lines.append("modelling code: argosy's own")
    else:
        lines.append(f"modelling code: transformers', because {diagnosis.modelling_reason}")
    lines += diagnosis.notices
    lines.append(f"attention backend {backend}")
    if diagnosis.kernels is not None:
        lines.append(f"CPU kernels {diagnosis.kernels}")
    if diagnosis.tokenizer is not None:
        lines.append(f"tokenizer {diagnosis.tokenizer}")
    if diagnosis.parsers is not None:
        lines.append(f"parsers {diagnosis.parsers}")
    if diagnosis.images is not None:
        lines.append(f"images {diagnosis.images}")
    if diagnosis.weights is not None:
        lines.append(diagnosis.weights)
    if diagnosis.budget is not None:
        lines.append(budget_table(*[diagnosis.budget] * diagnosis.data_parallel_size))
    lines.append(f"does not fit: {diagnosis.problem}" if diagnosis.problem else "fits")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
