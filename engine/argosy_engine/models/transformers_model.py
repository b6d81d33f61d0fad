"""TransformersModel: a decoder of transformers' modelling code, over our KV cache and attention backends.

transformers' models compute attention through a function that `AttentionInterface` knows by name. Ours gives q, k and
v, which the model has rotated, to an `Attention` layer with the cache of that layer; the requests of a step are one row
of tokens. What attention a model computes is found before anything is loaded: its modules run once on weights that are
all one zero (`follow`), and the function notes what it is asked for. Whatever it cannot compute is refused by name
there, and `transformers_probe` holds the loaded model against transformers' own attention before a request is served.

Nothing that comes with a checkpoint is executed. Design: vLLM's `model_executor/models/transformers`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.moe import ExpertsInterface

from argosy_engine.attention.backend import AttentionBackend, AttentionWeights
from argosy_engine.attention.layer import Attention, StateLayer
from argosy_engine.attention.metadata import AttentionMetadata, ModelInputs
from argosy_engine.attention.params import AttentionParams
from argosy_engine.errors import OTHER_ENGINES, ConfigError
from argosy_engine.layers.layer_compiler import CompilableLayer
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.model_configs.wrapper_config import without_parts
from argosy_engine.models.transformers_kernels import CalledLinears, use_kernels
from argosy_engine.models.transformers_states import (
    FollowedStates,
    StateCall,
    StepStates,
    cache_parameter,
    use_state_kernels,
)
from argosy_engine.models.transformers_wrapper import (
    forbid_other_parts,
    take_away,
    text_model,
    without_other_parts,
    wrapper_class,
)

_STEP, _FOLLOWED = "argosy", "argosy_followed"
"""Names of our attention function: in steps, where transformers makes no masks for it, and while a model is
followed."""
_FOLLOWED_TOKENS = 13
"""Of the step in which a model is followed. No size of a model is this number, so that `arange` of it is recognised."""
_MAX_MASKED_TOKENS = 1 << 21
"""Positions for which a mask is asked at most."""
_IGNORED = frozenset(
    {
        "dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
        "return_dict", "output_router_logits", "logits_to_keep", "position_embeddings", "past_key_values",
        "cache_params", "cache", "shared_kv_states", "layer_idx", "training", "num_items_in_batch",
    }
)  # fmt: skip
"""Arguments of attention functions that do not change what they compute."""
_running = threading.local()
"""What computes attention in this thread: a `_Follower` or a `_Step`."""


class _Attends(Protocol):
    def attend(
        self,
        module: nn.Module,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: Any,
        scaling: float | None,
        others: Mapping[str, Any],
    ) -> torch.Tensor: ...


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of q [1, num_heads, T, head_dim], k and v for whatever runs in this thread; [1, T, num_heads,
    head_dim]."""
    attends: _Attends = _running.attends
    return attends.attend(module, (query, key, value), attention_mask, scaling, others), None


@dataclass(frozen=True, slots=True)
class _Mask:
    """Stands for the mask of a followed model."""

    window: int | None = None
    chunk_size: int | None = None
    is_known: bool = True

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


def _skipped_experts(_: nn.Module, hidden_states: torch.Tensor, *__: Any, **___: Any) -> torch.Tensor:
    _running.attends.skips_experts = True
    return torch.zeros_like(hidden_states)


AttentionInterface.register(_STEP, _attention)
AttentionInterface.register(_FOLLOWED, _attention)
AttentionMaskInterface.register(_FOLLOWED, _mask)
ExpertsInterface.register(_FOLLOWED, _skipped_experts)


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

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self.layers: list[FollowedLayer] = []
        self.callers: set[nn.Module] = set()
        self.skips_experts = False

    def attend(
        self,
        module: nn.Module,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: Any,
        scaling: float | None,
        others: Mapping[str, Any],
    ) -> torch.Tensor:
        q, k, v = heads
        name = type(module).__name__
        if q.shape[0] != 1 or k.shape[2] != q.shape[2] or v.shape[2] != q.shape[2]:
            raise ConfigError(f"{name} attends to other keys than those of its tokens")
        if q.shape[-1] != k.shape[-1] or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
            raise ConfigError(f"{name} has queries, keys and values that do not fit each other")
        if mask is not None and not isinstance(mask, _Mask):
            raise ConfigError(f"{name} computes a mask of its own")
        if mask is not None and not mask.is_known:
            raise ConfigError(f"the mask of {name} is neither causal, a sliding window nor chunks")
        given = {key: value for key, value in others.items() if value is not None and key not in _IGNORED}
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
    _model_class(config, _hf_config(config, _FOLLOWED))
    states: FollowedStates | None = None
    try:
        whole = model = _empty_model(config)
        unserved_parts: tuple[str, ...] = ()
        if config.wrapper is not None:
            unserved_parts, model = forbid_other_parts(whole), text_model(whole)
        follower, products = _followed(model)
        if _wants_cache(model, follower.callers):
            states = FollowedStates(model)
            follower, products = _followed(model, states)
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


