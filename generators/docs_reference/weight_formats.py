"""The table of weight formats in docs/supported-models.md, from the schemes that the engine reads."""

from __future__ import annotations

from argosy_engine.model_configs.quantization_config import FP8_BLOCK, PACKED_SCHEMES, is_multiplied
from argosy_engine.model_configs.weight_schemes import SCHEMES, BlockFp8Scheme, Fp8Scheme, Mxfp4ExpertsScheme

_START, _END = "<!-- weight formats: start -->", "<!-- weight formats: end -->"
_HEAD = ["| weights | `quant_method` | what is read | computed |", "|---|---|---|---|"]


def with_table(text: str) -> str:
    """Return a page with the table between its markers.

    Raises:
        ValueError: it has none.
    """
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    if not start or not end:
        raise ValueError(f"the page lacks {_START} or {_END}")
    rows = []
    for scheme in SCHEMES:
        computed = "widened"
        if scheme is Fp8Scheme and is_multiplied(Fp8Scheme()):
            computed = "in FP8 on [GPUs that can](gpu.md#fp8), else widened"
        elif scheme is BlockFp8Scheme:
            computed = f"blocks of {FP8_BLOCK} inputs in FP8 on [GPUs that can](gpu.md#fp8), else widened"
        elif scheme is Mxfp4ExpertsScheme:
            computed = "as packed on [GPUs](gpu.md#fp8) in bfloat16, else widened"
        elif scheme in PACKED_SCHEMES:
            where = "[on CPUs](#as-packed-on-cpus) and [GPUs](#as-packed-on-gpus)"
            computed = f"4 and 8 bits as packed {where}, else widened"
        rows.append(f"| {scheme.title} | {scheme.sources} | {scheme.reads} | {computed} |")
    return "\n".join([before + _START, *_HEAD, *rows, _END + after])
