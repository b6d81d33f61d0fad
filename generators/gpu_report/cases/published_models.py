"""Cases of whole steps: all launches of published configs, in the variants that the engine's model runner starts, each
once per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from argosy_engine.triton_kernels.launch import KNOWN_DEVICES, DeviceTraits, Launch
from gpu_accounting.measurement import AccountedRunner, Shape, decode_again
from gpu_accounting.models import DENSE_LAYERS, MODELS, PERIODS
from gpu_report.case import Case

_MODELS = ("Qwen3.5-0.8B", "Qwen3.5-35B-A3B", "gpt-oss-20b", "DeepSeek-V3", "Llama-4-Scout")
"""One of each kind of layer that is not a Llama's; each is built with one of every kind of its layers."""
_SHAPES = (
    Shape("prompts", prompts=(512,) * 4),
    Shape("1 decode", decodes=1),
    Shape("64 decodes", decodes=64),
)


def cases(traits: DeviceTraits) -> Iterator[Case]:
    for model in _MODELS:
        for shape in _SHAPES:
            is_sampled = (model, shape.decodes, traits.capability) == ("Qwen3.5-35B-A3B", 1, 90)
            yield Case(f"{model}, {shape.name}", _step(model, shape, traits), is_sampled, is_step=True)


def _step(model: str, shape: Shape, traits: DeviceTraits) -> Callable[[], list[Launch]]:
    def launches() -> list[Launch]:
        (device,) = (name for name, known in KNOWN_DEVICES.items() if known == traits)
        num_layers = DENSE_LAYERS.get(model, 0) + PERIODS.get(model, 1)
        runner = AccountedRunner(MODELS[model], num_layers, device)
        step = runner.add(shape)
        runner.execute(step)
        if not shape.prompts:
            runner.execute(decode_again(step))
        return list({each.variant: each for each in runner.trace.launches}.values())

    return launches