def _followed(model: PreTrainedModel, states: FollowedStates | None = None) -> tuple[_Follower, _NoProducts]:
    """Run a model's body over a few tokens; return what has noted what it does."""
    follower = _Follower(model)
    ids = torch.zeros(1, _FOLLOWED_TOKENS, dtype=torch.int64)
    positions = torch.arange(_FOLLOWED_TOKENS).unsqueeze(0)
    body = _body(model)
    with torch.inference_mode(), _attending(follower), _NoProducts() as products:
        body(input_ids=ids, position_ids=positions, use_cache=False, **_cache_argument(body, states))
    return follower, products


def _cache_argument(body: nn.Module, states: FollowedStates | StepStates | None) -> dict[str, Any]:
    """Return the argument that gives a model's body a cache, if it keeps states."""
    if states is None:
        return {}
    if (name := cache_parameter(body)) is None:
        raise ConfigError(f"{type(body).__name__} takes no cache")
    return {name: states}


def _refusal(config: TransformersConfig, reason: str) -> str:
    return (
        f"{config.architecture} cannot be served by transformers' modelling code: {reason}; serve another model, "
        f"{OTHER_ENGINES}"
    )


def _empty_model(config: TransformersConfig) -> PreTrainedModel:
    """Build the model with parameters that are all one zero, which take no memory."""
    hf_config = _hf_config(config, _FOLLOWED)
    with torch.device("meta"):
        model = _model_class(config, hf_config)._from_config(hf_config, attn_implementation=_FOLLOWED)
    with contextlib.suppress(Exception):  # models without experts of transformers' interface
        model.set_experts_implementation(_FOLLOWED)
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


def _hf_config(config: TransformersConfig, implementation: str) -> Any:
    """Return transformers' config object."""
    hf_config = config.hf_config()
    hf_config._attn_implementation = implementation
    for each in (hf_config, hf_config.get_text_config()):
        if config.wrapper is None or not config.tie_word_embeddings:  # of a wrapper either may be tied
            each.tie_word_embeddings = config.tie_word_embeddings
        each.use_cache = False
    return hf_config


def _model_class(config: TransformersConfig, hf_config: Any) -> type[PreTrainedModel]:
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    found: type[PreTrainedModel] | None = (
        mapping.get(type(hf_config), None) if config.wrapper is None else wrapper_class(hf_config)
    )
    if found is None or found.__name__ != config.architecture:
        raise ConfigError(
            f"architecture {config.architecture} is not supported: transformers {transformers.__version__} has none of "
            f"that name for the model_type {hf_config.model_type!r}; correct config.json, or serve it with the engine "
            "that it was made for behind Argosy's router"
        )
    return found


def _body(model: PreTrainedModel) -> nn.Module:
    """Return what is below the output head."""
    body: Any = getattr(model, model.base_model_prefix, None) or getattr(model, "model", None)
    body = getattr(body, "decoder", body)  # OPT's head calls that one
    if not isinstance(body, nn.Module) or body is model:
        raise ConfigError(f"{type(model).__name__} has no body apart from its output head")
    return body


def _running_states() -> StepStates | None:
    """Return the states of the step that runs in this thread, if one does."""
    step = getattr(_running, "attends", None)
    return step.states if isinstance(step, _Step) else None


@contextmanager
def _attending(attends: _Attends) -> Iterator[None]:
    before = getattr(_running, "attends", None)
    _running.attends = attends
    try:
        yield
    finally:
        _running.attends = before


class _OwnPositions(TorchFunctionMode):
    """Gives a model that numbers the tokens of a step itself (Llama 4 without RoPE) their positions instead."""

    def __init__(self, positions: torch.Tensor, step: _Step) -> None:
        super().__init__()
        self._positions = positions
        self._step = step

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.arange and args == (len(self._positions),) and not self._step.is_attending:
            return self._positions.clone()
        return func(*args, **(kwargs or {}))


