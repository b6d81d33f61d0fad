"""Self-test of the Triton kernels of norms, gated activations and experts: small inputs of the model's widths, on the
device, against plain torch in float32. That of attention: `attention.self_test`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from argosy_engine.models.experts import ExpertsSpec, SeparateExperts, StackedExperts, TritonExperts
from argosy_engine.models.layer_kernels import GatedActivation, LayerKernels, TorchLayerKernels
from argosy_engine.models.linear import GatedLinear, Linear
from argosy_engine.models.linear_kernels import SplitGatedLinear, TorchLinear
from argosy_engine.models.model_config import ModelConfig

_MAX_ERROR_RATIO = 2.0
"""How many times torch's error in the same dtype a kernel's error may be."""
_FLOOR = 1e-4
"""Error that is always allowed; torch in float32 has none against itself."""
_ROWS = 5
_MAX_EXPERTS = 8
"""More would only take memory."""
_EPS = 1e-6

Outputs = Sequence[torch.Tensor]


@torch.inference_mode()
def layer_self_test(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Run the kernels on the device; return why they must not be used, or None."""
    inputs = _Inputs(config, device)
    try:
        from argosy_engine.models.triton_layer_kernels import TritonLayerKernels

        ours = {name: list(out) for name, out in inputs.outputs(TritonLayerKernels(), dtype)}
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a kernel's fault shows here
    except Exception as error:  # whatever a compiler or a driver raise
        return f"a layer's kernels failed with {type(error).__name__}: {str(error)[:300]}"
    plain = TorchLayerKernels()
    truth = {name: list(out) for name, out in inputs.outputs(plain, torch.float32)}
    theirs = {name: list(out) for name, out in inputs.outputs(plain, dtype)}
    for name, out in ours.items():
        allowed = _MAX_ERROR_RATIO * _error(theirs[name], truth[name]) + _FLOOR
        error = _error(out, truth[name])
        if not error <= allowed:  # NaN is an error, too
            return f"{name} {'are' if name == 'experts' else 'is'} wrong by {error:.2g} where {allowed:.2g} is allowed"
    return None


def _error(outputs: Outputs, truth: Outputs) -> float:
    return max(
        float((ours.float() - theirs).abs().max()) for ours, theirs in zip(outputs, truth, strict=True)
    )


class _Inputs:
    """Random tensors of the widths of a model's layers, the same for all kernels and dtypes."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(0)
        hidden = config.hidden_size
        self._x, self._residual = self._draw(2, _ROWS, hidden)
        self._norms = 1 + self._draw(2, hidden) / 4
        self._gate_up = self._draw(_ROWS, 2 * getattr(config, "intermediate_size", hidden))
        self._experts: ExpertsSpec | None = None
        if num_experts := getattr(config, "num_experts", 0):
            count, inner = min(num_experts, _MAX_EXPERTS), getattr(config, "moe_intermediate_size", hidden)
            k = min(getattr(config, "num_experts_per_tok", 1), count)
            self._experts = ExpertsSpec("", count, hidden, inner, k, normalises=True)
            self._router_logits = self._draw(_ROWS, count)
            self._w1 = self._draw(count, 2 * inner, hidden) / hidden**0.5
            self._w2 = self._draw(count, hidden, inner) / inner**0.5

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device)

    def outputs(self, kernels: LayerKernels, dtype: torch.dtype) -> Iterator[tuple[str, Outputs]]:
        """Yield the results of every kind of layer, by its name. Those of experts depend on the kind of kernels."""
        x, norm, x_norm = (each.to(dtype) for each in (self._x, *self._norms))
        yield "RMSNorm", [kernels.rms_norm(x, norm, _EPS)]
        for x_weight in (None, x_norm):
            residual = self._residual.to(dtype, copy=True)
            yield "add + RMSNorm", [kernels.add_rms_norm(x, residual, norm, _EPS, x_weight), residual]
        for name, activate in kernels.gated_activations.items():
            yield name, [activate(self._gate_up.to(dtype))]
        if self._experts is not None:
            separate = isinstance(kernels, TorchLayerKernels)
            silu = kernels.gated_activations["silu"]
            yield "experts", [self._run_experts(self._experts, dtype, silu if separate else None)]

    def _run_experts(
        self, spec: ExpertsSpec, dtype: torch.dtype, activation: GatedActivation | None
    ) -> torch.Tensor:
        """Run the experts one by one with an activation, or all at once."""
        w1, w2 = self._w1.to(dtype), self._w2.to(dtype)
        slots = torch.arange(_ROWS, device=self._device)
        if activation is None:
            experts = TritonExperts(spec, StackedExperts(w1, w2))
            return experts(self._x.to(dtype), self._router_logits, slots)
        layers = {
            index: (
                GatedLinear(SplitGatedLinear(TorchLinear(gate_up, None), activation)),
                Linear(TorchLinear(down, None)),
            )
            for index, (gate_up, down) in enumerate(zip(w1, w2, strict=True))
        }
        return SeparateExperts(spec, layers)(self._x.to(dtype), self._router_logits, slots)
