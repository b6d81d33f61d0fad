"""Transformers follow: finds out what a model of transformers' computes before anything is loaded.

Its modules run once on weights that are all one zero, and our attention function notes what it is asked for; so do
stand-ins for masks, caches and experts. Whatever this engine cannot compute is refused by name here. Then
`transformers_weights` holds the loaded model against transformers' own attention before a request is served.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionMaskInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from argosy_engine.attention.params import AttentionParams
from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.model_configs.transformers_config import EncoderConfig, TransformersConfig
from argosy_engine.models.transformers_attention import (
    FOLLOWED,
    AttentionCall,
    FollowedStates,
    attending,
    cache_argument,
    cache_parameter,
    running,
)
from argosy_engine.models.transformers_classes import (
    PlannedRank,
    body_of,
    divide,
    forbid_other_parts,
    hf_config,
    model_class,
    take_away,
    text_model,
)

logger = logging.getLogger(__name__)

_FOLLOWED_TOKENS = 13
"""Of the step in which a model is followed. No size of a model is this number, so that `arange` of it is recognised."""
_MAX_MASKED_TOKENS = 1 << 21
"""Positions for which a mask is asked at most."""
_IGNORED = frozenset(
    {
        "dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
        "return_dict", "output_router_logits", "logits_to_keep", "position_embeddings", "past_key_values",
        "cache_params", "cache", "shared_kv_states", "layer_idx", "training", "num_items_in_batch", "deterministic",
    }
)  # fmt: skip
"""Arguments of attention functions that do not change what they compute."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """Stands for the mask of a followed model."""

    window: int | None = None
    """If it is causal, tokens up to itself; otherwise before and after itself."""
    chunk_size: int | None = None
    is_known: bool = True
    is_causal: bool = True

    def __getitem__(self, _: Any) -> _Mask:
        return self


def _mask(mask_function: Callable[..., torch.Tensor], config: Any, **_: Any) -> _Mask:
    """Find out which tokens a token attends to by asking for every earlier token of a few."""
    zero = torch.zeros((), dtype=torch.int64)

    def seen(position: int) -> torch.Tensor:
        earlier = torch.ones(position + 3, dtype=torch.int64).cumsum(0) - 1
        found = mask_function(zero, zero, torch.full_like(earlier, position), earlier)
        return torch.broadcast_to(found.bool(), earlier.shape)

    size = getattr(config, "attention_chunk_size", None) or 64
    longest = max(getattr(config, "max_position_embeddings", None) or 0, 3 * size)
    longest = min(longest, _MAX_MASKED_TOKENS)
    if seen(0)[1]:
        return _bidirectional_mask(mask_function, longest)
    rows = {position: seen(position) for position in (0, 1, size - 1, size, size + 1, longest // 2, longest)}
    counts = {position: int(row.sum()) for position, row in rows.items()}
    for position, row in rows.items():  # the last tokens up to itself
        if not row[position - counts[position] + 1 : position + 1].all() or not counts[position]:
            return _Mask(is_known=False)
    last = max(counts)
    if counts[last] == last + 1:
        return _Mask()
    if counts[size] == 1 and counts[size - 1] == size:
        return _Mask(chunk_size=size, is_known=counts[last] == last % size + 1)
    window = counts[last]
    is_known = all(count == min(position + 1, window) for position, count in counts.items())
    return _Mask(window=window, is_known=is_known)


def _bidirectional_mask(mask_function: Callable[..., torch.Tensor], longest: int) -> _Mask:
    """Find out how many tokens on both sides a token attends to."""
    zero, places = torch.zeros((), dtype=torch.int64), torch.arange(longest)

    def seen(position: int) -> torch.Tensor:
        found = mask_function(zero, zero, torch.full_like(places, position), places)
        return torch.broadcast_to(found.bool(), places.shape)

    positions = (0, 1, longest // 3, longest // 2, longest - 1)
    rows = {position: seen(position) for position in positions}
    if all(bool(row.all()) for row in rows.values()):
        return _Mask(is_causal=False)
    window = int(rows[0].sum()) - 1
    is_known = all(torch.equal(row, (places - position).abs() <= window) for position, row in rows.items())
    return _Mask(window, is_known=is_known, is_causal=False)


def _skipped_experts(_: nn.Module, hidden_states: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
    follower = running()
    assert isinstance(follower, _Follower)
    follower.skips_experts = True
    return torch.zeros_like(hidden_states)


AttentionMaskInterface.register(FOLLOWED, _mask)
ExpertsInterface.register(FOLLOWED, _skipped_experts)


class FollowedLayer(msgspec.Struct, frozen=True):
    """What one call of the attention function asks for."""

    params: AttentionParams
    module: str
    """Name of the module that calls."""
    query_dim: int
    value_dim: int
    sinks: str | None = None
    """Name of the parameter with the sinks."""


class _Follower:
    """Notes what attention a model computes."""

    def __init__(self, model: nn.Module, *, is_causal: bool = True) -> None:
        self._is_causal = is_causal
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self.layers: list[FollowedLayer] = []
        self.callers: set[nn.Module] = set()
        self.windows: list[int | None] = []
        """Of an encoder's layers, tokens before and after each."""
        self.skips_experts = False

    def attend(self, call: AttentionCall) -> torch.Tensor:
        module, (q, k, v), mask, scaling, others = call
        name = type(module).__name__
        if q.shape[0] != 1 or k.shape[2] != q.shape[2] or v.shape[2] != q.shape[2]:
            raise ConfigError(f"{name} attends to other keys than those of its tokens")
        if q.shape[-1] != k.shape[-1] or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
            raise ConfigError(f"{name} has queries, keys and values that do not fit each other")
        if mask is not None and not isinstance(mask, _Mask):
            raise ConfigError(f"{name} computes a mask of its own")
        given = {key: value for key, value in others.items() if value is not None and key not in _IGNORED}
        if not self._is_causal:
            self._note_bidirectional(call, given)
            return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1])
        if mask is not None and not (mask.is_known and mask.is_causal):
            raise ConfigError(f"the mask of {name} is neither causal, a sliding window nor chunks")
        if given.pop("is_causal", True) is not True or not getattr(module, "is_causal", True):
            raise ConfigError(f"{name} is not causal")
        window, softcap, sinks = (given.pop(key, None) for key in ("sliding_window", "softcap", "s_aux"))
        if given:
            raise ConfigError(f"{name} asks attention for {', '.join(sorted(given))}")
        if mask is not None:
            if window is not None and mask.window is None and mask.chunk_size is None:
                window = None  # what masks say counts, as in transformers' own attention
            elif window is not None and mask.window != window:
                raise ConfigError(
                    f"{name} asks for a window of {window} and a mask with one of {mask.window}"
                )
            window = mask.window
        sinks_name = None
        if sinks is not None and (sinks_name := self._parameters.get(id(sinks))) is None:
            raise ConfigError(f"{name} computes its attention sinks")
        self.callers.add(module)
        params = AttentionParams(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=max(q.shape[-1], v.shape[-1]),
            scale=float(scaling) if scaling is not None else q.shape[-1] ** -0.5,
            sliding_window=window,
            logit_softcap=softcap,
            chunk_size=None if mask is None else mask.chunk_size,
            has_sinks=sinks is not None,
        )
        self.layers.append(FollowedLayer(params, self._names[module], q.shape[-1], v.shape[-1], sinks_name))
        return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[-1])

    def _note_bidirectional(self, call: AttentionCall, given: dict[str, Any]) -> None:
        """Note what an encoder's layer computes. A window that it asks for besides that of its mask is ignored, as it
        is by transformers' eager attention, with which the probe compares."""
        module, (q, k, v), mask, scaling, _ = call
        name = type(module).__name__
        given.pop("sliding_window", None)
        if given.pop("is_causal", False) or getattr(module, "is_causal", False):
            raise ConfigError(f"{name} is causal, in an encoder")
        if given:
            raise ConfigError(f"{name} asks attention for {', '.join(sorted(given))}")
        if mask is not None and (mask.is_causal or not mask.is_known):
            raise ConfigError(f"the mask of {name} is neither over all tokens nor a window on both sides")
        self.callers.add(module)
        self.windows.append(None if mask is None else mask.window)
        params = AttentionParams(
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim=q.shape[-1],
            scale=float(scaling) if scaling is not None else q.shape[-1] ** -0.5,
        )
        self.layers.append(FollowedLayer(params, self._names[module], q.shape[-1], v.shape[-1]))