class _Step:
    """Computes attention of one forward pass over the KV cache, layer by layer."""

    def __init__(self, calls: Sequence[_Call], meta: AttentionMetadata) -> None:
        self._calls = iter(calls)
        self._meta = meta
        self.states: StepStates | None = None
        """Of the requests, if the model keeps any."""
        self.is_attending = False
        """Whether our own code runs, rather than the model's."""

    def attend(
        self,
        module: nn.Module,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: Any,
        scaling: float | None,
        others: Mapping[str, Any],
    ) -> torch.Tensor:
        call = next(self._calls, None)
        assert call is not None, "a model attends as often as when it was followed"
        assert call.module is module, "a model attends in the order in which it was followed"
        self.is_attending = True
        attended = call(heads, self._meta)
        self.is_attending = False
        return attended


class _Call:
    """One call of the attention function in every forward pass, with a layer of the KV cache."""

    def __init__(self, module: nn.Module, attention: Attention, value_dim: int) -> None:
        self.module = module
        self.attention = attention
        self._head_dim = attention.params.head_dim
        self._value_dim = value_dim

    def __call__(
        self, heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], meta: AttentionMetadata
    ) -> torch.Tensor:
        """Attend from q [1, num_heads, T, head_dim]; the result is [1, T, num_heads, value_dim]."""
        parts = [part.squeeze(0).transpose(0, 1) for part in heads]
        head_dim, num_tokens = self._head_dim, parts[0].shape[0]
        if not all(part.shape[-1] == head_dim for part in parts):
            parts = [F.pad(part, (0, head_dim - part.shape[-1])) for part in parts]
        attended = self.attention(torch.cat(parts, dim=1).view(num_tokens, -1), meta)
        assert isinstance(attended, torch.Tensor)
        attended = attended.view(1, num_tokens, -1, head_dim)
        return attended if self._value_dim == head_dim else attended[..., : self._value_dim]


