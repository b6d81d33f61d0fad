"""The attention and the states of transformers' models: the function by which they compute attention here, what runs
it, and what convolutions and recurrent layers keep of a request.

transformers' models find an attention function by name in `AttentionInterface`. Ours hands each call to whatever runs
in the thread: what follows a model (`transformers_follow`), a `Step` of a decoder, or one of an encoder.

Modules with states take a cache object and ask it for the state of their layer, which is in blocks of our own. Ours
gives each call the states of some of a step's requests: those that decode are one call, of a batch with one token each;
of every other request the tokens are a call of their own. What a module keeps is found by following it, as with
attention.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from transformers import AttentionInterface, Cache, PreTrainedConfig

from argosy_engine.attention.backend import (
    Attention,
    AttentionBackend,
    AttentionMetadata,
    AttentionWeights,
    StateLayer,
)
from argosy_engine.attention.cpu_attn import CpuAttention
from argosy_engine.attention.params import AttentionParams, StateParams, StateTensor
from argosy_engine.errors import ConfigError
from argosy_engine.native.library import MAX_DELTA_KEYS, kernels

STEP, FOLLOWED = "argosy", "argosy_followed"
"""Names of our attention function: in steps, where transformers makes no masks for it, and while a model is
followed."""

_running = threading.local()


class AttentionCall(NamedTuple):
    """What a model asks of the attention function."""

    module: nn.Module
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """q [1, num_heads, T, head_dim], k and v."""
    mask: Any
    scaling: float | None
    others: Mapping[str, Any]


class Attends(Protocol):
    """Computes attention of the calls in a thread."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return [1, T, num_heads, head_dim]."""
        ...


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    attends: Attends = _running.attends
    return attends.attend(AttentionCall(module, (query, key, value), attention_mask, scaling, others)), None


@contextmanager
def attending(attends: Attends) -> Iterator[None]:
    """Let `attends` compute the attention of the models that this thread runs."""
    before = running()
    _running.attends = attends
    try:
        yield
    finally:
        _running.attends = before


def running() -> Attends | None:
    """Return what computes attention in this thread."""
    found: Attends | None = getattr(_running, "attends", None)
    return found


def set_attention(model: nn.Module, name: str) -> None:
    """Let every module compute attention by this function, whether its config is the model's or a copy."""
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            config._attn_implementation = name


class Rotation(NamedTuple):
    """How a step's tokens are rotated."""

    cosines: torch.Tensor
    """float32 [T, head_dim / 2], of each token, not of each position."""
    sines: torch.Tensor
    meta: AttentionMetadata
    """The step's, whose `positions` index these tables."""


