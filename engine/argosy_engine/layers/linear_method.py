"""LinearMethod: how a model's linear layers are loaded and computed, as they are or quantised, and the choice of it.

A method decides which tensors of the checkpoint make up a layer, in which dtype they are read, how they are laid out,
and what multiplies by them. Models only describe their projections (`linear.LinearSpec`). Design: vLLM's
`LinearMethodBase`.

What multiplies by quantised weights as they are stored is in `products`; all others are widened to the engine's dtype
at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from argosy_engine.checkpoint.weights import Weights
from argosy_engine.errors import ConfigError
from argosy_engine.layers.experts import ExpertsSpec, StackedExperts
from argosy_engine.layers.linear import (
    GatedLinear,
    Linear,
    LinearSpec,
    SplitGatedLinear,
    fuse,
    gated_linear_of,
    linear_of,
    ordered,
)
from argosy_engine.layers.norms import GatedActivation
from argosy_engine.layers.products import (
    FP8,
    MAX_FP8,
    CpuIntegers,
    Fp8Linear,
    Fp8Product,
    IntegerKernels,
    IntegerProduct,
    Product,
    QuantizeRows,
    TritonIntegers,
    is_aligned,
    logger,
    quantize_rows,
    quantized_weight,
)
from argosy_engine.layers.scheme_weights import ROWS, StoredWeight, fp4_pairs, take_weight
from argosy_engine.model_configs.experts_config import ExpertLayer
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.model_configs.quantization_config import (
    HEAD_BITS,
    INTEGER_BITS,
    QuantizationConfig,
    check_online_quantization,
    check_quantization,
    no_fp8_product,
    no_integer_product,
    no_mxfp4_product,
    no_packed_product,
    what_becomes,
)
from argosy_engine.model_configs.sharding import Shard
from argosy_engine.model_configs.weight_schemes import MX_GROUP
from argosy_engine.native.library import kernels_for


class LinearMethod:
    """Loads weights in the engine's dtype, whatever the checkpoint's; subclasses load quantised ones.

    Args:
        is_traceable: see `linear_of`.
    """

    def __init__(self, *, is_traceable: bool = False) -> None:
        self._is_traceable = is_traceable

    def load(self, weights: Weights, spec: LinearSpec) -> Linear:
        """Take the layer's tensors, each exactly once."""
        weight, bias = take_fused(weights, spec), take_bias(weights, spec)
        return linear_of(weight, bias, is_traceable=self._is_traceable)

    def load_gated(self, weights: Weights, spec: LinearSpec, activation: GatedActivation) -> GatedLinear:
        """The same for two parts of equal size, the gate's first, followed by the activation."""
        weight, bias = take_fused(weights, spec), take_bias(weights, spec)
        return gated_linear_of(weight, bias, activation, is_traceable=self._is_traceable)

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Make a layer of a weight [out, in] of `load_experts`."""
        return linear_of(weight, bias, is_traceable=self._is_traceable)

    def make_gated(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation
    ) -> GatedLinear:
        """The same for a gated layer."""
        return gated_linear_of(weight, bias, activation, is_traceable=self._is_traceable)

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        """Take the tensors of the experts that this process holds, for kernels that compute them together."""
        if spec.names.stacked is not None:
            return take_stacked(weights, spec)
        stacked = StackedExperts.empty(spec, weights.dtype, weights.device)
        # Each tensor goes to its place as it is read, so that no second copy of the experts is held.
        for place, index in enumerate(spec.held_experts):
            for name, part, _ in stacked.places(place):
                part.copy_(take_expert(weights, spec, index, name))
        return stacked

    def take_weight(self, weights: Weights, spec: LinearSpec) -> torch.Tensor:
        """Take the tensors of a layer without a bias and return its weight, [out, in] in the engine's dtype, for what
        multiplies by it in its own way."""
        return take_fused(weights, spec)

    def tie(self, embedding: torch.Tensor) -> Linear:
        """Use an embedding [vocab_size, in] that was taken before as the weight of an output head."""
        return linear_of(embedding, is_traceable=self._is_traceable)


def unsupported_experts(spec: ExpertsSpec, stored: str) -> ConfigError:
    """Return the error for experts that a method cannot take as they are stored."""
    return ConfigError(
        f"the experts of {spec.prefix} are {stored}, which is not supported; take a checkpoint with unquantised experts"
    )


def take_expert(weights: Weights, spec: ExpertsSpec, index: int, name: ExpertLayer) -> torch.Tensor:
    """Take this process's part of a projection's weight, in the engine's dtype."""
    shape, shard = spec.weight_shape(name), spec.weight_shard(name)
    return weights.take(spec.projection(index, name) + ".weight", *shape, shard=shard)


