"""RopeParameters: the part of a model config that describes rotary position embedding.

Scaling extends the trained context: `linear` interpolates positions (arXiv 2306.15595), `llama3` divides only the low
frequencies (Llama 3.1), `yarn` blends interpolation and extrapolation per frequency (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import NotOurs, Positive, RawConfig, Size

_KINDS = ("default", "linear", "llama3", "yarn")
_Turns = Annotated[float, Meta(ge=1e-9, le=1e12)]


class RopeParameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """RoPE kind and its parameters, named as in transformers. Each kind reads `theta` and the fields it needs."""

    kind: Literal["default", "linear", "llama3", "yarn", "proportional"] = "default"
    """`proportional` rotates a part of each head by the leading frequencies of the whole (Gemma 4)."""
    theta: Annotated[float, Meta(gt=1.0, le=1e12)] = 10000.0
    factor: Positive = 1.0
    original_max_position_embeddings: Size = 1
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: _Turns = 32.0
    beta_slow: _Turns = 1.0
    attention_factor: Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """The share of each head that is rotated: its first elements, or those of each half (`proportional`)."""
    is_interleaved: bool = False
    """Whether elements 2 i and 2 i + 1 are a pair (GPT-J, GLM), instead of i and i + half of what is rotated."""

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of elements of a head that are rotated.

        Raises:
            NotOurs: it is odd or 0, or what is left is odd.
        """
        size = int(head_dim * self.partial_rotary_factor)
        if self.kind == "proportional":
            size = 2 * int(self.partial_rotary_factor * head_dim // 2)
        if size < 2 or size % 2 or head_dim % 2:
            raise NotOurs(
                f"partial_rotary_factor {self.partial_rotary_factor:g} of a head of {head_dim} is {size}; only an even "
                "part of an even head can be rotated"
            )
        return size

    def head_order(self, head_dim: int) -> tuple[int, ...] | None:
        """Return the order in which a head's elements have to be so that i and i + head_dim / 2 are pairs, those that
        are rotated before the others; None: they are in this order.

        Queries and keys in the same order have the same products, so the kernels know only one layout.
        """
        size = self.rotary_dim(head_dim)
        if self.kind == "proportional" or (size == head_dim and not self.is_interleaved):
            return None
        middle = size + (head_dim - size) // 2
        if self.is_interleaved:
            firsts, seconds = range(0, size, 2), range(1, size, 2)
        else:
            firsts, seconds = range(size // 2), range(size // 2, size)
        return (*firsts, *range(size, middle), *seconds, *range(middle, head_dim))

    def __post_init__(self) -> None:
        if self.kind == "llama3" and self.high_freq_factor < self.low_freq_factor:
            raise ValueError("high_freq_factor must not be less than low_freq_factor")

    @property
    def attention_scaling(self) -> float:
        """Factor on cos and sin: YaRN's attention temperature, 1 for the other kinds."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.yarn_scale(self.mscale) / self.yarn_scale(self.mscale_all_dim)
        return self.yarn_scale(1.0)

    def yarn_scale(self, mscale: float) -> float:
        """Return the attention temperature of YaRN's `factor`, for a coefficient of its logarithm."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


class QueryTemperature(Struct, frozen=True, kw_only=True):
    """Queries grow with their position, by 1 + beta * log(1 + floor(position / trained context)) (arXiv 2501.19399)."""

    beta: Positive
    original_max_position_embeddings: Size
    counts_from_one: bool = False
    """Whether the first position is 1 (Llama 4)."""
    in_float32: bool = False
    """Whether queries are multiplied in float32 (Llama 4), instead of by factors in the activations' dtype."""


_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_OPTIONAL = {
    "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
             "mscale_all_dim", "truncate"),
}  # fmt: skip


def shared_rope_fields(
    raw: RawConfig, *, max_position_embeddings: Any, theta: float = 10000.0, is_partial: bool = False
) -> dict[str, Any]:
    """Map the RoPE fields of a config whose layers all have the same RoPE to fields of RopeParameters, as transformers
    reads them: `rope_scaling` wins over `rope_parameters`, and the trained context beside them over one in them.

    Args:
        theta: the base if the config has none.
        is_partial: see `rope_fields`.

    Raises:
        ConfigError: as `rope_fields`, or the two have different bases: transformers' one has no part of the other.
    """
    scaling, parameters = raw.get("rope_scaling"), raw.get("rope_parameters") or {}
    theta = raw.get("rope_theta") or theta
    entry = dict(scaling or parameters)
    if any(isinstance(value, dict) for value in entry.values()):
        raise ConfigError("RoPE parameters by layer type are not supported for this architecture")
    used, other = entry.get("rope_theta") or theta, parameters.get("rope_theta")
    if scaling and other is not None and other != used:
        raise ConfigError(
            f"rope_scaling, with rope_theta {used:g}, and rope_parameters, with rope_theta {other:g}, disagree; put "
            "rope_theta and the fields of rope_scaling into rope_parameters, and leave out rope_scaling"
        )
    for name in ("original_max_position_embeddings", "partial_rotary_factor"):
        if raw.get(name) is not None and (name.startswith("original") or entry.get(name) is None):
            entry[name] = raw[name]
    return rope_fields(
        entry, theta=theta, max_position_embeddings=max_position_embeddings, is_partial=is_partial
    )


def rope_fields(
    parameters: RawConfig, *, theta: Any, max_position_embeddings: Any, is_partial: bool = False
) -> dict[str, Any]:
    """Map a config's RoPE entry (`rope_parameters`, or `rope_scaling` in older configs) to fields of RopeParameters.

    Args:
        theta, max_position_embeddings: the model config's values, used where the entry has none.
        is_partial: whether the family's models rotate a part of each head if `partial_rotary_factor` says so.

    Raises:
        ConfigError: the kind is not supported, or a parameter that it needs is missing.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _KINDS:
        raise NotOurs(f"RoPE scaling {kind!r} is not supported; there is: {', '.join(_KINDS)}")
    missing = [name for name in _NEEDED[kind] if parameters.get(name) is None]
    if missing:
        raise ConfigError(f"RoPE scaling {kind!r} lacks {', '.join(missing)}")
    names = (*_NEEDED[kind], *_OPTIONAL.get(kind, ()))
    fields = {name: parameters[name] for name in names if parameters.get(name) is not None}
    if kind == "yarn":
        fields.setdefault("original_max_position_embeddings", max_position_embeddings)
    part = parameters.get("partial_rotary_factor")
    if part is not None and is_partial:
        fields["partial_rotary_factor"] = part
    elif part not in (None, 1, 1.0):
        raise ConfigError("partial_rotary_factor is not supported for this architecture")
    return {"kind": kind, "theta": parameters.get("rope_theta") or theta, **fields}


_ENTRIES = ("rope_parameters", "rope_scaling")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_KEPT = ("rope_theta", "partial_rotary_factor")
"""Fields that are of the model, whatever its RoPE is scaled by; configs have them in an entry or beside it."""


def without_overridden_rope(own: RawConfig, overrides: RawConfig) -> dict[str, Any]:
    """Return a config without what `overrides` says in another place: RoPE has two names, and its base and the part
    of each head that it rotates have two places.

    An entry that is overridden is replaced whole, under both names, but those two stay unless they are overridden, too.

    Raises:
        ConfigError: the config has RoPE parameters for each layer type, and the override has one for all.
    """
    left = dict(own)
    parameters, scaling = (each if isinstance(each := own.get(name), dict) else {} for name in _ENTRIES)
    entry = parameters or scaling
    given = [overrides.get(name) or {} for name in _ENTRIES if name in overrides]
    if not given and overrides.keys().isdisjoint(_KEPT):
        return left
    if _is_per_layer_type(entry) and not all(_is_per_layer_type(each) for each in given or [{}]):
        raise ConfigError(
            "--hf-overrides: this config has rope_parameters for each layer type; give them as it does, "
            f"for {' and '.join(name for name in _LAYER_TYPES if name in entry)}"
        )
    kept = {name: value for name in _KEPT if (value := parameters.get(name) or scaling.get(name)) is not None}
    for name in _ENTRIES:
        if given:
            left.pop(name, None)
        elif isinstance(left.get(name), dict):
            left[name] = {key: value for key, value in left[name].items() if key not in _KEPT}
    return left | kept


def _is_per_layer_type(entry: Any) -> bool:
    return isinstance(entry, dict) and any(name in entry for name in _LAYER_TYPES)
