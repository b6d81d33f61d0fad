"""Transformers probe: holds a loaded model of transformers' over our KV cache against transformers' own attention.

Of a decoder two short requests are computed as the engine would: in chunks over what earlier steps have cached,
together in one step, and token by token; of an encoder two prompts in one step, one of them a pair. If logits or states
differ from those that transformers' eager attention gives for each request alone, this engine misunderstands the
architecture, and it is refused rather than served with wrong tokens.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from argosy_engine.attention.metadata import AttentionMetadata, ModelInputs
from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.model_configs.encoder_config import EncoderConfig
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.models.transformers_encoder import TransformersEncoder
from argosy_engine.models.transformers_model import TransformersModel, probe_prompts

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
"""Difference of logits that is allowed, as a share of their largest value: sums are rounded in another order. A wrong
mask or position gives a difference of the order of the logits."""

_Step = Sequence[tuple[int, int, int]]
"""Row, first and end of each request's tokens."""


@torch.inference_mode()
def probe(
    config: TransformersConfig, model: TransformersModel, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare a model with itself under transformers' own attention and linear layers. From then on it uses ours.

    Raises:
        ConfigError: logits differ, or the model fails.
    """
    prompts = [prompt.to(device) for prompt in probe_prompts(config)]
    try:
        expected = [model.reference(prompt) for prompt in prompts]
        if model.expected is not None:
            expected = [each.to(device) for each in model.expected]
        if model.check_states():  # Mamba's scan in transformers begins without one
            logger.info("prompts in several steps are slow: of all but the first, states take token by token")
        model.use_kernels()
        found = _computed(model, prompts, device)
    except Exception as error:  # whatever a model raises
        raise ConfigError(
            f"{config.architecture} fails in transformers' modelling code: {type(error).__name__}: "
            f"{str(error).strip()[:300]}; serve another model, {OTHER_ENGINES}"
        ) from error
    if config.pooling is None and expected[0].shape[1] != config.vocab_size:
        raise ConfigError(
            f"{config.architecture} has logits of {expected[0].shape[1]} tokens, and its config.json says vocab_size "
            f"{config.vocab_size}; correct it"
        )
    _compare(config, found, expected, dtype)


@torch.inference_mode()
def probe_encoder(
    config: EncoderConfig, model: TransformersEncoder, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare an encoder with itself under transformers' own attention and linear layers. From then on it uses ours.

    Raises:
        ConfigError: states or scores differ, or the model fails.
    """
    prompts = [prompt.to(device) for prompt in probe_prompts(config)]
    types = [torch.zeros_like(prompts[0]), (torch.arange(len(prompts[1]), device=device) > 9).long()]
    step: _Step = [(row, 0, len(prompt)) for row, prompt in enumerate(prompts)]
    try:
        references = [model.reference(*each) for each in zip(prompts, types, strict=True)]
        model.use_kernels()
        blocks = -(-max(map(len, prompts)) // _BLOCK_SIZE)
        tables = torch.zeros(2, blocks, dtype=torch.int32)
        inputs = replace(_inputs(step, prompts, tables, device), token_types=torch.cat(types))
        states = list(model.forward(inputs).float().split([len(prompt) for prompt in prompts]))
        expected, found = [states_ for states_, _ in references], list(states)
        if config.pooling is not None and config.pooling.task == "classify":
            pooled = [each.mean(dim=0) if config.head_pooling == "mean" else each[0] for each in states]
            expected.append(torch.stack([scores for _, scores in references]))
            found.append(model.scores(torch.stack(pooled)))
    except Exception as error:  # whatever a model raises
        raise ConfigError(
            f"{config.architecture} fails in transformers' modelling code: {type(error).__name__}: "
            f"{str(error).strip()[:300]}; serve another model, {OTHER_ENGINES}"
        ) from error
    _compare(config, found, expected, dtype)


def _compare(
    config: TransformersConfig,
    found: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """
    Raises:
        ConfigError: they differ by more than rounding explains.
    """
    if (difference := _difference(found, expected, dtype)) is not None:
        raise ConfigError(
            f"{config.architecture} cannot be served by transformers' modelling code over this engine's KV cache: its "
            f"{'logits' if config.pooling is None else 'states'} differ from those with transformers' own attention by "
            f"{difference}; serve another model, {OTHER_ENGINES}"
        )


def _difference(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], dtype: torch.dtype
) -> str | None:
    """Return by how much logits differ, if that is more than rounding explains."""
    for ours, theirs in zip(found, expected, strict=True):
        if ours.shape != theirs.shape:
            return f"their shape, {tuple(ours.shape)} for {tuple(theirs.shape)}"
        allowed = _TOLERANCE[dtype] * max(float(theirs.abs().max()), 1e-3)
        error = float((ours - theirs).abs().max())
        if not error <= allowed:  # NaN is an error, too
            return f"{error:.2g}, where {allowed:.2g} is allowed"
    return None


def _computed(
    model: TransformersModel, prompts: Sequence[torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    """Return the logits [T, vocab_size], or states [T, hidden_size], of every prompt, as steps of an engine compute
    them."""
    long, short = (len(prompt) for prompt in prompts)
    half, late = long // 2, max(long - 2, 0)
    steps: list[_Step] = [
        [(0, 0, half)],
        [(0, half, late), (1, 0, short - 2)],  # a chunk over the cache, beside a prompt
        [(0, late, long - 1), (1, short - 2, short - 1)],  # decodes
        [(1, short - 1, short), (0, long - 1, long)],
    ]
    widest = -(-max(long, short) // _BLOCK_SIZE)
    # Blocks in no order, and stale values in them.
    tables = torch.arange(2 * widest).flip(0).view(widest, 2).t().contiguous().to(torch.int32)
    for layer in model.attention_layers:
        shape = layer.kv_cache_shape(2 * widest, _BLOCK_SIZE)
        layer.bind(torch.full(shape, torch.nan, device=device).to(layer.kv_cache_dtype))
    for state in model.state_layers:
        state.bind(
            [
                torch.full((2 * widest, *shape), torch.nan, dtype=dtype, device=device)
                for shape, dtype in state.tensors
            ],
            _BLOCK_SIZE,
        )
    parts: list[list[torch.Tensor]] = [[], []]
    for step in steps:
        hidden = model.forward(_inputs(step, prompts, tables, device))
        logits = model.compared(hidden).split([end - start for _, start, end in step])
        for (row, _, _), part in zip(step, logits, strict=True):
            parts[row].append(part)
    return [torch.cat(each) for each in parts]


def _inputs(
    step: _Step, prompts: Sequence[torch.Tensor], tables: torch.Tensor, device: torch.device
) -> ModelInputs:
    rows = torch.tensor([row for row, start, end in step for _ in range(start, end)])
    positions = torch.cat([torch.arange(start, end) for _, start, end in step])
    slots = tables[rows, positions // _BLOCK_SIZE].long() * _BLOCK_SIZE + positions % _BLOCK_SIZE
    starts = np.array([0, *itertools.accumulate(end - start for _, start, end in step)], np.int32)
    ends = np.array([end for _, _, end in step], np.int32)
    positions = positions.to(device)
    return ModelInputs(
        token_ids=torch.cat([prompts[row][start:end] for row, start, end in step]),
        positions=positions,
        meta=AttentionMetadata(
            num_decodes=sum(end - start == 1 for _, start, end in step),
            query_start_loc=torch.from_numpy(starts).to(device),
            seq_lens=torch.from_numpy(ends).to(device),
            positions=positions,
            slot_mapping=slots.to(device),
            block_table=tables[[row for row, _, _ in step]].to(device),
            query_start_loc_cpu=starts,
            seq_lens_cpu=ends,
        ),
    )