class _NoProducts(TorchFunctionMode):
    """Returns zeros for products with weights, which would take long in a large model. Notes what is numbered."""

    def __init__(self) -> None:
        super().__init__()
        self.numbered: set[Any] = set()
        """Arguments of `arange`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.arange:
            bounds = [(kwargs or {}).get(name) for name in ("start", "end")]
            self.numbered.add((*args, *(each for each in bounds if each is not None)))
        if func is F.linear:
            x, weight = args[:2] if len(args) > 1 else (args[0], kwargs["weight"])
            return x.new_zeros(*x.shape[:-1], weight.shape[0])
        return func(*args, **(kwargs or {}))


def follow(config: TransformersConfig) -> TransformersConfig:
    """Return the config with the attention of its layers.

    Raises:
        ConfigError: the model computes something that this engine does not.
    """
    if config.is_followed:
        return config
    if isinstance(config, EncoderConfig):
        return _follow_encoder(config)
    model_class(config, hf_config(config, FOLLOWED))
    states: FollowedStates | None = None
    try:
        whole = model = _empty_model(config)
        unserved_parts: tuple[str, ...] = ()
        if config.wrapper is not None:
            unserved_parts, model = forbid_other_parts(whole), text_model(whole)
        body = body_of(model, has_head=config.pooling is None)
        follower, products = _followed(model, body)
        if _wants_cache(model, follower.callers):
            states = FollowedStates(model)
            follower, products = _followed(model, body, states)
    except ConfigError as error:
        raise ConfigError(_refusal(config, str(error))) from None
    except Exception as error:  # whatever transformers' modules raise
        reason = f"its modules cannot be followed ({type(error).__name__}: {str(error).strip()[:300]})"
        raise ConfigError(_refusal(config, reason)) from error
    if config.wrapper is not None:
        take_away(whole)
    keeps = None if states is None else _other_attention(model, states, follower.callers)
    if keeps is not None:
        reason = (
            f"{keeps} keeps a state of its own, or computes attention not by transformers' AttentionInterface"
        )
        raise ConfigError(_refusal(config, reason))
    numbers_tokens = any(_FOLLOWED_TOKENS in bounds for bounds in products.numbered)
    if numbers_tokens and (products.numbered != {(_FOLLOWED_TOKENS,)} or follower.skips_experts):
        raise ConfigError(_refusal(config, "it numbers the tokens of a step, and other things, by itself"))
    layers = [layer.params for layer in follower.layers]
    kept = [] if states is None else list(states.kept_layers())
    return msgspec.structs.replace(
        config,
        attention=tuple(_of_one_page_size(layers)),
        numbers_tokens=numbers_tokens,
        unserved_parts=unserved_parts,
        is_followed=True,
        state_layers=tuple(params for _, _, params in kept),
        state_calls=tuple((name, names) for name, names, _ in kept),
        calls=tuple((each.module, each.query_dim, each.value_dim, each.sinks) for each in follower.layers),
    )


def check_plan(config: TransformersConfig, size: int) -> None:
    """Check that a followed model's own plan divides it among `size` tensor-parallel ranks as our KV cache needs it:
    each computes its share of the heads of every layer.

    Raises:
        ConfigError: it does not.
    """
    if config.state_layers:
        raise ConfigError(_undivided(config, size, "its layers keep states, which are not divided"))
    for layer in config.attention:
        if layer.num_kv_heads % size or layer.num_heads % size:
            reason = f"{layer.num_heads} heads and {layer.num_kv_heads} KV heads are not multiples of it"
            raise ConfigError(_undivided(config, size, reason))
    try:
        model = _empty_model(config)
        divide(model, PlannedRank(size))
        follower, _ = _followed(model, body_of(model, has_head=config.pooling is None))
    except ConfigError as error:
        raise ConfigError(_undivided(config, size, str(error))) from None
    except Exception as error:  # whatever transformers' modules raise
        reason = f"its parts cannot be followed ({type(error).__name__}: {str(error).strip()[:300]})"
        raise ConfigError(_undivided(config, size, reason)) from error
    for own, whole in zip(follower.layers, config.attention, strict=True):
        heads, kv_heads = own.params.num_heads * size, own.params.num_kv_heads * size
        if (heads, kv_heads) != (whole.num_heads, whole.num_kv_heads):
            reason = (
                f"its plan leaves {own.params.num_heads} of {whole.num_heads} heads and {own.params.num_kv_heads} of "
                f"{whole.num_kv_heads} KV heads of {own.module} to a rank"
            )
            raise ConfigError(_undivided(config, size, reason))


def _undivided(config: TransformersConfig, size: int, reason: str) -> str:
    return (
        f"--tensor-parallel-size {size} cannot divide {config.architecture} on transformers' modelling code: {reason}; "
        "leave it out, or use --data-parallel-size"
    )


def _follow_encoder(config: EncoderConfig) -> EncoderConfig:
    """Find the attention of an encoder's layers. One that we do not follow computes each prompt alone, by transformers'
    own attention."""
    try:
        model = _empty_model(config)
    except ConfigError:
        raise
    except Exception as error:  # whatever transformers' modules raise
        reason = f"it cannot be built ({type(error).__name__}: {str(error).strip()[:300]})"
        raise ConfigError(_refusal(config, reason)) from error
    has_head = config.pooling is not None and config.pooling.task == "classify"
    body = getattr(model, model.base_model_prefix) if has_head else model
    follower = _Follower(body, is_causal=False)
    ids = torch.zeros(1, _FOLLOWED_TOKENS, dtype=torch.int64)
    try:
        with torch.inference_mode(), attending(follower), _NoProducts():
            body(input_ids=ids)
        is_followed = bool(follower.callers)
    except Exception:  # whatever transformers' modules raise
        is_followed = False
    if not is_followed:
        logger.info(
            "%s: prompts are computed one by one, by transformers' own attention", config.architecture
        )
        return msgspec.structs.replace(config, is_followed=True, runs_alone=True)
    return msgspec.structs.replace(
        config,
        is_followed=True,
        attention=tuple(layer.params for layer in follower.layers),
        windows=tuple(follower.windows),
        calls=tuple((each.module, each.query_dim, each.value_dim, None) for each in follower.layers),
    )


def _followed(
    model: PreTrainedModel, body: nn.Module, states: FollowedStates | None = None
) -> tuple[_Follower, _NoProducts]:
    """Run a model's body over a few tokens; return what has noted what it does."""
    follower = _Follower(model)
    ids = torch.zeros(1, _FOLLOWED_TOKENS, dtype=torch.int64)
    positions = torch.arange(_FOLLOWED_TOKENS).unsqueeze(0)
    with torch.inference_mode(), attending(follower), _NoProducts() as products:
        body(input_ids=ids, position_ids=positions, use_cache=False, **cache_argument(body, states))
    return follower, products


