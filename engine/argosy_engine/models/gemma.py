"""Gemma 1 to 4 (text): norms before and, but in the first, after each block, GeGLU, local and global attention layers.

Differences from Llama's decoder: RMSNorm multiplies by 1 + weight, embeddings are multiplied by sqrt(hidden_size), and
scores are divided by sqrt(query_pre_attn_scalar). Gemma 1 has no local layers; Gemma 2 soft-caps logits; Gemma 3 uses
different RoPE bases in local and global layers.

Gemma 4 has a norm of values, and global layers with heads of another size. Layers may take their keys as values, have
experts beside their MLPs, get an embedding of the token of their own, and attend to the keys and values of an earlier
layer. All its norms multiply in float32, and by their weight alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from argosy_engine.attention.backend import (
    Attention,
    AttentionMetadata,
    AttentionWeights,
    ModelInputs,
    RotaryEmbedding,
)
from argosy_engine.attention.params import AttentionParams
from argosy_engine.layers.experts import ExpertsSpec
from argosy_engine.layers.layer_compiler import CompilablePart
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.mlp import GatedMLP
from argosy_engine.layers.norms import RMSNorm
from argosy_engine.model_configs.experts_config import ExpertsConfig
from argosy_engine.model_configs.gemma_config import Gemma4Config, GemmaConfig
from argosy_engine.models.decoder import Decoder, LayerT
from argosy_engine.quantized_rows import Activations


class GemmaDecoder(Decoder[LayerT]):
    """Multiplies embeddings by sqrt(hidden_size), rounded to the model's dtype; logits may have a soft cap. See
    `Decoder`."""

    def __init__(
        self, config: GemmaConfig | Gemma4Config, factory: LayerFactory, *, adds_one: bool = False
    ) -> None:
        self._final_cap = config.final_logit_softcapping
        scale = torch.tensor(config.hidden_size**0.5, dtype=factory.dtype).item()
        super().__init__(config, factory, config.rms_norm_eps, adds_one=adds_one, embedding_multiplier=scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.lm_head.logits(self.norm(hidden))
        cap = self._final_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap


class GemmaLayer:
    def __init__(
        self,
        config: GemmaConfig,
        factory: LayerFactory,
        index: int,
        params: AttentionParams,
        rotary: RotaryEmbedding,
        previous: GemmaLayer | None,
    ) -> None:
        self._is_first = previous is None
        self.previous_norm: RMSNorm | None = None if previous is None else previous.post_mlp_norm
        prefix = f"model.layers.{index}."
        eps, hidden, head_dim = config.rms_norm_eps, config.hidden_size, params.head_dim
        self.post_attention_norm: RMSNorm | None = None
        self.post_mlp_norm: RMSNorm | None = None
        mlp_norm = "post_attention_layernorm"
        if config.has_output_norms:
            self.post_attention_norm, self.post_mlp_norm = (
                factory.rms_norm(f"{prefix}post_{part}_layernorm", hidden, eps, adds_one=True)
                for part in ("attention", "feedforward")
            )
            mlp_norm = "pre_feedforward_layernorm"
        attention = prefix + "self_attn."
        self.qkv = factory.qkv_linear(
            [attention + name for name in ("q_proj", "k_proj", "v_proj")],
            params,
            hidden,
            bias=config.attention_bias,
        )
        self.input_norm = factory.input_norm(
            prefix + "input_layernorm", hidden, eps, feeds=self.qkv, adds_one=True
        )
        self.output = factory.row_linear(
            attention + "o_proj", params.num_heads * head_dim, hidden, bias=config.attention_bias
        )
        q_norm = k_norm = None
        if config.qk_norm:
            q_norm = factory.rms_norm(attention + "q_norm", head_dim, eps, adds_one=True).weight
            k_norm = factory.rms_norm(attention + "k_norm", head_dim, eps, adds_one=True).weight
        self.mlp = GatedMLP(
            factory, prefix + "mlp.", hidden, config.intermediate_size, activation="gelu_pytorch_tanh"
        )
        self.pre_mlp_norm = factory.input_norm(prefix + mlp_norm, hidden, eps, feeds=self.mlp, adds_one=True)
        self.attention = factory.attention(
            params, AttentionWeights(rotary, q_norm, k_norm, eps), prefix=attention, feeds=self.output
        )
        self._project = factory.part(GemmaLayer.project)
        self._feed_forward = factory.part(GemmaLayer.feed_forward)
        self._hidden = hidden

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, meta: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `decoder.Layer`. The output has to be normed by `post_mlp_norm`, if there is one, before it is added to
        the residual: that is left to the next layer's norm as well, which reads both anyway."""
        if residual is None:
            residual, qkv = x, self.qkv(self.input_norm(x))
        else:
            qkv = self._project(self, x, residual)
        attended = self.output(self.attention(qkv, meta))
        return self.mlp.down.sum_ranks(self._feed_forward(self, attended, residual)), residual

    def project(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add the norm of the last layer's output to the residual and return q, k and v of the norm of the sum."""
        return self.qkv(self.input_norm.after_adding(x, residual, self.previous_norm))

    def feed_forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add the norm of attention's output to the residual and return the MLP's partial output of the norm of the
        sum."""
        return self.mlp.partial(self.pre_mlp_norm.after_adding(x, residual, self.post_attention_norm))

    def parts_to_compile(self) -> list[CompilablePart]:
        widths = self._hidden, self._hidden
        parts = [CompilablePart(self._feed_forward, widths)]
        if not self._is_first:
            parts.insert(0, CompilablePart(self._project, widths))
        return parts


class Gemma(GemmaDecoder[GemmaLayer]):
    """See `Decoder`."""

    def __init__(self, config: GemmaConfig, factory: LayerFactory) -> None:
        self.config = config
        super().__init__(config, factory, adds_one=True)

    def make_layers(self, factory: LayerFactory) -> list[GemmaLayer]:
        config = self.config
        rotary_global, rotary_local = (
            factory.rotary(rope, config.head_dim) for rope in (config.rope_global, config.rope_local)
        )
        layers: list[GemmaLayer] = []
        for index, params in factory.own_layers(config.attention_layers, AttentionParams):
            rotary = rotary_global if config.sliding_windows[index] is None else rotary_local
            previous = layers[-1] if layers else None
            layers.append(GemmaLayer(config, factory, index, params, rotary, previous))
        return layers

    @property
    def attention_layers(self) -> list[Attention]:
        return [layer.attention for layer in self.layers]

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        x = self.embed(inputs)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, inputs.meta)
        if residual is None:
            return x
        norm = self.layers[-1].post_mlp_norm
        return residual.add_(x if norm is None else norm(x))


class Gemma4Attention:
    """Attention with its projections.

    Args:
        source: the layer whose keys and values it attends to; None: its own.
    """

    def __init__(
        self,
        config: Gemma4Config,
        factory: LayerFactory,
        index: int,
        params: AttentionParams,
        rotary: RotaryEmbedding,
        source: Gemma4Attention | None,
    ) -> None:
        self.prefix, self._source = f"model.layers.{index}.self_attn.", source
        hidden, dim, eps, bias = (
            config.hidden_size,
            params.head_dim,
            config.rms_norm_eps,
            config.attention_bias,
        )
        names = [self.prefix + name for name in ("q_proj", "k_proj", "v_proj")]
        self._has_values = source is None and not config.takes_keys_as_values(index)
        if self._has_values:
            self.projection = factory.qkv_linear(names, params, hidden, bias=bias)
        else:
            q, k, _ = factory.sharding.qkv(params)
            own = [(names[0], params.num_heads, q), (names[1], params.num_kv_heads, k)][
                : 2 if source is None else 1
            ]
            self.projection = factory.selected_linear(
                {name: heads * dim for name, heads, _ in own}, {name: [part] for name, _, part in own}, hidden,
                bias=bias,
            )  # fmt: skip
        self.output = factory.row_linear(self.prefix + "o_proj", params.num_heads * dim, hidden, bias=bias)
        q_norm = factory.rms_norm(self.prefix + "q_norm", dim, eps, in_float32=True).weight
        self._value_norm: RMSNorm | None = None
        if source is None:
            self.k_norm = factory.rms_norm(self.prefix + "k_norm", dim, eps, in_float32=True).weight
            self._value_norm = factory.float32_norm(None, dim, eps)
        else:
            self.k_norm = source.k_norm
        self.attention = factory.attention(
            params,
            AttentionWeights(rotary, q_norm, self.k_norm, eps),
            prefix=self.prefix if source is None else source.prefix,
            feeds=self.output,
        )
        self.is_shared = False
        """Whether later layers attend to its keys and values."""
        self._keys_and_values: torch.Tensor | None = None
        """Of the step, before their norm and rotation, if it is shared."""
        own_params = self.attention.params
        self._dim, self._q_size = dim, own_params.num_heads * dim
        self._kv_size = own_params.num_kv_heads * dim
        self.input_quantization = self.projection.input_quantization

    def __call__(self, x: Activations, meta: AttentionMetadata) -> torch.Tensor:
        """Attend from x, [T, hidden_size]; the output has the same shape."""
        projected = self.projection(x)
        if self._source is not None:
            # The cache gets the same keys and values once more: backends write before they attend.
            source = self._source
            assert source._keys_and_values is not None
            self.attention.bind(source.attention.kv_cache, source.attention.group)
            qkv = torch.cat((projected, source._keys_and_values), dim=1)
        elif self._has_values:
            qkv = projected
            values = qkv[:, self._q_size + self._kv_size :]
            values.copy_(self._normed(values))
        else:
            qkv = torch.cat((projected, self._normed(projected[:, self._q_size :])), dim=1)
        if self.is_shared:
            self._keys_and_values = qkv[:, self._q_size :].clone()
        return self.output(self.attention(qkv, meta))

    def _normed(self, values: torch.Tensor) -> torch.Tensor:
        """Norm each head of values [T, num_kv_heads * head_dim]."""
        assert self._value_norm is not None
        return self._value_norm(values.reshape(-1, self._dim)).view(values.shape)


class Gemma4Experts:
    """A mixture of experts with a norm of what the router gets, of what the experts get, and of their sum."""

    def __init__(
        self, config: Gemma4Config, experts: ExpertsConfig, factory: LayerFactory, prefix: str
    ) -> None:
        hidden, eps, names = config.hidden_size, config.rms_norm_eps, experts.names
        self.router_norm = factory.float32_norm(prefix + "router.scale", hidden, eps, factor=hidden**-0.5)
        self.router = factory.router(
            prefix + names.router, experts.routing.num_experts, hidden, bias=False, in_float32=False
        )
        self.input_norm, self.output_norm = (
            factory.rms_norm(f"{prefix}{place}_feedforward_layernorm_2", hidden, eps, in_float32=True)
            for place in ("pre", "post")
        )
        self.experts = factory.experts(
            ExpertsSpec(
                prefix=prefix,
                routing=experts.routing,
                hidden=hidden,
                inner=experts.inner,
                activation=experts.activation,
                names=names,
            )
        )
        self.sum_ranks = factory.sum_ranks
        self.exchange = factory.exchange
        if self.exchange is not None:
            self.exchange.add_layer(self, hidden, factory.dtype, factory.device)

    def __call__(self, x: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
        """Run the experts on x [T, hidden_size]; the output has the same shape. For slot_mapping see `Experts`."""
        if self.exchange is None:
            mixed = self._mixed(x, slot_mapping)
        else:
            mixed = self.exchange.scatter(self._mixed(*self.exchange.gather(x, slot_mapping)))
        mixed = self.sum_ranks(mixed)[: len(x)]
        return self.output_norm(mixed) if len(x) else mixed  # none where the experts are lent

    def _mixed(self, x: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
        return self.experts(self.input_norm(x), self.router(self.router_norm(x)), slot_mapping)


class LayerEmbedding:
    """Adds what a gate takes of the embedding that the layer has of its own."""

    def __init__(self, config: Gemma4Config, factory: LayerFactory, prefix: str) -> None:
        hidden, width = config.hidden_size, config.hidden_size_per_layer_input
        self.gate = factory.linear({prefix + "per_layer_input_gate": width}, hidden)
        self.projection = factory.linear({prefix + "per_layer_projection": hidden}, width)
        self.norm = factory.rms_norm(
            prefix + "post_per_layer_input_norm", hidden, config.rms_norm_eps, in_float32=True
        )

    def __call__(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return what is added to x [T, hidden_size].

        Args:
            embedded: [T, hidden_size_per_layer_input]
        """
        return self.norm(self.projection(F.gelu(self.gate(x), approximate="tanh") * embedded))


class Gemma4Layer:
    def __init__(
        self,
        config: Gemma4Config,
        factory: LayerFactory,
        index: int,
        params: AttentionParams,
        rotary: RotaryEmbedding,
        source: Gemma4Attention | None,
    ) -> None:
        prefix = f"model.layers.{index}."
        eps, hidden = config.rms_norm_eps, config.hidden_size
        self.block = Gemma4Attention(config, factory, index, params, rotary, source)
        self.attention = self.block.attention
        self.mlp = GatedMLP(
            factory, prefix + "mlp.", hidden, config.inner_of(index), activation="gelu_pytorch_tanh"
        )
        self.input_norm, self.pre_mlp_norm = (
            factory.input_norm(prefix + name, hidden, eps, feeds=feeds, in_float32=True)
            for name, feeds in (("input_layernorm", self.block), ("pre_feedforward_layernorm", self.mlp))
        )
        self.post_attention_norm, self.post_mlp_norm = (
            factory.rms_norm(f"{prefix}post_{name}_layernorm", hidden, eps, in_float32=True)
            for name in ("attention", "feedforward")
        )
        self.experts: Gemma4Experts | None = None
        if config.experts is not None:
            self.experts = Gemma4Experts(config, config.experts, factory, prefix)
            self.dense_norm = factory.rms_norm(
                prefix + "post_feedforward_layernorm_1", hidden, eps, in_float32=True
            )
        self.embedding = (
            LayerEmbedding(config, factory, prefix) if config.hidden_size_per_layer_input else None
        )
        self.scalar = factory.take(prefix + "layer_scalar", 1)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        meta: AttentionMetadata,
        embedded: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """See `decoder.Layer`. It leaves nothing to be added, and gets nothing.

        Args:
            x: changed in place.
            embedded: the tokens' embeddings of this layer, [T, hidden_size_per_layer_input]; None: it has none.
        """
        assert residual is None
        attended = self.block(self.input_norm(x), meta)
        mapped = self.mlp(
            self.pre_mlp_norm.after_adding(attended, x, self.post_attention_norm), meta.slot_mapping
        )
        if self.experts is not None:
            mapped = self.dense_norm(mapped).add_(self.experts(x, meta.slot_mapping))
        x.add_(self.post_mlp_norm(mapped))
        if self.embedding is not None:
            assert embedded is not None
            x.add_(self.embedding(x, embedded))
        return x.mul_(self.scalar), None

    def parts_to_compile(self) -> list[CompilablePart]:
        return []


class LayerEmbeddings:
    """The embeddings of tokens that layers have of their own: from a table and from the usual embedding."""

    def __init__(self, config: Gemma4Config, factory: LayerFactory) -> None:
        self._layers, self._width = config.num_hidden_layers, config.hidden_size_per_layer_input
        total = self._layers * self._width
        self.table = factory.embedding("model.embed_tokens_per_layer.weight", config.vocab_size, total)
        self.projection = factory.linear({"model.per_layer_model_projection": total}, config.hidden_size)
        self.norm = factory.rms_norm(
            "model.per_layer_projection_norm", self._width, config.rms_norm_eps, in_float32=True
        )
        self._table_scale = torch.tensor(self._width**0.5, dtype=factory.dtype).item()
        self._projection_scale = config.hidden_size**-0.5

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return those of tokens [T], [T, num_layers, hidden_size_per_layer_input].

        Args:
            embedded: the usual ones, [T, hidden_size].
        """
        projected = self.norm((self.projection(embedded) * self._projection_scale).view(-1, self._width))
        whole = self.table(token_ids) * self._table_scale + projected.view(len(token_ids), -1)
        return (whole * 2.0**-0.5).view(-1, self._layers, self._width)


class Gemma4(GemmaDecoder[Gemma4Layer]):
    """See `Decoder`."""

    def __init__(self, config: Gemma4Config, factory: LayerFactory) -> None:
        self.config = config
        super().__init__(config, factory)
        self.layer_embeddings = (
            LayerEmbeddings(config, factory) if config.hidden_size_per_layer_input else None
        )

    def make_layers(self, factory: LayerFactory) -> list[Gemma4Layer]:
        config = self.config
        dims = dict(zip(config.layer_types, config.head_dims, strict=True))
        rotaries = {kind: factory.rotary(config.rope_of(kind), dim) for kind, dim in dims.items()}
        layers: list[Gemma4Layer] = []
        for index, params in factory.own_layers(config.params_of_layers, AttentionParams):
            source = None
            if (place := config.source_of(index)) is not None:
                source = layers[place].block
                source.is_shared = True
            rotary = rotaries[config.layer_types[index]]
            layers.append(Gemma4Layer(config, factory, index, params, rotary, source))
        return layers

    def make_norm(self, factory: LayerFactory) -> RMSNorm:
        config = self.config
        return factory.rms_norm("model.norm", config.hidden_size, config.rms_norm_eps, in_float32=True)

    @property
    def attention_layers(self) -> list[Attention]:
        """The attention of the layers that have keys and values of their own."""
        return [layer.attention for layer in self.layers[: self.config.first_shared_layer]]

    def forward(self, inputs: ModelInputs) -> torch.Tensor:
        x, embedded = inputs.hidden, None
        if x is None:
            token_ids = self._token_ids(inputs.token_ids)
            x = self.embedding(token_ids) * self.embedding_multiplier
            if self.layer_embeddings is not None:
                embedded = self.layer_embeddings(token_ids, x)
        for index, layer in enumerate(self.layers):
            x, _ = layer(x, None, inputs.meta, None if embedded is None else embedded[:, index])
        return x

    def _token_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return tokens [T] with padding in place of those for images, video and sound."""
        for placeholder in self.config.placeholder_token_ids:
            token_ids = token_ids.masked_fill(token_ids == placeholder, self.config.pad_token_id)
        return token_ids
