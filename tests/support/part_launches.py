"""Counts what parts of layers launch on an H100, at level 0 and compiled, without one.

Torch keeps what it has found out about the device, so this is for a process of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

from argosy_engine.attention.triton_attn import TritonBackend
from argosy_engine.checkpoint.weights import DummyWeights
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.models import registry
from argosy_engine.models.config_file import load_model_config
from argosy_engine.triton_kernels.launch import KNOWN_DEVICES, assume_device, recorded_launches
from gpu_accounting.compiled_parts import generated_launches
from random_checkpoints import KINDS

CUDA = torch.device("cuda")
NUM_TOKENS = 64


class CountedOperations(TorchDispatchMode):
    """Counts torch's operations that launch a kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        self.count += not func.is_view and not name.startswith(
            ("prim::", "empty", "new_empty", "_unsafe_view")
        )
        return func(*args, **kwargs or {})


def launches(kind: str, path: Path) -> list[tuple[int, int]]:
    """Return the launches of each part of a layer, at level 0 and compiled."""
    published = KINDS[kind]
    if kind != "gpt2":
        sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 2}
        published = replace(published, fields={**published.fields, **sizes})
    config = getattr(transformers, published.config)(**published.fields, architectures=[published.model])
    config.save_pretrained(path)
    read = load_model_config(path)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    counts = []
    with mode, torch.no_grad(), assume_device(KNOWN_DEVICES["H100"]):
        factory = LayerFactory(DummyWeights(torch.bfloat16, CUDA, 0), TritonBackend(torch.bfloat16), 512)
        layer = registry.model_class(read.architecture)(read, factory).layers[1]
        for function, widths in layer.parts_to_compile():

            def inputs(widths: tuple[int, ...] = widths) -> list[torch.Tensor]:
                return [torch.empty(NUM_TOKENS, width, dtype=torch.bfloat16, device=CUDA) for width in widths]

            with recorded_launches() as ours, CountedOperations() as theirs:
                function(layer, *inputs())
            compiled = generated_launches(mode, function, layer, inputs())
            counts.append((len(ours) + theirs.count, len(compiled)))
    return counts