def _refusal(config: TransformersConfig, reason: str) -> str:
    return (
        f"{config.architecture} cannot be served by transformers' modelling code: {reason}; serve another model, "
        f"{OTHER_ENGINES}"
    )


def _empty_model(config: TransformersConfig) -> PreTrainedModel:
    """Build the model with parameters that are all one zero, which take no memory."""
    of_config = hf_config(config, FOLLOWED)
    with torch.device("meta"):
        model = model_class(config, of_config)._from_config(of_config, attn_implementation=FOLLOWED)
    with contextlib.suppress(Exception):  # models without experts of transformers' interface
        model.set_experts_implementation(FOLLOWED)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            setattr(module, name, nn.Parameter(zeros, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros(buffer.shape, dtype=buffer.dtype))
    model.tie_weights()
    return model.eval()


def _wants_cache(model: nn.Module, callers: set[nn.Module]) -> bool:
    """Whether a module that takes a cache has called no attention."""
    taking = [module for module in model.modules() if cache_parameter(module) is not None]
    for module in taking:
        inner = set(module.modules()) - {module}
        if not inner & set(taking) and not ({module} | inner) & callers:
            return True
    return not callers


def _other_attention(model: nn.Module, states: FollowedStates, callers: set[nn.Module]) -> str | None:
    """Return the class of a module that keeps keys and values, or a state in a way that we do not follow; None if there
    is none."""
    for module in states.caching:
        if not set(module.modules()) & callers:
            return type(module).__name__
    if not callers and not states.kept:
        return type(model).__name__
    return None


def _of_one_page_size(layers: Sequence[AttentionParams]) -> list[AttentionParams]:
    """Return the layers with heads that are padded so that all keep as many bytes per token, because a block of the KV
    cache belongs to any of them."""
    if not layers:
        return []
    step = lcm(*(layer.num_kv_heads for layer in layers))
    widest = max(layer.num_kv_heads * layer.head_dim for layer in layers)
    if len({layer.num_kv_heads * layer.head_dim for layer in layers}) > 1:
        widest = -(-widest // step) * step
    return [msgspec.structs.replace(layer, head_dim=widest // layer.num_kv_heads) for layer in layers]
