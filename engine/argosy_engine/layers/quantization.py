"""The choice of how a model's linear layers are loaded and computed: as they are, or quantised."""

from __future__ import annotations

import logging

import torch

from argosy_engine.layers.fp8_linear import Fp8LinearMethod, OnlineFp8LinearMethod, QuantizeRows
from argosy_engine.layers.linear_method import LinearMethod, UnquantizedLinearMethod
from argosy_engine.layers.widened_linear import BlockFp8LinearMethod, Mxfp4LinearMethod
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.model_configs.quantization_config import (
    QuantizationConfig,
    check_online_quantization,
    check_quantization,
    no_fp8_product,
)

logger = logging.getLogger("argosy.models")


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
        is_traceable: see `linear_kernel`; ignored if weights are quantised.

    Raises:
        ConfigError: the flag asks for another scheme than the checkpoint's, or the device cannot do it.
    """
    check_quantization(config.quantization, quantization)
    reason = _no_fp8_product(dtype, device, uses_triton)
    check_online_quantization(config.quantization, quantization, reason)
    if config.quantization is None:
        if quantization is None:
            return UnquantizedLinearMethod(is_traceable=is_traceable)
        return OnlineFp8LinearMethod(_quantize_rows())
    method = config.quantization.method
    name = str(dtype).removeprefix("torch.")
    if (widened := _widened(config.quantization)) is not None:
        form = "MXFP4" if method == "mxfp4" else "FP8 in blocks"
        logger.info("weights in %s: widened to %s at load", form, name)
        return widened
    if reason is None:
        logger.info("FP8 weights (%s): multiplied in FP8", method)
        return Fp8LinearMethod(config.quantization, _quantize_rows())
    logger.info("FP8 weights (%s): widened to %s at load, because %s", method, name, reason)
    return Fp8LinearMethod(config.quantization, None)


def has_fp8_products(
    config: ModelConfig, quantization: str | None, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the model's products are in FP8 if the Triton kernels serve. Arguments: `linear_method`."""
    if config.quantization is not None and (config.widens_fp8 or config.quantization.is_widened):
        return False
    is_quantised = config.quantization is not None or quantization is not None
    return is_quantised and _no_fp8_product(dtype, device, uses_triton=True) is None


def planned_linear_method(config: ModelConfig) -> LinearMethod:
    """Return a method that takes the same tensors, for a plan."""
    if config.quantization is None:
        return UnquantizedLinearMethod()
    return _widened(config.quantization) or Fp8LinearMethod(config.quantization, _unused)


def _widened(config: QuantizationConfig) -> LinearMethod | None:
    if config.method == "mxfp4":
        return Mxfp4LinearMethod()
    return None if config.block is None else BlockFp8LinearMethod(config)


def _no_fp8_product(dtype: torch.dtype, device: torch.device, uses_triton: bool) -> str | None:
    """Return why this device does not multiply in FP8, or None."""
    name = str(dtype).removeprefix("torch.")
    if (reason := no_fp8_product(name, device.type, uses_triton)) is not None:
        return reason
    from argosy_engine.triton_kernels.device_traits import device_traits

    if not device_traits(device).has_fp8:
        return "this GPU has no FP8 (it needs compute capability 8.9)"
    return None


def _quantize_rows() -> QuantizeRows:
    from argosy_engine.triton_kernels.quantize_fp8 import quantize_fp8

    return quantize_fp8


def _unused(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("a planned model is never run")