TakeRows = Callable[[Weights, str, tuple[int, int, int], Shard | None], torch.Tensor]
"""Takes this process's part of a tensor of all experts, [experts, rows, columns], given its name and whole shape."""


def take_stacked(
    weights: Weights,
    spec: ExpertsSpec,
    take_rows: TakeRows | None = None,
    take_scales: TakeRows | None = None,
) -> StackedExperts:
    """Take this process's part of experts that the checkpoint stores in two tensors, in the engine's dtype.

    Args:
        take_rows: None: weights are stored as `spec.names` says, unquantised.
        take_scales: takes the scales of what `take_rows` leaves packed; None: nothing stays packed.
    """
    names = spec.names
    assert names.stacked is not None
    count, hidden, inner = spec.num_experts, spec.hidden, spec.inner
    held = None if spec.held is None or len(spec.held) == count else Shard(0, (spec.held,))
    both: tuple[range, ...] | None = None
    """The part of [gate, up] that goes with `features`."""
    if (own := spec.features) is not None:
        if names.is_interleaved:
            both = (range(2 * own.start, 2 * own.stop),)
        else:
            both = (own, range(inner + own.start, inner + own.stop))

    def take(name: str, rows: int, columns: int, shard: Shard | None) -> torch.Tensor:
        """Return [experts, rows, columns] of this process."""
        if take_rows is not None:
            return take_rows(weights, name, (count, rows, columns), shard)
        if not names.is_transposed:
            return weights.take(name, count, rows, columns, shard=shard)
        if shard is not None and shard.dim:
            shard = Shard(3 - shard.dim, shard.ranges)
        return weights.take(name, count, columns, rows, shard=shard).transpose(1, 2)

    def joined(gate_up: torch.Tensor) -> torch.Tensor:
        """Put the gates before the ups, along dimension 1."""
        if gate_up.is_meta:  # where indexing would import torch's compiler
            return gate_up
        if not names.is_interleaved:
            return gate_up.contiguous()
        whole = gate_up.new_empty(gate_up.shape)
        half = gate_up.shape[1] // 2
        whole[:, :half], whole[:, half:] = gate_up[:, 0::2], gate_up[:, 1::2]
        return whole

    gate_up_name, down_name = map(spec.stacked, names.stacked)
    gate_up = take(gate_up_name, 2 * inner, hidden, Shard(1, both) if both else held)
    down = take(down_name, hidden, inner, held if own is None else Shard(2, (own,)))
    scales: tuple[torch.Tensor, ...] = ()
    if take_scales is not None:
        take_rows = take_scales
        scales = (
            joined(take(gate_up_name, 2 * inner, hidden, Shard(1, both) if both else held)),
            take(down_name, hidden, inner, held if own is None else Shard(2, (own,))).contiguous(),
        )
    gate_up_bias = down_bias = None
    if names.biases is not None:
        bias_names = [spec.stacked(name) for name in names.biases]
        gate_up_bias = joined(
            weights.take(bias_names[0], count, 2 * inner, shard=Shard(1, both) if both else held)
        )
        down_bias = weights.take(bias_names[1], count, hidden, shard=held)
        if not spec.has_down_bias:
            down_bias = None
    return StackedExperts(
        joined(gate_up),
        down if down.is_meta else down.contiguous(),
        *scales,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


def take_fused(weights: Weights, spec: LinearSpec) -> torch.Tensor:
    """Take this process's part of the weight, [out, in], of all projections."""
    return ordered(spec, fuse(spec, lambda name: take_part(weights, spec, name)))


def take_part(weights: Weights, spec: LinearSpec, name: str) -> torch.Tensor:
    """Take this process's part of the weight, [out, in], of one projection."""
    out_features, shard = spec.parts[name], spec.weight_shard(name)
    if spec.is_transposed:
        return weights.take(name + ".weight", spec.in_features, out_features, shard=shard).t()
    return weights.take(name + ".weight", out_features, spec.in_features, shard=shard)


def take_bias(weights: Weights, spec: LinearSpec) -> torch.Tensor | None:
    """Take this process's part of the bias, [out], of all projections, if they have one."""
    if not spec.has_bias:
        return None
    bias = fuse(
        spec, lambda name: weights.take(name + ".bias", spec.parts[name], shard=spec.output_shard(name))
    )
    return ordered(spec, bias)


def linear_method(
    config: ModelConfig,
    quantization: str | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    uses_triton: bool,
    is_traceable: bool = False,
) -> LinearMethod:
    """Choose the method of a model, and log what becomes of quantised weights.

    Args:
        quantization: `--quantization`.
        uses_triton: `AttentionBackend.uses_triton`.
        is_traceable: see `linear_of`; ignored if weights are quantised.

    Raises:
        ConfigError: the flag asks for another scheme than the checkpoint's, or the device cannot do it.
    """
    check_quantization(config.quantization, quantization)
    reason, name = _no_fp8_product(dtype, device, uses_triton), str(dtype).removeprefix("torch.")
    kernels = integer_kernels(dtype, device, uses_triton, narrows=config.quantization is not None)
    refusal = no_integer_product(device.type, name, has_kernels=kernels is not None)
    check_online_quantization(config.quantization, quantization, reason, refusal)
    if config.quantization is None:
        if quantization is None:
            return LinearMethod(is_traceable=is_traceable)
        if (bits := INTEGER_BITS.get(quantization)) is not None:
            assert kernels is not None
            logger.info(
                "weights are quantised to int%d as they are loaded, in groups of up to 128 inputs, the output head to "
                "int%d",
                bits,
                HEAD_BITS,
            )
            return OnlineIntLinearMethod(bits, kernels)
        return OnlineFp8LinearMethod(quantize_rows())
    found, has_experts = config.quantization, getattr(config, "experts", None) is not None
    logger.info("%s", what_becomes(found, name, reason, refusal, device.type, has_experts=has_experts))
    products: list[Product] = []
    if kernels is not None and found.has_packed(device.type) and not config.widens_fp8:
        products.append(IntegerProduct(kernels))
    if found.has_fp8 and reason is None:
        products.append(Fp8Product(quantize_rows()))
    packs = packs_mxfp4(config, dtype, device, uses_triton=uses_triton)
    return SchemeLinearMethod(found, *products, packs_mxfp4=packs)


def keeps_integers(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, uses_triton: bool
) -> bool:
    """Whether integers of the checkpoint stay packed, so that sums are rounded otherwise than of widened weights."""
    found = config.quantization
    if found is None or config.widens_fp8 or not found.has_packed(device.type):
        return False
    return integer_kernels(dtype, device, uses_triton) is not None


def packed_forms(
    config: ModelConfig, quantization: str | None, dtype: torch.dtype, device: torch.device
) -> list[tuple[int, int | None]]:
    """Return bits and group sizes (None: one group of all inputs) of the integers that the Triton kernels multiply by
    as they are packed, if these serve."""
    if integer_kernels(dtype, device, uses_triton=True) is None or device.type == "cpu":
        return []
    if config.quantization is None:
        bits = INTEGER_BITS.get(quantization or "")
        return [] if bits is None else [(bits, 128)]
    if config.widens_fp8:
        return []
    packed = (each for each in config.quantization.schemes if no_packed_product(each, "cuda") is None)
    return list(
        dict.fromkeys((getattr(each, "bits", 8), getattr(each, "group_size", None)) for each in packed)
    )


def packs_mxfp4(config: ModelConfig, dtype: torch.dtype, device: torch.device, *, uses_triton: bool) -> bool:
    """Whether stacked experts in MXFP4 stay packed."""
    if config.quantization is None or config.quantization.experts is None or config.widens_fp8:
        return False
    return no_mxfp4_product(device.type, str(dtype).removeprefix("torch."), uses_triton) is None


def integer_kernels(
    dtype: torch.dtype, device: torch.device, uses_triton: bool, *, narrows: bool = True
) -> IntegerKernels | None:
    """Return what multiplies by integers as they are packed.

    Args:
        narrows: see `TritonIntegers`.
    """
    if device.type == "cuda":
        serves = uses_triton and dtype in (torch.bfloat16, torch.float16)
        return TritonIntegers(narrows=narrows) if serves else None
    loaded = kernels_for(device, dtype)
    return None if loaded is None else CpuIntegers(loaded)


def has_fp8_products(
    config: ModelConfig, quantization: str | None, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the model's products are in FP8 if the Triton kernels serve. Arguments: `linear_method`."""
    if config.quantization is not None and (config.widens_fp8 or not config.quantization.has_fp8):
        return False
    is_quantised = config.quantization is not None or quantization == "fp8"
    return is_quantised and _no_fp8_product(dtype, device, uses_triton=True) is None


def planned_linear_method(config: ModelConfig) -> LinearMethod:
    """Return a method that takes the same tensors, for a plan."""
    if config.quantization is None:
        return LinearMethod()
    return SchemeLinearMethod(config.quantization)


def _no_fp8_product(dtype: torch.dtype, device: torch.device, uses_triton: bool) -> str | None:
    """Return why this device does not multiply in FP8, or None."""
    name = str(dtype).removeprefix("torch.")
    if (reason := no_fp8_product(name, device.type, uses_triton)) is not None:
        return reason
    from argosy_engine.triton_kernels.launch import device_traits

    if not device_traits(device).has_fp8:
        return "this GPU has no FP8 (it needs compute capability 8.9)"
    return None


class OnlineIntLinearMethod(LinearMethod):
    """Quantises unquantised weights to integers as they are loaded.

    Integers are rounded to nearest and symmetric, in groups of adjacent inputs that share a scale. The output head has
    `HEAD_BITS`, of a tied embedding only in its role as head. Other layers whose spec keeps their precision are left as
    they are, and so are layers whose inputs no group divides.

    Args:
        bits: 8 or 4.
        kernels: multiply by them.
    """

    def __init__(self, bits: int, kernels: IntegerKernels) -> None:
        super().__init__()
        self._bits, self._kernels = bits, kernels

    def load(self, weights: Weights, spec: LinearSpec) -> Linear:
        if spec.keeps_precision and not spec.is_head:
            return super().load(weights, spec)
        bits = HEAD_BITS if spec.is_head else self._bits
        return self._quantised(take_fused(weights, spec), take_bias(weights, spec), bits)

    def load_gated(self, weights: Weights, spec: LinearSpec, activation: GatedActivation) -> GatedLinear:
        if spec.keeps_precision:
            return super().load_gated(weights, spec, activation)
        return self.make_gated(take_fused(weights, spec), take_bias(weights, spec), activation)

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._quantised(weight, bias, self._bits)

    def tie(self, embedding: torch.Tensor) -> Linear:
        return self._quantised(embedding, None, HEAD_BITS)

    def _quantised(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> Linear:
        if (quantized := quantized_weight(weight, bits)) is None:
            return super().make(weight, bias)
        return self._kernels.linear(quantized, bias, weight.dtype)

    def make_gated(
        self, weight: torch.Tensor, bias: torch.Tensor | None, activation: GatedActivation
    ) -> GatedLinear:
        if (quantized := quantized_weight(weight, self._bits)) is None:
            return super().make_gated(weight, bias, activation)
        return self._kernels.gated(quantized, bias, weight.dtype, activation)


class SchemeLinearMethod(LinearMethod):
    """Reads quantised weights of a checkpoint, each layer's by its scheme.

    Args:
        config: which layers are quantised, and how.
        products: of a device that multiplies by some of the schemes; of a layer, the first that can. Where none can,
            weights are widened to the engine's dtype at load.
        packs_mxfp4: whether kernels multiply by stacked experts in MXFP4.
    """

    def __init__(self, config: QuantizationConfig, *products: Product, packs_mxfp4: bool = False) -> None:
        super().__init__()
        self._config = config
        self._products, self._packs_mxfp4 = products, packs_mxfp4

    def load(self, weights: Weights, spec: LinearSpec) -> Linear:
        parts = self._take(weights, spec)
        if parts is None:
            return super().load(weights, spec)
        bias = take_bias(weights, spec)
        if (stored := _all_stored(parts)) is not None:
            for product in self._products:
                if (layer := product.linear(spec, stored, bias, weights.dtype)) is not None:
                    return layer
        return linear_of(self._widened(weights, spec, parts), bias)

    def load_gated(self, weights: Weights, spec: LinearSpec, activation: GatedActivation) -> GatedLinear:
        parts = self._take(weights, spec)
        if parts is None:
            return super().load_gated(weights, spec, activation)
        bias = take_bias(weights, spec)
        if (stored := _all_stored(parts)) is not None:
            for product in self._products:
                if (layer := product.gated(spec, stored, bias, weights.dtype, activation)) is not None:
                    return layer
        return gated_linear_of(self._widened(weights, spec, parts), bias, activation)

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        if spec.names.stacked is not None:  # which are no linear layers
            if self._config.experts is None:
                return take_stacked(weights, spec)
            if self._packs_mxfp4 and not _cuts_blocks(spec):
                return take_stacked(weights, spec, take_mxfp4_pairs, take_mxfp4_scales)
            return take_stacked(weights, spec, take_mxfp4)
        if self._config.experts is not None:
            raise unsupported_experts(spec, "in MXFP4 and stored one by one")
        schemes = {
            self._config.scheme_of(spec.projection(index, name))
            for index in spec.held_experts
            for name in spec.layers
        }

        def take(index: int, layer: ExpertLayer) -> StoredWeight:
            name = spec.projection(index, layer)
            scheme = self._config.scheme_of(name)
            assert scheme is not None
            return take_weight(weights, name, scheme, spec.weight_shape(layer), spec.weight_shard(layer))

        if (found := {each for each in schemes if each is not None}) == schemes:
            for product in self._products:
                if (multiplied := product.experts(weights, spec, found, take)) is not None:
                    return multiplied
        stacked = StackedExperts.empty(spec, weights.dtype, weights.device)
        for place, index in enumerate(spec.held_experts):
            for layer, part, _ in stacked.places(place):
                if self._config.quantises(spec.projection(index, layer)):
                    _widen(take(index, layer), part)
                else:
                    part.copy_(take_expert(weights, spec, index, layer))
        return stacked

    def take_weight(self, weights: Weights, spec: LinearSpec) -> torch.Tensor:
        parts = self._take(weights, spec)
        return take_fused(weights, spec) if parts is None else self._widened(weights, spec, parts)

    def _take(self, weights: Weights, spec: LinearSpec) -> Parts | None:
        """Take the parts of a layer, by name, those that are not quantised as they are; None: none is quantised."""
        schemes = {name: self._config.scheme_of(name) for name in spec.parts}
        if spec.keeps_precision:
            schemes = {
                name: None if scheme is not None and scheme.keeps_kept_layers else scheme
                for name, scheme in schemes.items()
            }
        if not any(schemes.values()):
            return None
        parts: dict[str, StoredWeight | torch.Tensor] = {}
        for name, scheme in schemes.items():
            if scheme is None:
                parts[name] = take_part(weights, spec, name)
                continue
            if (
                spec.is_transposed and not scheme.is_told_by_storage
            ):  # whose tools transpose such a layer first
                raise ConfigError(
                    f"{name} is stored transposed, and in {scheme.about}, which is not supported; take the unquantised "
                    "checkpoint or one in GPTQ"
                )
            shape, shard = (spec.parts[name], spec.in_features), spec.feature_shard(name)
            parts[name] = take_weight(weights, name, scheme, shape, shard)
        return parts

    def _widened(self, weights: Weights, spec: LinearSpec, parts: Parts) -> torch.Tensor:
        """Return the weight of all parts, [out, in] in the engine's dtype, in the order of a spec."""
        columns = spec.in_features if spec.inputs is None else len(spec.inputs)
        fused = torch.empty(spec.out_features, columns, dtype=weights.dtype, device=weights.device)
        start = 0
        for name, part in parts.items():
            place = fused[start : start + spec.num_outputs(name)]
            if isinstance(part, StoredWeight):
                _widen(part, place)
            else:
                place.copy_(part)
            start += len(place)
        return ordered(spec, fused)


Parts = Mapping[str, StoredWeight | torch.Tensor]
"""Weights of the parts of a layer by name, those that are not quantised in the engine's dtype."""


def _cuts_blocks(spec: ExpertsSpec) -> bool:
    """Whether this process's features begin or end within a block of MXFP4, so that its part is widened."""
    own = spec.features
    if own is None or (own.start % MX_GROUP == 0 and own.stop % MX_GROUP == 0):
        return False
    logger.info("%s is widened: %d features of a rank are no whole blocks of 32", spec.prefix, len(own))
    return True


def _all_stored(parts: Parts) -> list[StoredWeight] | None:
    """Return the parts of a layer if all of them are quantised."""
    stored = [part for part in parts.values() if isinstance(part, StoredWeight)]
    return stored if len(stored) == len(parts) else None


def _widen(part: StoredWeight, out: torch.Tensor) -> None:
    if not out.is_meta:  # where it would import sympy
        part.widen(out)


class OnlineFp8LinearMethod(LinearMethod):
    """Quantises unquantised weights as they are loaded, with a scale per output channel.

    Layers whose spec keeps their precision are left as they are.
    """

    def __init__(self, quantize: QuantizeRows) -> None:
        super().__init__()
        self._quantize = quantize

    def load(self, weights: Weights, spec: LinearSpec) -> Linear:
        weight, bias = take_fused(weights, spec), take_bias(weights, spec)
        if spec.keeps_precision or not is_aligned(weight.shape):
            return linear_of(weight, bias)
        return Fp8Linear(*quantized(weight), bias, None, weights.dtype, self._quantize)

    def load_gated(self, weights: Weights, spec: LinearSpec, activation: GatedActivation) -> GatedLinear:
        return SplitGatedLinear(self.load(weights, spec), activation)

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        stacked = StackedExperts.empty(spec, FP8, weights.device)
        if spec.names.stacked is not None:
            plain = take_stacked(weights, spec)
            assert stacked.gate_up_scale is not None
            assert stacked.down_scale is not None
            for place in range(len(plain.down)):
                for whole, parts, part_scales in (
                    (plain.gate_up, stacked.gate_up, stacked.gate_up_scale),
                    (plain.down, stacked.down, stacked.down_scale),
                ):
                    values, scales = quantized(whole[place])
                    parts[place].copy_(values)
                    part_scales[place].copy_(scales)
            return stacked._replace(gate_up_bias=plain.gate_up_bias, down_bias=plain.down_bias)
        for place, index in enumerate(spec.held_experts):
            for layer, part, scale in stacked.places(place):
                assert scale is not None
                values, scales = quantized(take_expert(weights, spec, index, layer))
                part.copy_(values)
                scale.copy_(scales)
        return stacked


def _block_shard(
    name: str, shape: tuple[int, int, int], shard: Shard | None
) -> tuple[Shard | None, range | None]:
    """Return the part of blocks of 32 columns that goes with a part of [experts, rows, columns], and which of their
    columns are used; None: all.

    Raises:
        ConfigError: rows are no whole blocks.
    """
    if shape[2] % MX_GROUP:
        raise ConfigError(f"{name} has rows of {shape[2]}, which is not a multiple of {MX_GROUP}")
    if shard is None or shard.dim != 2:
        return shard, None
    (cut,) = shard.ranges
    first, last = cut.start // MX_GROUP, -(-cut.stop // MX_GROUP)
    used = range(cut.start - first * MX_GROUP, cut.stop - first * MX_GROUP)
    whole = used == range((last - first) * MX_GROUP)
    return Shard(2, (range(first, last),)), None if whole else used


def take_mxfp4_pairs(
    weights: Weights, name: str, shape: tuple[int, int, int], shard: Shard | None
) -> torch.Tensor:
    """Take this process's part of [experts, rows, columns] as it is stored, uint8 [experts, rows, columns / 2], the
    first of two columns in the lower half of a byte. A part of the columns takes the whole blocks that it is in."""
    count, rows, columns = shape
    blocks, _ = _block_shard(name, shape, shard)
    sizes = (count, rows, columns // MX_GROUP, MX_GROUP // 2)
    return weights.take(name + "_blocks", *sizes, dtype=torch.uint8, shard=blocks).flatten(2)


def take_mxfp4_scales(
    weights: Weights, name: str, shape: tuple[int, int, int], shard: Shard | None
) -> torch.Tensor:
    """Take the scales of `take_mxfp4_pairs`, uint8 [experts, rows, columns / 32]: exponents of 2, plus 127."""
    count, rows, columns = shape
    blocks, _ = _block_shard(name, shape, shard)
    return weights.take(name + "_scales", count, rows, columns // MX_GROUP, dtype=torch.uint8, shard=blocks)


def widened_mxfp4(pairs: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return what pairs [..., columns / 2] with exponents [..., columns / 32] stand for, float32 [..., columns]."""
    numbers = F.embedding(pairs.int(), fp4_pairs(pairs.device)).flatten(-2).unflatten(-1, (-1, MX_GROUP))
    return torch.ldexp(numbers, exponents.unsqueeze(-1).int() - 127).flatten(-2)


def take_mxfp4(weights: Weights, name: str, shape: tuple[int, int, int], shard: Shard | None) -> torch.Tensor:
    """Take this process's part of [experts, rows, columns] and widen it. A part of the columns is cut out of the whole
    blocks that it is in."""
    packed = take_mxfp4_pairs(weights, name, shape, shard)
    scales = take_mxfp4_scales(weights, name, shape, shard)
    _, cut = _block_shard(name, shape, shard)
    width = packed.shape[2] * 2
    if packed.is_meta:
        widths = width if cut is None else len(cut)
        return torch.empty(*packed.shape[:2], widths, dtype=weights.dtype, device=packed.device)

    def widen(part: torch.Tensor, at: int) -> torch.Tensor:
        widened = widened_mxfp4(part, flat_scales[at : at + len(part)])
        return widened if cut is None else widened[:, cut.start : cut.stop]

    flat_scales = scales.flatten(0, 1)
    flat = _by_rows(packed.flatten(0, 1), weights.dtype, widen, columns=width if cut is None else len(cut))
    return flat.view(*packed.shape[:2], -1)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [out, in] in FP8 and the scale of each channel, float32 [out]."""
    out = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    scale = weight.abs().amax(dim=1).float().div_(MAX_FP8).clamp_(min=1e-12)
    for start in range(0, len(weight), ROWS):
        rows = slice(start, start + ROWS)
        out[rows] = (weight[rows].float() / scale[rows, None]).clamp_(-MAX_FP8, MAX_FP8).to(FP8)
    return out, scale


def _by_rows(
    stored: torch.Tensor,
    dtype: torch.dtype,
    widen: Callable[[torch.Tensor, int], torch.Tensor],
    *,
    columns: int | None = None,
) -> torch.Tensor:
    """Widen a few rows at a time, to limit peak memory.

    Args:
        widen: maps rows, and the number of the first, to their numbers [rows, columns].
        columns: of the result; None: those of `stored`.
    """
    shape = (len(stored), stored.shape[1] if columns is None else columns)
    out = torch.empty(shape, dtype=dtype, device=stored.device)
    for start in range(0, len(stored), ROWS):
        out[start : start + ROWS] = widen(stored[start : start + ROWS], start)
    return out
