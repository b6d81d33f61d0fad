"""Record what the programs of a release write to each other, for the tests of the releases after it.

Run it with the Python of a checkout of that release, by hand, once per release:

    git worktree add /tmp/released v1.2 && make -C /tmp/released install-dev
    /tmp/released/.venv/bin/python -P tests/protocol/released/record.py /tmp/released

It writes beside itself:

- inferenceservices.yaml: the CRD.
- manifests.json: the manifests that an API server with that CRD accepts, and a status with all fields.
- messages.json: of each message its JSON Schema, an instance with only the required fields, and one in which no field
  has its default; headers, paths, keys and chunk hashes on which programs of both releases must agree.
- telemetry.json: frames of a telemetry stream, as bytes and as what they mean.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect
from msgspec import Struct

MESSAGES: dict[str, str] = {
    "FleetDocument": "fleet",
    "RoutableReport": "reports",
    "LoadReport": "reports",
    "ModelProgress": "reports",
    "HotPrefixReport": "telemetry",
    "Hello": "telemetry",
    "Snapshot": "telemetry",
    "Stored": "telemetry",
    "Removed": "telemetry",
    "Cleared": "telemetry",
    "Load": "telemetry",
    "Draining": "telemetry",
}
"""Types of messages between programs that may be of different releases, and their modules of argosy_protocol."""

CONSTANTS = ("headers", "reports", "telemetry", "fleet")
"""Modules of argosy_protocol whose constants are names on the wire."""

FLEET_KEY = b"0123456789abcdef"
SEGMENTS = ((0, b"You are brief."), (1, b"0123456789" * 6000), (2, b""))


def message_type(name: str) -> type[Struct]:
    return getattr(importlib.import_module(f"argosy_protocol.{MESSAGES[name]}"), name)


def plain(message: object) -> Any:
    """A message as JSON has it; bytes are in base64."""
    return json.loads(msgspec.json.encode(message))


def smallest(kind: type[Struct]) -> Any:
    """Return an instance with the required fields only."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return kind(**{field.name: _value(field.type) for field in info.fields if field.required})


def filled(kind: type[Struct]) -> Any:
    """Return an instance in which no field has its default, so that each is written."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return kind(**{field.name: _value(field.type, field.default) for field in info.fields})


def _value(info: msgspec.inspect.Type, default: object = msgspec.NODEFAULT) -> Any:
    match info:
        case msgspec.inspect.Metadata(type=inner):
            return _value(inner, default)
        case msgspec.inspect.UnionType(types=members):
            (member,) = [each for each in members if not isinstance(each, msgspec.inspect.NoneType)]
            return _value(member, default)
        case msgspec.inspect.StructType(cls=kind):
            return filled(kind)
        case msgspec.inspect.BoolType():
            return default is not True
        case msgspec.inspect.IntType(ge=low, le=high):
            return next(
                number
                for number in (7, 11, low, high)
                if number is not None and number != default and (low or 0) <= number <= (high or number)
            )
        case msgspec.inspect.FloatType(ge=low, le=high):
            assert (low or 0.0) <= 0.5 <= (high or 0.5)
            return 0.5
        case msgspec.inspect.StrType(min_length=low, max_length=high, pattern=pattern):
            texts = ("words"[: high or 5].ljust(low or 0, "s"), "2026-01-01T00:00:00Z")
            return next(text for text in texts if re.search(pattern or "", text))
        case msgspec.inspect.BytesType():
            return bytes(range(8))
        case msgspec.inspect.LiteralType(values=values):
            return next(each for each in sorted(values) if each != default)
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return {_value(key): _value(value)}
        case msgspec.inspect.VarTupleType(item_type=item):
            return (_value(item),)
    raise TypeError(f"no value for {info!r}")


def schema(name: str) -> Any:
    """JSON Schema of a message, without descriptions."""
    return json.loads(json.dumps(_without_words(msgspec.json.schema(message_type(name)))))


def _without_words(node: Any) -> Any:
    if isinstance(node, dict):
        return {
            key: _without_words(value) for key, value in node.items() if key not in ("description", "title")
        }
    return [_without_words(value) for value in node] if isinstance(node, list) else node


def constants(module: str) -> dict[str, str]:
    """The texts among a module's public constants."""
    found = vars(importlib.import_module(f"argosy_protocol.{module}"))
    return {
        name: value if isinstance(value, str) else value.decode()
        for name, value in found.items()
        if name.isupper() and isinstance(value, str | bytes)
    }


def derived() -> dict[str, Any]:
    """What programs derive by themselves and must agree on."""
    from argosy_protocol.chunk_hash import chain_seed, chunk_hashes
    from argosy_protocol.headers import internal_key, node_key

    seed = chain_seed("tiny", "adapter", "1", "salt")
    return {
        "internal_key": internal_key(FLEET_KEY, "uid"),
        "node_key": node_key(FLEET_KEY, "uid"),
        "chain_seed": seed,
        "chain_seed_of_model": chain_seed("tiny"),
        "chunk_hashes": list(chunk_hashes(SEGMENTS, seed)),
    }


def frames() -> list[Any]:
    """A telemetry stream with every type of frame."""
    from argosy_protocol import telemetry as t

    def chunks(*numbers: int) -> dict[str, bytes]:
        return {"hashes": t.pack_u64(numbers), "tokens": t.pack_u32([16 * number for number in numbers])}

    return [
        smallest(t.Hello),
        filled(t.Hello),
        t.Snapshot(first=True, **chunks(1, 2)),
        t.Snapshot(last=True, **chunks(3)),
        t.Stored(**chunks(4, 2**20)),
        t.Removed(hashes=t.pack_u64([1])),
        smallest(t.Load),
        filled(t.Load),
        t.Cleared(),
        t.Stored(**chunks(5)),
        t.Draining(),
    ]


def manifests(checkout: Path) -> dict[str, Any]:
    """The valid manifests of that checkout's table, and a status."""
    import yaml

    from argosy_resource.types import InferenceServiceStatus

    sys.path.insert(0, str(checkout / "tests" / "support"))
    table = importlib.import_module("manifests_table")
    return {
        "accepted": {name: yaml.safe_load(text) for name, text in table.GOOD.items()},
        "status": plain(filled(InferenceServiceStatus)),
    }


def main(checkout: Path) -> None:
    import argosy_protocol

    source = Path(argosy_protocol.__file__)
    assert source.is_relative_to(checkout.resolve()), f"{source} is not of {checkout}"
    from argosy_protocol.telemetry import encode_frame

    folder = Path(__file__).parent
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    messages = {
        name: {
            "schema": schema(name),
            "smallest": plain(smallest(message_type(name))),
            "filled": plain(filled(message_type(name))),
        }
        for name in MESSAGES
    }
    recorded = {
        "commit": commit,
        "messages": messages,
        "constants": {module: constants(module) for module in CONSTANTS},
        "derived": derived(),
    }
    stream = [{"bytes": encode_frame(frame).hex(), "fields": plain(frame)} for frame in frames()]
    _write(folder / "messages.json", recorded)
    _write(folder / "telemetry.json", stream)
    _write(folder / "manifests.json", manifests(checkout))
    crd = checkout / "crds" / "inferenceservices.yaml"
    (folder / crd.name).write_bytes(crd.read_bytes())


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