class TransformersModel:
    """One of transformers' causal models, loaded.

    Args:
        config: with the attention that `follow` has found.
        model: in evaluation mode, on its device.
    """

    checkpoint_prefix: ClassVar[str] = ""
    ignored_tensors: ClassVar[Sequence[str]] = ()

    def __init__(
        self,
        config: TransformersConfig,
        model: PreTrainedModel,
        backend: AttentionBackend,
    ) -> None:
        self.model = model
        self._is_wrapped = config.wrapper is not None
        self._numbers_tokens = config.numbers_tokens
        self._body = _body(model)
        self._given: torch.Tensor | None = None
        """Hidden states that the output head takes instead of the body's."""
        self._output: type[Any] | None = None
        self._run_body = self._body.forward
        self._body.forward = self._forward_body
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        self._calls = []
        for (name, _, value_dim, sinks), params in zip(config.calls, config.attention, strict=True):
            weights = AttentionWeights()
            if sinks is not None:
                weights = weights._replace(sinks=parameters[sinks].detach().float())
            self._calls.append(_Call(modules[name], Attention(params, backend, weights), value_dim))
        self.state_layers = [StateLayer(params, model.dtype) for params in config.state_layers]
        self._state_calls = [
            StateCall(modules[name], layer, kept, _running_states)
            for (name, kept), layer in zip(config.state_calls, self.state_layers, strict=True)
        ]
        self._linears: CalledLinears | None = CalledLinears(model)
        """Until `use_kernels`."""

    @property
    def layers(self) -> Sequence[CompilableLayer]:
        return ()

    @property
    def attention_layers(self) -> list[Attention]:
        return [call.attention for call in self._calls]

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        """Compute hidden states [T, hidden_size], after the final norm."""
        step = _Step(self._calls, inputs.meta)
        if self.state_layers:
            step.states = StepStates(inputs.meta)
        own = _OwnPositions(inputs.positions, step) if self._numbers_tokens else contextlib.nullcontext()
        with _attending(step), own:
            output = self._body(
                input_ids=inputs.token_ids.unsqueeze(0),
                position_ids=inputs.positions.unsqueeze(0),
                use_cache=False,
                **_cache_argument(self._body, step.states),
            )
        self._output = type(output)
        hidden: torch.Tensor = output[0]
        return hidden.squeeze(0)

    def last_hidden_state(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the model's own output head, with all that it does to logits."""
        self._given = hidden.unsqueeze(0)
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            logits: torch.Tensor = self.model(input_ids=ids, use_cache=False).logits
        finally:
            self._given = None
        return logits.squeeze(0)

    def reference_logits(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Compute the logits [T, vocab_size] of one request with transformers' own attention, without a cache."""
        _set_attention(self.model, "eager")
        given: dict[str, torch.Tensor] = {}
        if not self._is_wrapped:  # a wrapper numbers tokens in ways of its own
            given["position_ids"] = torch.arange(len(token_ids), device=token_ids.device).unsqueeze(0)
        try:
            output = self.model(input_ids=token_ids.unsqueeze(0), use_cache=False, **given)
        finally:
            _set_attention(self.model, _STEP)
        logits: torch.Tensor = output.logits
        return logits.squeeze(0)

    def check_states(self) -> bool:
        """Find out how layers with states continue them, after a reference pass; return whether any takes one token at
        a time.

        Raises:
            ConfigError: one cannot continue a state.
        """
        for call in self._state_calls:
            if (reason := call.check()) is not None:
                raise ConfigError(reason)
        return any(call.continues_singly for call in self._state_calls)

    def use_kernels(self) -> None:
        """Let our kernels compute what they can on a CPU, now that the linear layers have been called."""
        assert self._linears is not None
        self._linears.end()
        if self.model.device.type == "cpu":
            use_state_kernels(self.model, _running_states)
            use_kernels(self.model, self.model.dtype, self._linears)
        self._linears = None  # which has the layers, and they their weights

    def _forward_body(self, *args: Any, **kwargs: Any) -> Any:
        if self._given is None:
            return self._run_body(*args, **kwargs)
        assert self._output is not None
        return self._output(last_hidden_state=self._given)


def _set_attention(model: nn.Module, name: str) -> None:
    """Let every module compute attention by this function, whether its config is the model's or a copy."""
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            config._attn_implementation = name


def load_transformers(
    path: Path,
    config: TransformersConfig,
    backend: AttentionBackend,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int | None,
    on_loaded: Callable[[float], None] = lambda _: None,
) -> tuple[TransformersModel, dict[str, int]]:
    """Load a model by transformers' own loader; return it, and the number of elements of each tensor, by name.

    Args:
        seed: of random weights, which no checkpoint is read for; None: the checkpoint's.
        on_loaded: called with the share of the parameters that have been read, after each.

    Raises:
        ConfigError: the checkpoint lacks tensors, or has others than the model.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    hf_config = _hf_config(config, _STEP)
    model_class = _model_class(config, hf_config)
    if config.wrapper is not None:
        model_class = without_other_parts(model_class)
    if seed is not None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = model_class._from_config(hf_config, dtype=dtype, attn_implementation=_STEP)
    else:
        try:
            with _counted(on_loaded):
                loaded: Any = model_class.from_pretrained(
                    str(path),
                    config=hf_config,
                    dtype=dtype,
                    attn_implementation=_STEP,
                    use_safetensors=True,
                    local_files_only=True,
                    ignore_mismatched_sizes=True,  # named below
                    output_loading_info=True,
                )
        except Exception as error:  # whatever its loader raises
            reason = str(error).strip()[:600]
            raise ConfigError(f"transformers cannot load {path}: {type(error).__name__}: {reason}") from error
        model, info = loaded
        if config.wrapper is not None:
            read = dict.fromkeys(info.get("unexpected_keys") or ())
            info = {**info, "unexpected_keys": without_parts(read, config.unserved_parts).keys()}
        _check_tensors(path, info)
    model = (model if config.wrapper is None else text_model(model)).eval().requires_grad_(False).to(device)
    elements = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return TransformersModel(config, model, backend), elements


@contextmanager
def _counted(on_loaded: Callable[[float], None]) -> Iterator[None]:
    """Report how far transformers' loader is, by the hook of its progress bar, which is not shown."""

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return counted(args[0]) if args and hasattr(args[0], "__len__") else factory(*args, **kwargs)

    def counted(items: Collection[Any]) -> Iterator[Any]:
        for index, each in enumerate(items, 1):
            yield each
            on_loaded(index / len(items))

    before = transformers.utils.logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        transformers.utils.logging.set_tqdm_hook(before)


def _check_tensors(path: Path, info: Mapping[str, Any]) -> None:
    faults = []
    for kind, meaning in (
        ("missing_keys", "lacks"),
        ("unexpected_keys", "has what the model does not use:"),
        ("mismatched_keys", "has in another shape"),
        ("error_msgs", "cannot be read:"),
    ):
        if found := sorted(str(each) for each in info.get(kind) or ()):
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            faults.append(f"{meaning} {', '.join(found[:5])}{more}")
    if faults:
        raise ConfigError(
            f"the checkpoint in {path} does not fit its config.json: it {'; it '.join(faults)}; copy the whole "
            "checkpoint, of the architecture that config.json names"
        )
