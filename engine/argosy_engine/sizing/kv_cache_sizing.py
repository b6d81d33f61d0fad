"""Memory plan: computes how many KV blocks fit and how long a request may be. No torch; sizes in bytes.

On CUDA, weights, activations and KV cache get a share of the whole device. On a CPU the engine shares the machine with
other programs: the KV cache gets a share of what weights and activations leave free, and its pages are committed only
when they are first used.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from argosy_engine.attention.kv_cache_spec import (
    KVCacheGroup,
    attention_groups,
    block_bytes,
    group_layers,
    groups_of_layers,
    has_states,
    state_bytes,
)
from argosy_engine.attention.params import WORKSPACE_BYTES, DeltaNetParams, MambaParams
from argosy_engine.checkpoint.fingerprint import OF_IMAGES
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.checkpoint.stored_tensors import EMBEDDINGS, HEAD
from argosy_engine.config import EngineArgs, memory_utilization
from argosy_engine.errors import ConfigError, DoesNotFit
from argosy_engine.model_configs.experts_config import ExpertsConfig
from argosy_engine.model_configs.model_config import (
    ModelConfig,
    check_pipeline_parallel,
    check_tensor_parallel,
    read_json,
)
from argosy_engine.model_configs.quantization_config import (
    HEAD_BITS,
    INTEGER_BITS,
    check_quantization,
    group_size,
)
from argosy_engine.model_configs.sharding import WHOLE_MODEL, Stage
from argosy_engine.model_configs.transformers_config import read_hf_config
from argosy_engine.model_configs.vision_config import LargestImage, largest_image
from argosy_engine.models.config_file import load_model_config
from argosy_engine.resolved_config import MemoryBudget
from argosy_engine.sizing.resources import DeviceMemory, worker_memory

CUDA_CONTEXT_BYTES = 600 << 20
"""Estimate of what CUDA, cuBLAS and loaded kernels take besides our tensors, used before they are loaded."""

MIN_STATES = 3
"""The null block, and what one request reads and writes in a step. It is one block where prefixes are not cached."""
_MIB = 1 << 20
_GIB = 1 << 30


def planned_groups(
    config: ModelConfig,
    itemsize: int,
    block_size: int,
    tensor_parallel_size: int = 1,
    stage: Stage = WHOLE_MODEL,
    state_itemsize: int | None = None,
) -> tuple[KVCacheGroup, ...]:
    """Return a model's KV cache groups on one tensor-parallel rank, which its config determines.

    Args:
        itemsize: bytes per element of a key or value.
        stage: whose layers they have.
        state_itemsize: of the model's dtype, in which states are kept; None: the same.
    """
    layers = [layer.of_rank(tensor_parallel_size) for layer in config.attention_layers]
    states = [layer.of_rank(tensor_parallel_size) for layer in config.state_layers]
    groups = group_layers(
        [
            *(layer.kv_cache_spec(block_size, itemsize) for layer in layers),
            *(layer.kv_cache_spec(state_itemsize or itemsize) for layer in states),
        ]
    )
    if stage == WHOLE_MODEL:
        return groups
    own = stage.layers(config.num_hidden_layers)
    kept = [*config.layers_with_attention, *config.layers_with_state]
    return groups_of_layers(groups, [index for index, layer in enumerate(kept) if layer in own])


def find_largest_image(args: EngineArgs, config: ModelConfig, path: Path) -> LargestImage | None:
    """Return the largest image that the processor of a model in a folder makes; None: only texts are served.

    Raises:
        ConfigError: its file is malformed.
    """
    if config.vision is None:
        return None
    media = args.media_config(config.vision)
    file = next((file for name in OF_IMAGES if (file := path / name).is_file()), None)
    processor = {} if file is None else read_json(file)
    try:
        return largest_image(
            read_hf_config(msgspec.json.decode(config.vision.fields)),
            processor.get("image_processor", processor),
            media.processor_kwargs,
            wanted_model_len(args, config),
            trusts_request_kwargs=media.trusts_request_kwargs,
        )
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        raise ConfigError(
            f"{file or 'config.json'} does not say how large images become: {type(error).__name__}: {error}; correct "
            "it and --mm-processor-kwargs, or serve texts alone with --language-model-only"
        ) from None


def estimate_activations(
    config: ModelConfig,
    args: EngineArgs,
    itemsize: int,
    attention_backend: str,
    image: LargestImage | None = None,
) -> int:
    """Estimate the peak activation bytes of a worker's largest step.

    The peak is in the widest layer over all tokens, in sampling with log probabilities for all requests, or in the
    encoder of images.

    Args:
        itemsize: bytes per element of the model's dtype.
        attention_backend: `torch` gathers keys and values, and samples with more arrays over the vocabulary.
        image: the largest, if images are served.
    """
    ranks = args.tensor_parallel_size
    q = config.num_attention_heads * config.head_dim // ranks
    kv = max(config.num_key_value_heads // ranks, 1) * config.head_dim
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size) // ranks  # not every family has one
    values = 4 * config.hidden_size + 2 * q + 2 * kv + 4 * inner
    experts: ExpertsConfig | None = getattr(config, "experts", None)
    if experts is not None and attention_backend in (
        "triton",
        "flash_attn",
    ):  # whose kernels compute all at once
        chosen = experts.routing.experts_per_token * (experts.inner // ranks + config.hidden_size)
        values = max(values, 4 * config.hidden_size + 2 * q + 2 * kv + chosen)
    precise = 8 * config.hidden_size  # bytes in float32: a norm's input and output
    delta_net: DeltaNetParams | None = getattr(config, "delta_net", None)  # not every family has one
    if delta_net is not None:
        own = delta_net.of_rank(ranks)
        inputs = own.num_channels + own.num_values
        values = max(values, 4 * config.hidden_size + inputs + own.num_values)
        precise = max(precise, 4 * inputs)
    mamba: MambaParams | None = getattr(config, "mamba", None)
    if mamba is not None:
        part = mamba.of_rank(ranks)
        values = max(values, 4 * config.hidden_size + part.num_inputs + part.num_values)
        precise = max(precise, 4 * (part.num_channels + part.num_values))
    if args.parallel_config.shares_experts:
        values += (
            3 * args.data_parallel_size * config.hidden_size
        )  # tokens of all cores: gathered, computed, added
    layer = args.max_num_batched_tokens * (values * itemsize + precise)
    rows = min(args.max_num_seqs, args.max_num_batched_tokens)
    # logits in the model's dtype and float32, log-softmax, a sorted copy and its indices (int64)
    sampling = itemsize + 4 + 4 + 4 + 8
    if attention_backend == "torch":
        longest = wanted_model_len(args, config) * itemsize
        context = longest * config.cached_values(ranks)
        # once as gathered, and once in the layout of the product
        layer += 2 * max(min(rows * context, WORKSPACE_BYTES), context)
        layer += min(longest * config.expanded_values(ranks), WORKSPACE_BYTES)
        sampling += 4 + 8  # probabilities, and their sums in float64
    encoder = 0 if image is None else image.activation_bytes(itemsize)
    return max(layer, rows * config.vocab_size * sampling, encoder)


def as_served(args: EngineArgs, config: ModelConfig) -> ModelConfig:
    """Return the config without its encoder of images if flags turn images off, or the model pools."""
    vision = None if config.pooling is not None else args.media_config(config.vision).vision
    return config if vision == config.vision else msgspec.structs.replace(config, vision=vision)


def encoder_cache_bytes(
    args: EngineArgs, config: ModelConfig, itemsize: int, stage: Stage = WHOLE_MODEL
) -> int:
    """Return the bytes of the outputs of the encoder of images that a worker keeps (`EncoderCacheManager`); 0 without
    one.

    Args:
        itemsize: bytes per element.
        stage: the worker's. The first has the encoder.
    """
    if config.vision is None or not stage.is_first:
        return 0
    kept = max(args.max_num_batched_tokens, wanted_model_len(args, config))
    return kept * (1 + config.vision.num_deepstack) * config.hidden_size * itemsize


def estimate_weights(
    config: ModelConfig,
    elements: Mapping[str, int],
    itemsize: int,
    device: str,
    tensor_parallel_size: int = 1,
    stage: Stage = WHOLE_MODEL,
    quantization: str | None = None,
    *,
    keeps_integers: bool = False,
) -> int:
    """Estimate the bytes of a worker's loaded weights. FP8 stays so on a GPU that multiplies it in bfloat16.

    Args:
        elements: element count of each tensor: for `argosy doctor` those of the checkpoint or `rank_elements` of them,
            for an engine those of the tensors that it has loaded.
        itemsize: bytes per element.
        stage: the worker's.
        quantization: `--quantization`.
        keeps_integers: whether the device's kernels multiply by integers of the checkpoint as they are packed. On GPUs
            those of experts are widened.
    """
    stored = config.quantization
    is_headless = config.pooling is not None
    if config.tie_word_embeddings or is_headless:
        elements = {name: count for name, count in elements.items() if name != HEAD}
    num_fp8 = num_integers = num_packed = packed_bytes = num_head = 0
    bits = INTEGER_BITS.get(quantization or "") if stored is None else None
    num_tied = 0
    is_copied = device == "cpu" or (bits is not None and group_size(config.hidden_size) is not None)
    if config.tie_word_embeddings and is_copied and not is_headless and stage.is_last:
        # Two copies: the output projection is laid out for the product, or quantised, the embedding for look-ups.
        num_tied = -(-config.vocab_size // tensor_parallel_size) * config.hidden_size
    if bits is not None:
        num_head = num_tied + elements.get(HEAD, 0) if group_size(config.hidden_size) else 0
        num_integers = sum(
            count
            for name, count in elements.items()
            if _is_quantised_online(config, name, count) and not (device == "cuda" and _EXPERTS.search(name))
        )
    if stored is not None:
        if keeps_integers:
            packed = elements
            if device == "cuda":
                packed = {name: count for name, count in elements.items() if not _EXPERTS.search(name)}
            num_packed, packed_bytes = stored.packed_numbers(packed, tensor_parallel_size, device)
        multiplies_fp8 = device == "cuda" and itemsize == 2 and not config.widens_fp8
        elements, num_fp8 = stored.widened_elements(elements, multiplies_fp8=multiplies_fp8)
    total = sum(elements.values()) + num_tied - num_fp8 - num_integers - num_packed - num_head
    scales = (num_integers + num_head) * 4 // (group_size(config.hidden_size) or 32)
    integers = (num_integers * (bits or 0) + num_head * HEAD_BITS) // 8
    return total * itemsize + num_fp8 + integers + scales + packed_bytes


def _is_quantised_online(config: ModelConfig, name: str, count: int) -> bool:
    """Whether `--quantization int8` quantises a tensor of a checkpoint, as far as its name and size tell."""
    is_kept = name == HEAD or re.search(r"embed|\bwte\b|\bwpe\b|\.(gate|router)\.weight$", name) is not None
    return not is_kept and count >= 32 * config.hidden_size and group_size(config.hidden_size) is not None


def used_elements(config: ModelConfig, elements: Mapping[str, int]) -> dict[str, int]:
    """Return the element counts of a checkpoint's tensors without those that the model does not load."""
    return {
        name: count
        for name, count in elements.items()
        if not any(re.fullmatch(pattern, name) for pattern in config.unused_tensors)
    }


