"""LayerFactory: makes a model's layers from its weights. What depends on the device, and which part of a layer this
tensor-parallel rank has, is decided here, not in models: they give the sizes of the whole.

What a pipeline stage does not have is made on the meta device, where it takes no memory and is never called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from argosy_engine.attention.backend import (
    Attention,
    AttentionBackend,
    AttentionWeights,
    DecoderParts,
    FusedDecoder,
    LatentAttention,
    LatentWeights,
    RotaryEmbedding,
)
from argosy_engine.attention.params import (
    AttentionParams,
    DeltaNetParams,
    LatentAttentionParams,
    LayerParams,
    MambaParams,
    ShortConvParams,
)
from argosy_engine.checkpoint.weights import WeightPlan, Weights
from argosy_engine.distributed.parallel_state import Communicator, LocalCommunicator
from argosy_engine.layers.delta_net import DeltaNet, DeltaNetWeights
from argosy_engine.layers.embedding import Embedding, VocabParallelEmbedding, inverse_frequencies
from argosy_engine.layers.experts import Experts, ExpertsSpec, SeparateExperts, TokenExchange, TritonExperts
from argosy_engine.layers.layer_compiler import LayerCompiler, LayerFunction
from argosy_engine.layers.linear import (
    Float32Linear,
    GatedLinear,
    Linear,
    LinearSpec,
    RowParallelLinear,
    VocabParallelHead,
    linear_of,
)
from argosy_engine.layers.linear_method import LinearMethod
from argosy_engine.layers.mamba import GroupMeans, Mamba, MambaWeights
from argosy_engine.layers.norms import (
    GatedActivation,
    HeadsNorm,
    InputNorm,
    LayerKernels,
    LayerNorm,
    RMSNorm,
    TritonLayerKernels,
    WidthNorm,
)
from argosy_engine.layers.short_conv import ShortConv, ShortConvWeights
from argosy_engine.model_configs.rope_config import RopeParameters
from argosy_engine.model_configs.sharding import WHOLE, WHOLE_MODEL, Shard, Sharding, Stage
from argosy_engine.model_configs.vision_config import VisionSpec
from argosy_engine.quantized_rows import TakesRows

Params = TypeVar("Params", AttentionParams, LatentAttentionParams)


class ImageRotary:
    """The rotary tables of a model with M-RoPE.

    Args:
        num_rows: most tokens of a step.
    """

    def __init__(self, spec: VisionSpec, num_rows: int) -> None:
        self.spec, self.num_rows = spec, num_rows
        self.tables: list[RotaryEmbedding] = []


class LayerFactory:
    """Makes the layers of one model.

    Args:
        weights: source of the tensors; a model's constructor takes each exactly once.
        backend: computes the model's attention.
        max_positions: length of position tables that are computed rather than loaded.
        linear_method: loads and computes the model's linear layers.
        sharding: this rank's part of the layers.
        communicator: of the ranks that share the layers.
        stage: the layers that this rank has.
        exchange: of the tokens of several engine cores that divide the experts among them.
        compiler: compiles parts of the layers; None: they run as they are.
        has_output_head: whether there is a projection to the vocabulary. A model that pools has none.
        image_rotary: of a model with M-RoPE, where its rotary tables are noted.
    """

    def __init__(
        self,
        weights: Weights,
        backend: AttentionBackend,
        max_positions: int,
        linear_method: LinearMethod | None = None,
        sharding: Sharding = WHOLE,
        communicator: Communicator | None = None,
        stage: Stage = WHOLE_MODEL,
        exchange: TokenExchange | None = None,
        compiler: LayerCompiler | None = None,
        *,
        has_output_head: bool = True,
        image_rotary: ImageRotary | None = None,
    ) -> None:
        self.weights = weights
        self._image_rotary = image_rotary
        self.dtype, self.device = weights.dtype, weights.device
        self.max_positions = max_positions
        self._backend = backend
        self._method = linear_method or LinearMethod(is_traceable=compiler is not None)
        self._kernels: LayerKernels = LayerKernels(has_native=compiler is None)
        if backend.uses_triton:
            self._kernels = TritonLayerKernels()
        self._compiler = compiler
        self.sharding = sharding
        self._communicator = communicator or LocalCommunicator()
        self._stage = stage
        self.exchange = exchange
        self._has_output_head = has_output_head

    def own_layers(self, layers: Sequence[LayerParams], kind: type[Params]) -> list[tuple[int, Params]]:
        """Return the layers of this pipeline stage, of all the model's, with their indices.

        Args:
            kind: of the layers of this family.
        """
        own: list[tuple[int, Params]] = []
        for index in self._stage.layers(len(layers)):
            layer = layers[index]
            assert isinstance(layer, kind)
            own.append((index, layer))
        return own

    def own_indices(self, num_layers: int) -> range:
        """Return the indices of the layers of this pipeline stage, of all the model's."""
        return self._stage.layers(num_layers)

    def before_layers(self, *, is_tied: bool) -> LayerFactory:
        """Return the factory of what comes before the layers: the embedding, which a tied output head uses as well."""
        return self if self._stage.is_first or (is_tied and self._stage.is_last) else self._absent()

    def after_layers(self) -> LayerFactory:
        """Return the factory of what comes after the layers: the final norm and the output head."""
        return self if self._stage.is_last else self._absent()

    def _absent(self) -> LayerFactory:
        plan = WeightPlan(self.dtype)
        return LayerFactory(plan, self._backend, self.max_positions, self._method, self.sharding)

    def part(self, function: LayerFunction) -> LayerFunction:
        """Return a function of a layer, compiled if the model's layers are. See `layer_compiler`."""
        return function if self._compiler is None else self._compiler.part(function)

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor in the engine's dtype, on its device."""
        return self.weights.take(name, *shape)

    def linear(
        self,
        parts: Mapping[str, int],
        in_features: int,
        *,
        bias: bool = False,
        order: tuple[int, ...] | None = None,
        keeps_precision: bool = False,
    ) -> Linear:
        """Make one projection, or several fused along their outputs, of which every rank has the whole.

        Arguments: `LinearSpec`.
        """
        spec = LinearSpec(parts, in_features, bias, order=order, keeps_precision=keeps_precision)
        return self._method.load(self.weights, spec)

    def router(
        self, name: str, num_experts: int, in_features: int, *, bias: bool, in_float32: bool
    ) -> Linear:
        """Make the linear layer that chooses experts, of which every rank has the whole."""
        if not in_float32:
            return self.linear({name: num_experts}, in_features, bias=bias, keeps_precision=True)
        assert not bias
        shape = num_experts, in_features
        if self.dtype is torch.float32:
            weight = self.weights.take(name + ".weight", *shape)
        else:
            weight = self.weights.take_scale(name + ".weight", shape, is_signed=True)
        return Float32Linear(linear_of(weight, is_traceable=self._compiler is not None))

    def column_linear(
        self,
        parts: Mapping[str, int],
        in_features: int,
        *,
        bias: bool = False,
        is_transposed: bool = False,
        head_order: tuple[int, ...] | None = None,
    ) -> Linear:
        """Make one projection, or several fused along their outputs, of which a rank computes its part of each.

        Arguments: `LinearSpec`.

        Args:
            head_order: order into which the output features of each head are brought; None: as they are.
        """
        spec = LinearSpec(parts, in_features, bias, is_transposed, self._equal_parts(parts))
        if head_order is not None:
            spec = replace(spec, order=_repeated(head_order, spec.out_features // len(head_order)))
        return self._method.load(self.weights, spec)

    def gated_linear(
        self,
        gate: str,
        up: str | None,
        inner: int,
        in_features: int,
        *,
        bias: bool,
        feeds: TakesRows,
        activation: str = "silu",
    ) -> GatedLinear:
        """Make two projections to `inner` features, fused with activation(gate) * up. A rank computes its part of both.

        Args:
            up: None: the checkpoint has both in `gate`, the gate's features first.
            feeds: the product that gets the result.
            activation: a name of `LayerKernels.gated_activations`.
        """
        parts = {gate: 2 * inner} if up is None else {gate: inner, up: inner}
        outputs = self._equal_parts(parts)
        if up is None and outputs is not None:
            own = self.sharding.part(inner)
            outputs = {gate: (own, _moved(own, inner))}
        spec = LinearSpec(parts, in_features, bias, outputs=outputs)
        return self._gated(spec, activation, feeds)

    def activated_linear(
        self, name: str, inner: int, in_features: int, *, bias: bool, feeds: TakesRows, activation: str
    ) -> GatedLinear:
        """Make a projection to `inner` features with an activation that has no gate, of which a rank computes its part;
        see `gated_linear`."""
        parts = {name: inner}
        spec = LinearSpec(parts, in_features, bias, outputs=self._equal_parts(parts))
        return self._gated(spec, activation, feeds)

    def _gated(
        self, spec: LinearSpec, activation: str = "silu", feeds: TakesRows | None = None
    ) -> GatedLinear:
        function: GatedActivation = self._kernels.gated_activations[activation]
        if feeds is not None and feeds.input_quantization is not None:
            function = self._kernels.quantized_gated_activation(activation, feeds.input_quantization)
        return self._method.load_gated(self.weights, spec, function)

    def experts(self, spec: ExpertsSpec) -> Experts:
        """Make the experts of one layer. A rank computes some of them, or a part of each: their outputs are complete
        once `sum_ranks` and `exchange` have added them up."""
        if self.sharding.divides_experts:
            features = None if self.sharding.has_whole_experts else self.sharding.part(spec.inner)
            spec = replace(spec, held=self.sharding.experts(spec.num_experts), features=features)
        correction = None
        if spec.routing.has_correction:
            name = spec.prefix + spec.names.correction
            correction = self.weights.take_scale(name, spec.num_experts, is_signed=True)
        scales = None
        if spec.routing.has_expert_scales:
            scales = self.weights.take_scale(
                spec.prefix + spec.names.scales, spec.num_experts, is_signed=True
            )
        if self._backend.uses_triton:
            return TritonExperts(spec, self._method.load_experts(self.weights, spec), correction, scales)
        if spec.names.stacked is not None:
            return SeparateExperts(spec, self._unstacked(spec), correction, scales)
        separate = {index: self._expert(spec, index) for index in spec.held_experts}
        return SeparateExperts(spec, separate, correction, scales)

    def _expert(self, spec: ExpertsSpec, index: int) -> tuple[GatedLinear, Linear]:
        *names, down = (spec.projection(index, name) for name in spec.layers)
        outputs = None if spec.features is None else dict.fromkeys(names, (spec.features,))
        gate_up = LinearSpec(dict.fromkeys(names, spec.inner), spec.hidden, outputs=outputs)
        down_spec = LinearSpec({down: spec.hidden}, spec.inner, inputs=spec.features)
        return self._gated(gate_up, spec.activation), self._method.load(self.weights, down_spec)

    def _unstacked(self, spec: ExpertsSpec) -> dict[int, tuple[GatedLinear, Linear]]:
        whole = self._method.load_experts(self.weights, spec)
        activation = self._kernels.gated_activations[spec.activation]

        def bias(biases: torch.Tensor | None, place: int) -> torch.Tensor | None:
            return None if biases is None else biases[place]

        experts = {}
        for place, index in enumerate(spec.held_experts):
            gate_up_bias, down_bias = bias(whole.gate_up_bias, place), bias(whole.down_bias, place)
            gate_up = self._method.make_gated(whole.gate_up[place], gate_up_bias, activation)
            down = self._method.make(whole.down[place], down_bias)
            experts[index] = gate_up, down
        return experts

    def sum_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """Add what every rank has computed, in place; returns x."""
        return self._communicator.all_reduce(x)

    def rms_norm(
        self, name: str, size: int, eps: float, *, adds_one: bool = False, in_float32: bool = False
    ) -> RMSNorm:
        """Make an RMSNorm with the weight NAME.weight.

        Args:
            adds_one: multiply by 1 + weight, in float32.
            in_float32: multiply in float32.
        """
        if in_float32:
            return self.float32_norm(name + ".weight", size, eps)
        weight = self.take(name + ".weight", size)
        if adds_one:
            weight = weight.to(torch.float32, copy=True).add_(1.0)
        return RMSNorm(weight, eps, self.dtype, self._kernels)

    def layer_norm(self, name: str, size: int, eps: float, *, has_bias: bool = True) -> LayerNorm:
        """Make a LayerNorm with the weight NAME.weight and, if it has one, the bias NAME.bias."""
        weight = self.take(name + ".weight", size)
        return LayerNorm(weight, self.take(name + ".bias", size) if has_bias else None, eps)

    def float32_norm(self, weight: str | None, size: int, eps: float, *, factor: float = 1.0) -> RMSNorm:
        """Make an RMSNorm that multiplies by a tensor and a factor, in float32.

        Args:
            weight: name of the tensor; None: there is none.
        """
        if weight is None:
            scale = torch.full((size,), factor, dtype=torch.float32, device=self.device)
        else:
            scale = self.take(weight, size).to(torch.float32, copy=True).mul_(factor)
        return RMSNorm(scale, eps, self.dtype, self._kernels)

    def input_norm(
        self,
        name: str,
        size: int,
        eps: float,
        *,
        feeds: TakesRows,
        adds_one: bool = False,
        in_float32: bool = False,
    ) -> InputNorm:
        """Make an RMSNorm whose result is the input of a product, or of several that want it alike; see `rms_norm`.

        Args:
            feeds: the product, or a block that begins with it.
        """
        norm = self.rms_norm(name, size, eps, adds_one=adds_one, in_float32=in_float32)
        return InputNorm(norm, self._kernels, feeds.input_quantization)

    def qkv_linear(
        self,
        names: Sequence[str],
        params: AttentionParams,
        in_features: int,
        *,
        bias: bool = False,
        is_transposed: bool = False,
        is_grouped: bool = False,
        rope: RopeParameters | None = None,
    ) -> Linear:
        """Make the projections to q, k and v, of which a rank computes its heads.

        Args:
            names: of the three projections, or of the one that the checkpoint has for all.
            is_grouped: whether in that one each KV head's queries precede its key and its value (Falcon).
            rope: q and k are put in the order that `rotary` and the kernels want (`RopeParameters.head_order`), as
                must be what is applied to their elements (`head_weight`); None: as they are.
        """
        widths = [heads * params.head_dim for heads in (params.num_heads, *2 * (params.num_kv_heads,))]
        parts = dict(zip(names, widths, strict=True)) if len(names) > 1 else {names[0]: sum(widths)}
        outputs: dict[str, tuple[range, ...]] | None = None
        if is_grouped:
            outputs = {names[0]: self._ungrouped(params)}
        elif self.sharding.size > 1:
            ranges = self.sharding.qkv(params)
            if len(names) > 1:
                outputs = {name: (each,) for name, each in zip(names, ranges, strict=True)}
            else:
                starts = (0, widths[0], widths[0] + widths[1])
                outputs = {names[0]: tuple(map(_moved, ranges, starts))}
        order = None
        if rope is not None and self.device.type != "meta":  # a plan comes before any check of the sizes
            order = rope.head_order(params.head_dim)
        if order is not None:
            own = params.of_rank(self.sharding.size)
            rotated, num_all = own.num_heads + own.num_kv_heads, own.num_heads + 2 * own.num_kv_heads
            order = (
                *_repeated(order, rotated),
                *range(rotated * params.head_dim, num_all * params.head_dim),
            )
        spec = LinearSpec(parts, in_features, bias, is_transposed, outputs, order=order)
        return self._method.load(self.weights, spec)

    def _ungrouped(self, params: AttentionParams) -> tuple[range, ...]:
        """Return the features of this rank's heads of q, then k, then v, in a projection that has groups of them."""
        dim, group = params.head_dim, params.num_heads // params.num_kv_heads
        q, kv, _ = (range(each.start // dim, each.stop // dim) for each in self.sharding.qkv(params))
        queries = [head // group * (group + 2) + head % group for head in q]
        keys = [head * (group + 2) + group for head in kv]
        places = (*queries, *keys, *(place + 1 for place in keys))
        return tuple(range(place * dim, (place + 1) * dim) for place in places)

    def selected_linear(
        self,
        parts: Mapping[str, int],
        outputs: Mapping[str, Sequence[range]],
        in_features: int,
        *,
        bias: bool = False,
        keeps_precision: bool = False,
    ) -> Linear:
        """Make projections of which this rank computes some outputs, in another order than the checkpoint's.

        Args:
            outputs: of each part, one range after the other.
        """
        chosen = {name: tuple(each for each in outputs[name] if each) for name in parts}
        spec = LinearSpec(parts, in_features, bias, outputs=chosen, keeps_precision=keeps_precision)
        return self._method.load(self.weights, spec)

    def delta_net(self, prefix: str, params: DeltaNetParams, eps: float) -> DeltaNet:
        """Make what a Gated DeltaNet computes between its projections, of which a rank computes its heads.

        Args:
            prefix: of the layer's tensors.
            params: of all ranks.
            eps: of the norm.
        """
        keys = params.num_key_heads * params.key_dim
        q, k, v = map(_moved, self.sharding.delta_net(params), (0, keys, 2 * keys))
        conv = self.weights.take(
            prefix + "conv1d.weight", params.num_channels, 1, params.kernel_size, shard=Shard(0, (q, k, v))
        )
        heads = Shard(0, (self.sharding.part(params.num_value_heads),))
        rates, dt_bias = (
            self.weights.take_scale(prefix + name, params.num_value_heads, heads, is_signed=True)
            for name in ("A_log", "dt_bias")
        )
        norm = self.weights.take_scale(prefix + "norm.weight", params.value_dim, is_signed=True)
        weights = DeltaNetWeights(conv[:, 0].t().float().contiguous(), rates.exp(), dt_bias, norm, eps)
        return DeltaNet(
            params.of_rank(self.sharding.size), weights, self.dtype, uses_triton=self._backend.uses_triton
        )

    def mamba(self, prefix: str, params: MambaParams, eps: float, *, has_conv_bias: bool) -> Mamba:
        """Make what a Mamba-2 layer computes between its projections, of which a rank computes its heads.

        Args:
            prefix: of the layer's tensors.
            params: of all ranks.
            eps: of the norm.
            has_conv_bias: whether the checkpoint has a bias of the convolution.
        """
        own_values, own_states = self.sharding.mamba(params)
        first = params.num_values
        b, c = (_moved(own_states, start) for start in (first, first + params.num_groups * params.state_size))
        channels = Shard(0, (own_values, b, c))
        conv = self.weights.take(
            prefix + "conv1d.weight", params.num_channels, 1, params.kernel_size, shard=channels
        )
        conv = conv[:, 0].t().float().contiguous()
        conv_bias = conv.new_zeros(conv.shape[1])
        if has_conv_bias:
            conv_bias = self.weights.take(prefix + "conv1d.bias", params.num_channels, shard=channels).float()
        heads = Shard(0, (self.sharding.part(params.num_heads),))
        rates, dt_bias, skip = (
            self.weights.take_scale(prefix + name, params.num_heads, heads, is_signed=True)
            for name in ("A_log", "dt_bias", "D")
        )
        norm = conv.new_ones(len(own_values))
        if params.norm is not None:
            shard = Shard(0, (own_values,))
            norm = self.weights.take_scale(prefix + "norm.weight", params.num_values, shard, is_signed=True)
        weights = MambaWeights(conv, conv_bias, rates.exp(), dt_bias, skip, norm, eps)
        own = params.of_rank(self.sharding.size)
        means = None
        if own.norm is not None and own.group_ranks > 1 and not conv.is_meta:
            means = GroupMeans(self._communicator, params.num_groups)
        return Mamba(own, weights, self.dtype, means, uses_triton=self._backend.uses_triton)

    def short_conv(self, name: str, params: ShortConvParams, *, has_bias: bool) -> ShortConv:
        """Make what a short convolution computes between its projections, of which a rank computes its channels.

        Args:
            name: of the convolution.
            params: of all ranks.
            has_bias: whether the checkpoint has a bias of it.
        """
        channels = Shard(0, (self.sharding.part(params.num_channels),))
        weight = self.weights.take(
            name + ".weight", params.num_channels, 1, params.kernel_size, shard=channels
        )
        conv = weight[:, 0].t().float().contiguous()
        bias = conv.new_zeros(conv.shape[1])
        if has_bias:
            bias = self.weights.take(name + ".bias", params.num_channels, shard=channels).float()
        own = params.of_rank(self.sharding.size)
        return ShortConv(own, ShortConvWeights(conv, bias), self.dtype, uses_triton=self._backend.uses_triton)

    def head_weight(self, name: str, head_dim: int, rope: RopeParameters | None = None) -> torch.Tensor:
        """Return a weight [head_dim] of the elements of heads, in the order of `qkv_linear`."""
        weight = self.take(name, head_dim)
        order = None if rope is None else rope.head_order(head_dim)
        return weight if order is None or weight.is_meta else weight[list(order)]

    def width_norm(
        self, q: str, k: str, params: AttentionParams, eps: float, rope: RopeParameters | None = None
    ) -> WidthNorm:
        """Make RMSNorms over all query heads and over all key heads (OLMo 2), of which a rank has its heads; see
        `qkv_linear`."""
        dim, size = params.head_dim, self.sharding.size
        own = params.of_rank(size)
        q_range, k_range, _ = self.sharding.qkv(params)
        order = None if rope is None else rope.head_order(dim)
        norms = []
        for name, heads, indices, own_heads in (
            (q, params.num_heads, q_range, own.num_heads),
            (k, params.num_kv_heads, k_range, own.num_kv_heads),
        ):
            shard = None if size == 1 else Shard(0, (indices,))
            weight = self.weights.take(name + ".weight", heads * dim, shard=shard)
            if order is not None and not weight.is_meta:
                weight = weight[list(_repeated(order, own_heads))]
            norms.append(RMSNorm(weight, eps, self.dtype, self._kernels))
        return WidthNorm(norms[0], norms[1], None if size == 1 else self._communicator)

    def heads_norm(
        self, q: str, k: str, params: AttentionParams, eps: float, rope: RopeParameters | None = None
    ) -> HeadsNorm:
        """Make LayerNorms of query and key heads with weights of their own (Command R+), of which a rank has its heads;
        see `qkv_linear`."""
        dim = params.head_dim
        q_range, k_range, _ = self.sharding.qkv(params)
        order = None if rope is None else rope.head_order(dim)
        weights = []
        for name, count, indices in ((q, params.num_heads, q_range), (k, params.num_kv_heads, k_range)):
            heads = range(indices.start // dim, indices.stop // dim)
            shard = None if self.sharding.size == 1 else Shard(0, (heads,))
            weights.append(self.weights.take(name + ".weight", count, dim, shard=shard))
        if weights[0].is_meta:  # where `torch.cat` would import torch's compiler
            return HeadsNorm(weights[0], eps)
        weight = torch.cat(weights)
        return HeadsNorm(weight if order is None else weight[:, list(order)], eps)

    def sinks(self, name: str, params: AttentionParams) -> torch.Tensor:
        """Return the attention sinks of this rank's heads, float32 [num_heads]."""
        shard = Shard(0, (self.sharding.part(params.num_heads),)) if self.sharding.size > 1 else None
        return self.weights.take_scale(name, params.num_heads, shard, is_signed=True)

    def of_heads(self, values: Sequence[float]) -> torch.Tensor:
        """Return constants of this rank's heads, float32, of those of all."""
        own = self.sharding.part(len(values))
        return torch.tensor(values[own.start : own.stop], dtype=torch.float32, device=self.device)

    def row_linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        is_transposed: bool = False,
    ) -> Linear:
        """Make a projection from features of which each rank has computed a part. Arguments: `LinearSpec`."""
        parts = {name: out_features}
        if self.sharding.size == 1:
            return self._method.load(self.weights, LinearSpec(parts, in_features, bias, is_transposed))
        has_bias = bias and self.sharding.rank == 0  # the sum over the ranks contains it once
        inputs = self.sharding.part(in_features)
        spec = LinearSpec(parts, in_features, has_bias, is_transposed, inputs=inputs)
        return RowParallelLinear(self._method.load(self.weights, spec), self._communicator)

    def embedding(self, name: str, vocab_size: int, width: int) -> Embedding:
        """Make the embedding of tokens, of which a rank has its part of the vocabulary."""
        if self.sharding.size == 1:
            return Embedding(self.take(name, vocab_size, width))
        tokens = self.sharding.tokens(vocab_size)
        weight = self.weights.take(name, vocab_size, width, shard=Shard(0, (tokens,)))
        return VocabParallelEmbedding(weight, tokens, self._communicator)

    def output_head(self, embedding: Embedding, vocab_size: int, *, is_tied: bool) -> Linear:
        """Make the projection to the vocabulary: `lm_head` or, if it is tied, the weight of the embedding."""
        if not self._has_output_head:
            return self._absent().output_head(embedding, vocab_size, is_tied=False)
        name, in_features = "lm_head", embedding.weight.shape[1]
        outputs = {name: (self.sharding.tokens(vocab_size),)} if self.sharding.size > 1 else None
        spec = LinearSpec(
            {name: vocab_size}, in_features, outputs=outputs, keeps_precision=True, is_head=True
        )
        head = self._method.tie(embedding.weight) if is_tied else self._method.load(self.weights, spec)
        if self.sharding.size == 1:
            return head
        return VocabParallelHead(head, self._communicator, vocab_size)

    def rotary(self, rope: RopeParameters, head_dim: int) -> RotaryEmbedding:
        """Make the tables of a rotary embedding, which layers share."""
        frequencies, image = inverse_frequencies(rope, head_dim), self._image_rotary
        axes = None if image is None else image.spec.axes(len(frequencies))
        rotary = RotaryEmbedding(
            frequencies,
            self.max_positions,
            self.dtype,
            self.device,
            rope.attention_scaling,
            head_dim,
            axes=axes,
            num_own_rows=0 if image is None else image.num_rows,
        )
        if image is not None:
            image.tables.append(rotary)
        return rotary

    def attention(
        self,
        params: AttentionParams,
        weights: AttentionWeights = AttentionWeights(),  # noqa: B008 (immutable)
        *,
        prefix: str,
        feeds: TakesRows,
    ) -> Attention:
        """Make one layer's attention, of which a rank computes its heads, with the scales of an FP8 KV cache.

        Args:
            feeds: the output projection.
            prefix: of the attention's tensors in the checkpoint, which may have such scales.
        """
        weights = weights._replace(output_quantization=feeds.input_quantization)
        if self._backend.kv_cache_dtype is torch.float8_e4m3fn:
            weights = weights._replace(
                k_scale=self._kv_scale(prefix, "k"), v_scale=self._kv_scale(prefix, "v")
            )
        return Attention(params.of_rank(self.sharding.size), self._backend, weights)

    def latent_attention(
        self, params: LatentAttentionParams, rotary: RotaryEmbedding, eps: float, *, prefix: str
    ) -> LatentAttention:
        """Make one layer's latent attention, of which a rank computes its heads.

        Args:
            rotary: of `qk_rope_head_dim` elements.
            eps: of the norm of latents.
            prefix: of the attention's tensors in the checkpoint.
        """
        width = params.qk_nope_head_dim + params.v_head_dim
        parts = {prefix + "kv_b_proj": params.num_heads * width}
        spec = LinearSpec(parts, params.kv_lora_rank, outputs=self._equal_parts(parts))
        kv_b = self._method.take_weight(self.weights, spec).view(-1, width, params.kv_lora_rank)
        norm = self.take(prefix + "kv_a_layernorm.weight", params.kv_lora_rank)
        weights = LatentWeights.of_kv_b(kv_b, params.qk_nope_head_dim, rotary, norm, eps)
        return LatentAttention(params.of_rank(self.sharding.size), self._backend, weights)

    def _kv_scale(self, prefix: str, name: str) -> torch.Tensor:
        """Return the scale of keys or values, float32 [1]; 1 if the checkpoint has none."""
        # compressed-tensors, ModelOpt, and what compressed-tensors wrote in 2024
        names = [
            f"{prefix}{name}_scale",
            f"{prefix}{name}_proj.{name}_scale",
            f"{prefix}{name}_proj.output_scale",
        ]
        found = self.weights.find_scale(names)
        return torch.ones(1, device=self.device) if found is None else found

    def fuse_decoder(self, layers: Sequence[DecoderParts]) -> FusedDecoder | None:
        """Return a faster way to run all layers of a decoder; None: run them one by one.

        It exchanges nothing between ranks, so there is none if they share the layers, and none for compiled layers.
        """
        is_whole = self.sharding.size == 1 and self._compiler is None
        return self._backend.fuse_decoder(layers) if is_whole else None

    def _equal_parts(self, parts: Mapping[str, int]) -> dict[str, tuple[range, ...]] | None:
        """Return the rank's output features of projections; None: all."""
        if self.sharding.size == 1:
            return None
        return {name: (self.sharding.part(size),) for name, size in parts.items()}


def _repeated(order: tuple[int, ...], heads: int) -> tuple[int, ...]:
    """Return the order of the elements of several heads, one after the other."""
    return tuple(head * len(order) + index for head in range(heads) for index in order)


def _moved(indices: range, start: int) -> range:
    return range(indices.start + start, indices.stop + start)
