"""Write the engine's flags: `python -m engine_flags FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from argosy_engine.api.server_args import ServerArgs
from argosy_engine.config import EngineArgs
from argosy_engine.vllm_flags import REFUSED, WITHOUT_EFFECT, VllmFlag
from argosy_protocol.program.flags import Field, fields_of

_UNSUPPORTED = "not supported"
"""Description of a flag of ours that is there to be refused."""
_KINDS = {bool: "switch", int: "integer", float: "number"}


def render() -> str:
    """The flags as JSON, one a line, by name."""
    flags = {flag["name"]: flag for flag in _flags()}
    lines = ",\n".join(json.dumps(flags[name]) for name in sorted(flags))
    return f"[\n{lines}\n]\n"


def _flags() -> Iterator[dict[str, Any]]:
    for config in (ServerArgs, EngineArgs):
        for field in fields_of(config):
            if not field.flag.is_hidden:
                yield _flag(field)
    for vllm in WITHOUT_EFFECT:
        yield _vllm_flag(vllm)
    for vllm in REFUSED:
        yield {**_vllm_flag(vllm), "refused": vllm.reason, "neutral": list(vllm.neutral)}


def _flag(field: Field) -> dict[str, Any]:
    flag: dict[str, Any] = {"name": field.name, "kind": _KINDS.get(field.kind, "text")}
    choices = get_args(field.kind)
    if choices and all(isinstance(choice, str) for choice in choices):
        flag["choices"] = [*choices, *(other for other, _ in field.flag.aliases)]
    if field.flag.is_json:
        flag["kind"] = "json"
    if field.flag.is_size:
        flag["is_size"] = True
    if field.description == _UNSUPPORTED:
        flag["refused"] = "the engine does not do that"
    if field.flag.is_repeatable:
        flag["is_repeatable"] = True
    bounds = {name: field.bound(name) for name in ("ge", "gt", "le", "lt")}
    if flag["kind"] in ("integer", "number"):
        flag |= {name: bound for name, bound in bounds.items() if bound is not None}
    return flag


def _vllm_flag(flag: VllmFlag) -> dict[str, Any]:
    return {"name": flag.name, "kind": "switch" if flag.is_switch else "text"}


def main(argv: Sequence[str]) -> int:
    """Write the file."""
    Path(argv[0]).write_text(render(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