_EXPERTS = re.compile(r"\.(experts|block_sparse_moe)\.")
"""In the names of experts' tensors."""


def rank_elements(
    config: ModelConfig,
    elements: Mapping[str, int],
    size: int,
    expert_size: int | None = None,
    stage: Stage = WHOLE_MODEL,
) -> dict[str, int]:
    """Estimate how many elements of each tensor one of `size` tensor-parallel ranks holds.

    Ranks divide matrices and hold vectors whole. Few matrices are not divided, and small: learned positions, routers.

    Args:
        expert_size: number of ranks that divide the experts among them, if not these.
        stage: whose tensors these are.
    """
    widest = max(4 * config.hidden_size, *config.divided_sizes(has_whole_experts=False).values())
    held = {
        name: count
        if count <= widest
        else -(-count // (expert_size if expert_size and _EXPERTS.search(name) else size))
        for name, count in elements.items()
    }
    attention, states = len(config.attention_layers), len(config.state_layers)
    if stage != WHOLE_MODEL:
        own = stage.layers(config.num_hidden_layers)
        attention = sum(index in own for index in config.layers_with_attention)
        states = sum(index in own for index in config.layers_with_state)
    held["replicated"] = attention * config.replicated_elements(size)
    held["replicated"] += states * config.replicated_state_elements(size)
    return held


def stage_elements(config: ModelConfig, elements: Mapping[str, int], stage: Stage) -> dict[str, int]:
    """Estimate how many elements of each tensor a pipeline stage holds: its layers, before the first the embedding, and
    after the last the output head, or the embedding once more. What else there is, is small, and counted everywhere."""
    own, is_tied = stage.layers(config.num_hidden_layers), config.tie_word_embeddings
    held = {}
    for name, count in elements.items():
        if name == HEAD:
            is_held = stage.is_last
        elif name == "embedding" or name.endswith(EMBEDDINGS):
            is_held = stage.is_first or (is_tied and stage.is_last)
        else:
            layer = re.search(r"\.(\d+)\.", name)
            is_held = layer is None or int(layer[1]) in own
        if is_held:
            held[name] = count
    if "layers" in held:  # of `dummy_elements`
        held["layers"] = held["layers"] * len(own) // config.num_hidden_layers
    return held


def dummy_elements(config: ModelConfig) -> dict[str, int]:
    """Estimate element counts without a checkpoint, for a dense decoder with a gated MLP: layers, embedding, output."""
    q = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    inner = getattr(config, "intermediate_size", 4 * config.hidden_size)
    layer = config.hidden_size * (2 * q + 2 * kv + 3 * inner)
    embedding = config.vocab_size * config.hidden_size
    return {"layers": config.num_hidden_layers * layer, "embedding": embedding, HEAD: embedding}


def plan_memory(
    args: EngineArgs,
    config: ModelConfig,
    memory: DeviceMemory,
    *,
    groups: Sequence[KVCacheGroup],
    weights_bytes: int,
    activation_bytes: int,
) -> MemoryBudget:
    """Size the KV cache and determine `max_model_len`.

    Args:
        memory: the device's memory before the weights were loaded. On a CPU all workers of all ranks share it.
        groups: those of the model's layers, on one worker. A pipeline stage without layers of a kind takes as many
            blocks or states as could be used: the others decide.

    Raises:
        DoesNotFit: not even one request of full length fits; the message says which length would fit.
    """
    memory = worker_memory(args, memory)
    utilization = memory_utilization(args, memory.device)
    block_size, bytes_per_block = args.block_size, block_bytes(groups)
    wanted_len = wanted_model_len(args, config)
    if memory.device == "cuda":
        in_use = memory.total_bytes - memory.available_bytes
        left = int(memory.total_bytes * utilization) - in_use - weights_bytes - activation_bytes
    else:
        left = int((memory.available_bytes - weights_bytes - activation_bytes) * utilization)

    budget = left
    limited_by = "memory"
    if args.kv_cache_memory_bytes is not None:
        budget, limited_by = args.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    bytes_per_state, num_states = state_bytes(groups), 0
    if has_states(groups):
        num_states = _num_states(groups, args, budget, wanted_len)
        least = MIN_STATES if args.enable_prefix_caching else MIN_STATES - 1
        if num_states < least:
            need = least * bytes_per_state / _MIB
            raise DoesNotFit(
                f"a request's states need {bytes_per_state / _MIB:.1f} MiB, with room to replace them {need:.1f} MiB, "
                f"there are {max(budget, 0) / _MIB:.1f} MiB; give it more memory, a larger --gpu-memory-utilization, "
                "or a smaller model"
            )
        budget -= num_states * bytes_per_state
    useful = args.max_num_seqs * request_blocks(groups, wanted_len, args) + 1
    num_blocks = max(budget, 0) // bytes_per_block if bytes_per_block else useful
    if args.num_gpu_blocks_override is not None:
        num_blocks, limited_by = args.num_gpu_blocks_override, "--num-gpu-blocks-override"
    elif num_blocks > useful:
        num_blocks, limited_by = useful, "--max-num-seqs"

    fits = _longest_that_fits(groups, num_blocks, args, wanted_len)
    max_model_len = wanted_len
    if args.max_model_len == "auto" and fits >= 16:
        max_model_len = min(wanted_len, fits)
    # `--num-gpu-blocks-override` is for tests: requests that are too long for it fail one by one.
    if fits < max_model_len and args.num_gpu_blocks_override is None:
        raise DoesNotFit(
            _does_not_fit(
                args,
                memory,
                utilization,
                budget,
                (request_blocks(groups, max_model_len, args) + 1) * bytes_per_block,
                max_model_len,
                fits,
                weights_bytes,
            )
        )
    args.check_model_len(max_model_len)
    return MemoryBudget(
        device=memory.device,
        num_workers=args.parallel_config.world_size,
        total_bytes=memory.total_bytes,
        available_bytes=memory.available_bytes,
        utilization=utilization,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        block_bytes=bytes_per_block,
        block_size=block_size,
        num_blocks=num_blocks,
        request_blocks=request_blocks(groups, max_model_len, args),
        max_model_len=max_model_len,
        limited_by=limited_by,  # type: ignore[arg-type]
        state_bytes=bytes_per_state,
        num_states=num_states,
    )


def scarcest(budgets: Sequence[MemoryBudget]) -> MemoryBudget:
    """Return the budget of the pipeline stage with the fewest blocks, with what all stages agree on: a block is one of
    each of them."""
    return msgspec.structs.replace(
        min(budgets, key=lambda each: (each.num_blocks, each.num_states)),
        num_blocks=min(each.num_blocks for each in budgets),
        num_states=min(each.num_states for each in budgets),
        max_model_len=min(each.max_model_len for each in budgets),
        request_blocks=min(each.request_blocks for each in budgets),
    )


def _num_states(groups: Sequence[KVCacheGroup], args: EngineArgs, budget: int, wanted_len: int) -> int:
    """Return how many blocks with states to have, including the null block.

    Memory is divided as tokens divide it that have a state for each `mamba_block_size` of them; but every request that
    may run has one, within half of the memory, and one to continue it into if prefixes are cached.
    """
    per_request = 2 if args.enable_prefix_caching else 1
    running = args.max_num_seqs * per_request + 1
    most = running
    if args.enable_prefix_caching:
        most = args.max_num_seqs * (per_request + 1 + wanted_len // args.mamba_block_size) + 1
    size = state_bytes(groups)
    if not size:  # they are in other stages
        return most
    half = budget // (2 if block_bytes(groups) else 1) // size
    if not args.enable_prefix_caching:
        return min(most, half)
    per_token = block_bytes(groups) * len(attention_groups(groups)) / args.block_size
    shared = int(budget / (size + args.mamba_block_size * per_token))
    return min(max(shared, min(running, half)), most)


def check_model(args: EngineArgs) -> None:
    """Check model and flags as far as config.json allows, before torch is imported.

    Raises:
        ConfigError: the model cannot be served, or not with these flags.
    """
    config = load_model_config(resolve_model(args.model), args.model_use)
    check_tensor_parallel(
        config, args.tensor_parallel_size, args.enable_expert_parallel, args.data_parallel_size
    )
    check_pipeline_parallel(config, args.pipeline_parallel_size)
    check_quantization(config.quantization, args.quantization)
    wanted_model_len(args, config)


def wanted_model_len(args: EngineArgs, config: ModelConfig) -> int:
    """Return `--max-model-len`, or the model's own limit if the flag is not a number.

    Raises:
        ConfigError: the flag exceeds the model's number of positions.
    """
    if not isinstance(args.max_model_len, int):
        return config.max_position_embeddings
    if args.max_model_len > config.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {args.max_model_len} exceeds the model's {config.max_position_embeddings} positions: "
            f"give at most {config.max_position_embeddings} or leave it out; if the model's card says how it goes "
            "further, --hf-overrides sets it: "
            f"'{{\"max_position_embeddings\": {args.max_model_len}}}' if nothing is scaled, or such as "
            '\'{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, '
            f'"original_max_position_embeddings": {config.max_position_embeddings}}}}}\''
        )
    return args.max_model_len


def request_blocks(groups: Sequence[KVCacheGroup], num_tokens: int, args: EngineArgs) -> int:
    """Return the most blocks that one request of `num_tokens` holds, over all groups."""
    return sum(
        group.spec.peak_blocks(num_tokens, args.block_size, args.max_num_batched_tokens) for group in groups
    )


def _longest_that_fits(
    groups: Sequence[KVCacheGroup], num_blocks: int, args: EngineArgs, wanted_len: int
) -> int:
    """Return the number of tokens of the longest request that fits, a multiple of the block size.

    One block is left out: the null block.
    """
    if not attention_groups(groups):
        return -(-wanted_len // args.block_size) * args.block_size
    at_most = max(-(-wanted_len // args.block_size), num_blocks)
    return args.block_size * bisect_right(
        range(1, at_most + 1),
        num_blocks - 1,
        key=lambda count: request_blocks(groups, count * args.block_size, args),
    )


def _does_not_fit(
    args: EngineArgs,
    memory: DeviceMemory,
    utilization: float,
    budget: int,
    need: int,
    max_model_len: int,
    fits: int,
    weights_bytes: int,
) -> str:
    have = f"{max(budget, 0) / _MIB:.1f} MiB"
    if args.kv_cache_memory_bytes is None:
        have += (
            f" of {memory.available_bytes / _GIB:.2f} GiB available "
            f"(weights {weights_bytes / _GIB:.2f} GiB, --gpu-memory-utilization {utilization:g})"
        )
    if fits < 16:
        remedy = "give it more memory, a larger --gpu-memory-utilization, or a smaller model"
    else:
        remedy = f"use --max-model-len {fits} or less (or auto), or give it more memory"
    return (
        f"one request of --max-model-len {max_model_len} tokens needs {need / _MIB:.1f} MiB of KV cache, "
        f"there are {have}; {remedy}"
    )
