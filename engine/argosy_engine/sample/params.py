"""SamplingParams: what one request asks of the sampler and of the stop check. Field names are vLLM's."""

from __future__ import annotations

import difflib
from typing import Any

from msgspec import Struct, structs

from argosy_engine.errors import InvalidRequest

GREEDY_EPSILON = 1e-5
"""Temperatures below this mean greedy, as in vLLM."""

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256


class SamplingParams(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Bounds are checked on construction by `verify`, which `LLM` and the API call.

    `seed`: noise is a pure function of (seed, position); None draws a seed for the request at admission.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: off"""
    seed: int | None = None
    max_tokens: int | None = 16
    """None: up to the model's context length"""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @classmethod
    def of(cls, **fields: Any) -> SamplingParams:
        """Builds and verifies parameters; an unknown name is an error with a suggestion.

        Raises:
            InvalidRequest: unknown name, wrong type or value out of bounds.
        """
        known = cls.__struct_fields__
        for name in fields:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f", did you mean {close[0]!r}?" if close else ""
                raise InvalidRequest(f"unknown sampling parameter {name!r}{hint}", param=name)
        if isinstance(fields.get("stop"), str):
            fields["stop"] = (fields["stop"],)
        params = cls(**fields)
        params.verify()
        return params

    def verify(self) -> None:
        """Raises InvalidRequest when a value is out of bounds."""
        checks = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "must be between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "must be in (0, 1]"),
            ("top_k", self.top_k >= -1, "must be -1 or 0 (off) or positive"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "must be at least 1"),
            ("stop", len(self.stop) <= MAX_STOP_STRINGS, f"at most {MAX_STOP_STRINGS} stop strings"),
            ("stop", all(self.stop), "stop strings must not be empty"),
            (
                "stop_token_ids",
                len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
                f"at most {MAX_STOP_TOKEN_IDS} stop token ids",
            ),
            ("seed", self.seed is None or -(1 << 63) <= self.seed < 1 << 63, "must fit into 64 bits"),
        )
        for name, is_good, message in checks:
            if not is_good:
                raise InvalidRequest(f"{name} {message}", param=name)

    def replace(self, **changes: Any) -> SamplingParams:
        return structs.replace(self, **changes)