class RotatingAttention:
    """A layer's attention by our CPU kernels, which norm and rotate q and k as well, over the cache of that layer."""

    def __init__(self, attention: Attention, impl: CpuAttention) -> None:
        self._attention = attention
        self.impl = impl

    @property
    def kv_cache(self) -> torch.Tensor:
        return self._attention.kv_cache

    @property
    def group(self) -> int:
        return self._attention.group

    def rotate_by(self, rotation: Rotation) -> None:
        """Let calls until the next one rotate by these tables, which the caller keeps alive."""
        self.impl.rotate_by(rotation.cosines, rotation.sines)

    def __call__(self, qkv: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """See `Attention`."""
        self.rotate_by(rotation)
        return self.impl(qkv, self.kv_cache, rotation.meta.of_group(self.group))


class AttendingLayer:
    """One call of the attention function in every forward pass, with a layer of the KV cache."""

    def __init__(
        self,
        module: nn.Module,
        params: AttentionParams,
        backend: AttentionBackend,
        weights: AttentionWeights,
        value_dim: int,
    ) -> None:
        self.module = module
        self.attention = Attention(params, backend, weights)
        self.backend = backend
        self._weights = weights
        self._head_dim = params.head_dim
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

    def rotating(
        self, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None, eps: float
    ) -> RotatingAttention | None:
        """Return the same attention from q and k that have not been normed and rotated; None: no kernel computes it.

        Args:
            q_norm, k_norm, eps: see `AttentionWeights`.
        """
        if not isinstance(self.attention.impl, CpuAttention) or self._value_dim != self._head_dim:
            return None
        weights = self._weights._replace(q_norm=q_norm, k_norm=k_norm, eps=eps)
        impl = self.backend.attention(self.attention.params, weights)
        assert isinstance(impl, CpuAttention)
        return RotatingAttention(self.attention, impl) if impl.norms_in_kernel else None


class Step:
    """Computes attention of one forward pass over the KV cache, layer by layer.

    Args:
        states: of the requests, if the model keeps any.
    """

    def __init__(
        self, layers: Sequence[AttendingLayer], meta: AttentionMetadata, states: StepStates | None
    ) -> None:
        self._layers = iter(layers)
        self._meta = meta
        self.states = states
        self.is_attending = False
        """Whether our own code runs, rather than the model's."""
        self._rotations: dict[tuple[int, int], tuple[Any, Rotation | None]] = {}
        """By the identity of cos and sin, which are kept alive beside it, and the size of heads."""

    def _next_layer(self, module: nn.Module) -> AttendingLayer:
        layer = next(self._layers, None)
        assert layer is not None, "a model attends as often as when it was followed"
        assert layer.module is module, "a model attends in the order in which it was followed"
        return layer

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer = self._next_layer(call.module)
        self.is_attending = True
        attended = layer(call.heads, self._meta)
        self.is_attending = False
        return attended

    def rotates(self, hidden_states: torch.Tensor, embeddings: Any, head_dim: int) -> bool:
        """Whether our kernels can rotate by what a model gives to its `apply_rotary_pos_emb`: it is the same for both
        halves of all heads, and in the dtype of the hidden states.

        Args:
            hidden_states: of all tokens, [1, T, hidden_size].
            embeddings: cos and sin, each [1, T, head_dim].
        """
        if not isinstance(embeddings, tuple) or len(embeddings) != 2:
            return False
        if hidden_states.shape[:-1] != (1, len(self._meta.positions)):
            return False
        key = id(embeddings), head_dim
        if key not in self._rotations:
            self.is_attending = True
            self._rotations[key] = embeddings, self._rotation(embeddings, hidden_states.dtype, head_dim)
            self.is_attending = False
        return self._rotations[key][1] is not None

    def begin_layers(self, modules: Sequence[nn.Module], embeddings: Any, head_dim: int) -> Rotation:
        """Return how q and k of modules are rotated that attend next without the attention function; it `rotates`."""
        for module in modules:
            self._next_layer(module)
        rotation = self._rotations[id(embeddings), head_dim][1]
        assert rotation is not None
        return rotation

    def _rotation(self, embeddings: tuple[Any, Any], dtype: torch.dtype, head_dim: int) -> Rotation | None:
        tables = []
        for each in embeddings:
            if each.dtype is not dtype or each.shape != (1, len(self._meta.positions), head_dim):
                return None
            first, second = each[0].split(head_dim // 2, dim=1)
            if not torch.equal(first, second):
                return None
            tables.append(first.float().contiguous())
        rows = torch.arange(len(tables[0]))
        groups = tuple(replace(each, positions=rows, shared={}) for each in self._meta.groups)
        meta = replace(self._meta, positions=rows, groups=groups, shared={})
        return Rotation(tables[0], tables[1], meta)


CACHES = frozenset({"past_key_values", "past_key_value", "cache_params", "layer_past", "cache"})
"""Parameters by which transformers' modules take a cache."""


def cache_parameter(module: nn.Module) -> str | None:
    """Return the parameter by which a module takes a cache."""
    found = CACHES & inspect.signature(type(module).forward).parameters.keys()
    return min(found, default=None)


def cache_argument(body: nn.Module, states: FollowedStates | StepStates | None) -> dict[str, Any]:
    """Return the argument that gives a model's body a cache, if it keeps states."""
    if states is None:
        return {}
    if (name := cache_parameter(body)) is None:
        raise ConfigError(f"{type(body).__name__} takes no cache")
    return {name: states}


_CONTINUED = 1e-3
"""Difference between a pass in one and in two that is allowed in float32, as a share of the largest output."""
_DECODED = 8
"""Tokens at the end of the reference pass that are computed one by one as well."""


class _States(Cache):
    """A cache without keys and values: those go to the KV cache when they are attended to."""

    def __init__(self) -> None:
        self.layers = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are given

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._kept_tensor(f"conv{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._kept_tensor(f"recurrent{state_idx}")

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return a convolution's inputs [N, channels, T] behind those that a request had before; as transformers does,
        behind as many zeros as fill the kernel, if it begins."""
        size = conv_kernel_size or conv_states.shape[-1]
        earlier = self.get_conv_state(layer_idx, state_idx)
        if earlier is None:
            full = F.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        else:
            full = torch.cat([earlier, conv_states], dim=-1)
        self._keep(f"conv{state_idx}", full[..., -size:])
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self._keep(f"recurrent{state_idx}", recurrent_states)
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def _kept_tensor(self, name: str) -> torch.Tensor | None:
        """Return what the requests have kept, None if they begin."""
        return None

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        raise NotImplementedError


class FollowedStates(_States):
    """Notes what modules keep while a model is followed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self._running: list[nn.Module] = []
        self.kept: dict[nn.Module, dict[str, StateTensor]] = {}
        """By module: convolutions' inputs `conv0` [channels, kernel size], states `recurrent0`, by number."""
        self.caching: set[nn.Module] = set()
        """Modules that keep keys and values."""
        for module in model.modules():
            if cache_parameter(module) is not None:
                module.register_forward_pre_hook(lambda each, _: self._running.append(each))
                module.register_forward_hook(lambda *_: self._ended())

    def _ended(self) -> None:
        self._running.pop()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.caching.add(self._running[-1])
        return key_states, value_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        module = self._running[-1]
        kept = self.kept.setdefault(module, {})
        shape = StateTensor(tuple(tensor.shape[1:]), "model" if name.startswith("conv") else "float32")
        if kept.setdefault(name, shape) != shape:
            raise ConfigError(f"{type(module).__name__} keeps states of two shapes")

    def kept_layers(self) -> Iterator[tuple[str, tuple[str, ...], StateParams]]:
        """Yield of each module that keeps a state its name, and the names and shapes of what it keeps."""
        for module, kept in self.kept.items():
            yield self._names[module], tuple(kept), StateParams(tuple(kept.values()))


class StepStates(_States):
    """The states of a step's requests, those of one part of them at a time."""

    def __init__(self, meta: AttentionMetadata | None) -> None:
        super().__init__()
        self.meta = meta
        """None: of a check of one module."""
        self.part: dict[str, torch.Tensor] | None = None
        """What some of the requests keep, by name; empty if they begin."""

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.part)

    def _kept_tensor(self, name: str) -> torch.Tensor | None:
        assert self.part is not None, "a module that was not followed asks for a state"
        return self.part.get(name)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        assert self.part is not None
        self.part[name] = tensor


def use_state_kernels(model: nn.Module, running: Callable[[], StepStates | None]) -> None:
    """Let our kernel compute the gated delta rule of a model's modules in steps, on a CPU.

    The functions are replaced in transformers' modules, where they are found by name: there is no other way to choose
    them without the packages that transformers knows.
    """
    for module in {sys.modules[type(each).__module__] for each in model.modules()}:
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            function = getattr(module, name, None)
            if function is not None and not isinstance(function, _GatedDeltaRule):
                setattr(module, name, _GatedDeltaRule(function, running))


class _GatedDeltaRule:
    """The gated delta rule: ours in a step, transformers' in its own passes."""

    def __init__(self, theirs: Callable[..., Any], running: Callable[[], StepStates | None]) -> None:
        self._theirs = theirs
        self._running = running

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        num_rows, _, num_heads, value_dim = value.shape
        key_dim = key.shape[-1]
        ours = kernels() if value.device.type == "cpu" and self._running() is not None else None
        if (
            ours is None
            or g.ndim != 3
            or value_dim % ours.lanes
            or key_dim > MAX_DELTA_KEYS
            or any(each is not None for each in others.values())
        ):
            return self._theirs(
                query,
                key,
                value,
                g=g,
                beta=beta,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                **others,
            )
        query, key = query.float(), key.float()
        if use_qk_l2norm_in_kernel:
            query, key = (
                each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for each in (query, key)
            )
        query = query * key_dim**-0.5
        if initial_state is None:
            state = torch.zeros(num_rows, num_heads, key_dim, value_dim)
        else:
            state = initial_state.float().contiguous()
        q, k, v, g, beta = (each.float().contiguous() for each in (query, key, value, g, beta))
        out = ours.gated_delta_rule(q, k, v, g, beta, state)
        return out.to(value.dtype), state


class StateCall:
    """A module that keeps a state: called once for each part of a step's requests.

    Args:
        module: whose forward this takes the place of.
        kept: names of what it keeps (`FollowedStates.kept`).
        running: returns the states of the step that runs, None in a reference pass.
    """

    def __init__(
        self,
        module: nn.Module,
        layer: StateLayer,
        kept: Sequence[str],
        running: Callable[[], StepStates | None],
    ) -> None:
        self.layer = layer
        self._kept = kept
        self._run = module.forward
        self._running = running
        self._dtypes = [dtype for _, dtype in layer.tensors]
        """Of what the module keeps, as it last gave it."""
        self._module = module
        self._seen: tuple[Sequence[Any], dict[str, Any]] | None = None
        """Arguments of the first reference pass, until `check`."""
        self.continues_singly = False
        """Whether tokens that follow a state are computed one by one: not every module can do more."""
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        states = self._running()
        if states is None:
            if self._seen is None:
                self._seen = args, kwargs
            return self._run(*args, **kwargs)
        meta = states.meta
        assert meta is not None
        rows = self.layer.rows(meta)
        ends, lens = meta.query_start_loc_cpu[1:].tolist(), meta.seq_lens_cpu.tolist()
        num_decodes = meta.num_decodes
        if min(lens[:num_decodes], default=1) == 1:
            num_decodes = 0  # one of them begins
        spans = [(0, num_decodes)] if num_decodes else []
        spans += [(row, row + 1) for row in range(num_decodes, len(ends))]
        outputs = []
        for first, last in spans:
            start, end, count = (ends[first - 1] if first else 0), ends[last - 1], last - first
            is_new = count == 1 and lens[first] == end - start
            states.part = part = self._part(None if is_new else rows.sources[first:last])
            steps = [(start, end)]
            if self.continues_singly and count == 1 and not is_new:
                steps = [(token, token + 1) for token in range(start, end)]
            for begin, stop in steps:
                given, named = _arguments(args, kwargs, begin, stop, ends[-1], count)
                outputs.append(self._run(*given, **named))
            kept = [part[name] for name in self._kept]
            self._dtypes = [each.dtype for each in kept]
            self.layer.store(rows.targets[first:last], kept)
        states.part = None
        return _joined(outputs)

    def check(self) -> str | None:
        """Compare one pass of the module with two that continue a state, in float32 on what it got in a reference pass,
        because rounding hides much in smaller dtypes. Sets `continues_singly`.

        Returns:
            Why the module cannot be served, None if it can.
        """
        assert self._seen is not None, "there was no reference pass"
        (args, kwargs), self._seen = self._seen, None
        states = StepStates(None)
        args, kwargs = _in_float32(args), _in_float32(kwargs)
        weights = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers())
        }
        name = cache_parameter(self._module)
        assert name is not None
        num_tokens = (args[0] if args else kwargs["hidden_states"]).shape[1]

        def outputs(ends: Sequence[int], cache: StepStates | None) -> torch.Tensor:
            parts, start = [], 0
            states.part = {}
            for end in ends:
                given, named = _arguments(args, kwargs, start, end, num_tokens, 1)
                self._module.forward = self._run
                try:
                    output = functional_call(
                        self._module, weights, given, {**named, name: cache}, tie_weights=False
                    )
                finally:
                    self._module.forward = self
                parts.append(output[0] if isinstance(output, tuple) else output)
                start = end
            return torch.cat(parts, dim=1)

        whole = outputs([num_tokens], None)
        allowed = _CONTINUED * float(whole.abs().max())
        half = max(num_tokens // 2, 1)
        last = max(num_tokens - _DECODED, half)

        def continues(*ends: int) -> bool:
            return float((outputs(ends, states) - whole).abs().max()) <= allowed

        self.continues_singly = not continues(half, num_tokens)
        first = half if self.continues_singly else last
        if continues(first, *range(first + 1, num_tokens + 1)):  # as decodes do
            return None
        return f"{type(self._module).__name__} continues a state otherwise than it computes a whole prompt"

    def _part(self, blocks: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the states in these blocks, or those of a request that begins."""
        if blocks is None:
            return {}
        loaded = zip(self._kept, self.layer.load(blocks), self._dtypes, strict=True)
        return {name: tensor.to(dtype) for name, tensor, dtype in loaded}


def _in_float32(value: Any) -> Any:
    """Return arguments with all floating-point tensors in float32."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _in_float32(each) for name, each in value.items()}
    return tuple(_in_float32(each) for each in value) if isinstance(value, (tuple, list)) else value


def _arguments(
    args: Sequence[Any], kwargs: dict[str, Any], start: int, end: int, num_tokens: int, num_rows: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call for some tokens; see `_part_of`."""
    span = start, end, num_tokens, num_rows
    given = tuple(_part_of(each, *span) for each in args)
    return given, {name: _part_of(each, *span) for name, each in kwargs.items()}


def _part_of(value: Any, start: int, end: int, num_tokens: int, num_rows: int) -> Any:
    """Return the tokens [start, end) of what has all of a step, [1, num_tokens, ...], as [num_rows, tokens, ...]."""
    if isinstance(value, torch.Tensor) and value.ndim >= 2 and value.shape[:2] == (1, num_tokens):
        part = value[:, start:end]
        return part.transpose(0, 1) if num_rows > 1 else part
    if isinstance(value, tuple):
        return tuple(_part_of(each, start, end, num_tokens, num_rows) for each in value)
    return value


def _joined(outputs: Sequence[Any]) -> Any:
    """Return what calls for parts of a step have returned, [rows, tokens, ...] each, as for the whole."""
    if isinstance(outputs[0], tuple):  # what follows the first is not read where there is a cache
        return (_joined([output[0] for output in outputs]), *(None for _ in outputs[0][1:]))
    return torch.cat([output.flatten(0, 1) for output in outputs]).unsqueeze(0)


AttentionInterface.register(STEP, _attention)
AttentionInterface.register(FOLLOWED, _attention)
