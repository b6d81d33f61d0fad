"""The shared protocol: decoding, prompt views, chunk chains, telemetry frames, names, keys."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from argosy_protocol.bearer_keys import KeyRing, internal_key
from argosy_protocol.chunk_hash import (
    CHUNK_BYTES,
    COARSE_BYTES,
    chain_seed,
    chunk_ends,
    chunk_hashes,
    chunk_offsets,
)
from argosy_protocol.errors import BadRequest, Unavailable
from argosy_protocol.fleet import (
    Canary,
    FleetDocument,
    FleetService,
    decode_fleet,
    encode_fleet,
    resolve_names,
)
from argosy_protocol.openai import decode_request, unsupported
from argosy_protocol.prompt_segments import Segment, SegmentKind, prompt_segments
from argosy_protocol.telemetry import (
    FrameReader,
    Hello,
    Load,
    Snapshot,
    Stored,
    TelemetryError,
    encode_frame,
    pack_u32,
    pack_u64,
    unpack_u64,
)


def test_the_protocol_imports_nothing_heavy() -> None:
    code = (
        "import sys, pkgutil, importlib, argosy_protocol as p\n"
        "[importlib.import_module(m.name) for m in pkgutil.walk_packages(p.__path__, f'{p.__name__}.')]\n"
        "print([m for m in ('torch','transformers','fastapi','numpy','zmq','tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ("{", None, "not valid JSON"),
        ("[" * 100_000, None, "nested too deeply"),
        ("[1]", None, "Expected `object`"),
        ('{"messages":[{"role":"user"}],"documents":[{"a":' + "[" * 100_000, "documents", "nested too deeply"),
        ('{"messages":[]}', "messages", "length >= 1"),
        ('{"messages":[{"role":1}]}', "messages[0].role", "Expected `str`"),
        ('{"messages":[{"role":"user"}],"n":1.5}', "n", "Expected `int"),
        ('{"messages":[{"role":"user"}],"n":"1"}', "n", "Expected `int"),
        ('{"messages":[{"role":"user"}],"n":1000000}', "n", "<= 128"),
        ('{"messages":[{"role":"user"}],"temperature":NaN}', None, "not valid JSON"),
        ('{"messages":[{"role":"user"}],"temperature":-1}', "temperature", ">= 0"),
        ('{"messages":[{"role":"user"}],"max_tokens":0}', "max_tokens", ">= 1"),
        ('{"messages":[{"role":"user"}],"seed":100000000000000000000}', "seed", "out of range|<=|Expected"),
        ('{"messages":[{"role":"user"}],"stop":["a"' + ',"b"' * 16 + "]}", "stop", "<= 16"),
    ],
)  # fmt: skip
def test_bad_bodies_name_the_field(body: str, param: str | None, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        decode_request("chat/completions", body.encode())
    assert caught.value.param == param
    assert set(json.loads(caught.value.body())["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"presence_penalty": 0.5}, None),
        ({"use_beam_search": False}, None),
        ({"use_beam_search": True, "length_penalty": 0.5}, None),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"response_format": {"type": "json_object"}}, None),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"prompt_embeds": "AA=="}, "prompt_embeds"),
        ({"thinking_token_budget": 64}, "thinking_token_budget"),
        ({"thinking_token_budget": None, "include_reasoning": True}, None),
        ({"include_reasoning": False}, "include_reasoning"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"modalities": ["text"], "function_call": "auto"}, None),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ],
)
def test_what_would_change_an_answer_is_not_ignored(fields: dict[str, object], expected: str | None) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "unknown_field": 1, **fields})
    assert unsupported(decode_request("chat/completions", body.encode())) == expected


def view(**fields: object) -> list[Segment]:
    (segments,) = prompt_segments(decode_request("chat/completions", json.dumps(fields).encode()))
    return segments


def test_the_view_depends_on_values_not_on_their_serialisation() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": 1, "b": 2}}}
    swapped = {"function": {"parameters": {"b": 2, "a": 1}, "name": "f"}, "type": "function"}
    messages = [{"role": "user", "content": "h\u00e9llo"}]
    plain = json.dumps({"messages": messages, "tools": [tool]}, ensure_ascii=False).encode()
    escaped = json.dumps({"tools": [swapped], "messages": messages}, indent=3).encode()
    assert prompt_segments(decode_request("chat/completions", plain)) == prompt_segments(
        decode_request("chat/completions", escaped)
    )


def test_the_view_is_in_prompt_order() -> None:
    segments = view(
        messages=[
            {"role": "system", "content": "S"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "U"}, {"type": "image_url", "image_url": {"url": "x"}}],
            },
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
        chat_template_kwargs={"enable_thinking": False},
    )
    kinds = [segment[0] for segment in segments]
    assert kinds == [
        SegmentKind.TOOLS,
        SegmentKind.TEMPLATE,
        SegmentKind.ROLE,
        SegmentKind.TEXT,
        SegmentKind.ROLE,
        SegmentKind.TEXT,
        SegmentKind.DIGEST,
    ]


def test_a_batch_has_one_chain_per_prompt() -> None:
    request = decode_request("completions", b'{"prompt": ["a", "b"]}')
    assert [segments[0][1] for segments in prompt_segments(request)] == [b"a", b"b"]


SEGMENTS = st.lists(st.tuples(st.sampled_from(list(SegmentKind)), st.binary(max_size=700)))


LONG_SEGMENTS = st.lists(st.integers(0, 8 * COARSE_BYTES), max_size=4).map(
    lambda sizes: [(SegmentKind.TEXT, bytes(size)) for size in sizes]
)


@given(SEGMENTS | LONG_SEGMENTS)
def test_one_hash_and_one_end_per_chunk(segments: list[Segment]) -> None:
    ends = chunk_ends(segments)
    offsets = chunk_offsets(len(data) for _, data in segments)
    assert len(chunk_hashes(segments, 1)) == len(ends) == len(offsets)
    before = 0
    for index, (_, data) in enumerate(segments):
        mine = [end for owner, end in ends if owner == index]
        assert mine[-1] == len(data)
        assert mine == sorted(mine)
        for start, end in itertools.pairwise([0, *mine[:-1]]):
            assert end - start == max(CHUNK_BYTES, 1 << max(0, start.bit_length() - 6))
        before += len(data)
    assert offsets[-1:] == ([before] if segments else [])


@pytest.mark.parametrize("size", [256, 257, COARSE_BYTES, COARSE_BYTES + 1, 100_000, 1_000_000])
def test_chunks_are_fine_at_the_start_and_few_in_total(size: int) -> None:
    segments = [(SegmentKind.TEXT, random.Random(0).randbytes(size))]
    hashes = chunk_hashes(segments, 1)
    assert len(hashes) <= 64 + 32 * max(0, (size - 1) // COARSE_BYTES).bit_length()
    for (_, end), chunk_hash in zip(chunk_ends(segments), hashes, strict=True):
        cut = [(SegmentKind.TEXT, segments[0][1][:end])]
        assert chunk_hashes(cut, 1)[-1] == chunk_hash, "a chunk names the prefix that ends with it"


@given(SEGMENTS, SEGMENTS, SEGMENTS)
def test_chains_agree_exactly_as_far_as_their_segments(
    shared: list[Segment], left: list[Segment], right: list[Segment]
) -> None:
    a, b = chunk_hashes(shared + left, 5), chunk_hashes(shared + right, 5)
    count = len(chunk_hashes(shared, 5))
    assert a[:count] == b[:count]
    if left and right and left[0] != right[0] and left[0][1][:CHUNK_BYTES] != right[0][1][:CHUNK_BYTES]:
        assert a[count] != b[count]


def test_models_adapters_and_salts_never_share_a_chain() -> None:
    seeds = [
        chain_seed("m"), chain_seed("m", cache_salt="s"), chain_seed("m", "s"), chain_seed("ms"),
        chain_seed("m", "", "s"), chain_seed("n"),
    ]  # fmt: skip
    assert len(set(seeds)) == len(seeds)


def test_frames_survive_any_cut() -> None:
    frames = [
        Hello(
            epoch="e", model="m", model_fingerprint="f", block_size=16,
            max_model_len=1, max_num_seqs=1, kv_cache_tokens=1,
        ),
        Snapshot(hashes=pack_u64([1, 2**64 - 1]), tokens=pack_u32([16, 32]), first=True, last=True),
        Load(core_step_age_s=0.5, num_running=3),
    ]  # fmt: skip
    data = b"".join(encode_frame(frame) for frame in frames)
    for size in (1, 3, 1000):
        reader = FrameReader()
        assert [f for i in range(0, len(data), size) for f in reader.feed(data[i : i + size])] == frames
    assert list(unpack_u64(frames[1].hashes)) == [1, 2**64 - 1]  # type: ignore[union-attr]


def raw_frame(**fields: object) -> bytes:
    payload = msgspec.msgpack.encode(fields)
    return len(payload).to_bytes(4, "little") + payload


def test_a_newer_engine_is_understood() -> None:
    reader = FrameReader()
    newer = raw_frame(type="load", core_step_age_s=0.1, num_running=2, gpu_temperature=60)
    unknown = raw_frame(type="adapters", loaded=["a"])
    assert list(reader.feed(unknown + newer)) == [Load(core_step_age_s=0.1, num_running=2)]
    assert reader.skipped == 1


def test_an_older_engine_is_understood() -> None:
    older = raw_frame(type="load", core_step_age_s=0.1)
    assert list(FrameReader().feed(older)) == [Load(core_step_age_s=0.1)]


@pytest.mark.parametrize(
    "data",
    [
        raw_frame(type="load"),
        raw_frame(type="stored", hashes="text", tokens=b""),
        b"\xff\xff\xff\x7f",
        b"\x01\0\0\0\xc1",
    ],
)
def test_malformed_frames_are_told_apart_from_unknown_ones(data: bytes) -> None:
    with pytest.raises(TelemetryError):
        list(FrameReader().feed(data))


def test_ragged_hash_arrays_are_refused() -> None:
    with pytest.raises(TelemetryError):
        unpack_u64(Stored(hashes=b"1234567", tokens=b"").hashes)


def service(name: str, created: str, model: str, *aliases: str, namespace: str = "default") -> FleetService:
    return FleetService(
        namespace=namespace, name=name, uid=name, created=created, model=model, aliases=aliases
    )


def test_the_older_service_wins_a_name() -> None:
    old = service("old", "2026-01-01T00:00:00Z", "llama", "chat")
    new = service("new", "2026-02-01T00:00:00Z", "chat", "llama", "fresh")
    table = resolve_names(FleetDocument(services=(new, old)))
    assert {name: owner.name for name, owner in table.names.items()} == {
        "default/old": "old", "default/new": "new", "llama": "old", "chat": "old", "fresh": "new",
    }  # fmt: skip
    assert {(conflict.name, conflict.loser) for conflict in table.conflicts} == {
        ("chat", "default/new"),
        ("llama", "default/new"),
    }


def canaried(of: FleetService, by: str) -> FleetService:
    return msgspec.structs.replace(of, canary=Canary(service=by, weight=1))


@pytest.mark.parametrize("created", ["2026-01-01T00:00:00Z", "2026-03-01T00:00:00Z"])
def test_what_a_service_shares_with_its_canary_is_the_services(created: str) -> None:
    stable = canaried(service("stable", "2026-02-01T00:00:00Z", "llama", "chat"), "next")
    canary = service("next", created, "llama", "chat", "preview")
    table = resolve_names(FleetDocument(services=(stable, canary)))
    assert {name: owner.name for name, owner in table.names.items()} == {
        "default/stable": "stable", "default/next": "next", "llama": "stable", "chat": "stable", "preview": "next",
    }  # fmt: skip
    assert not table.conflicts


def names_of_chat(*services: FleetService) -> tuple[str, set[tuple[str, str]]]:
    """Who owns the name `chat`, and (winner, loser) of its conflicts."""
    table = resolve_names(FleetDocument(services=services))
    return table.names["chat"].name, {(each.winner, each.loser) for each in table.conflicts}


def test_only_a_service_and_its_own_canary_share_a_name() -> None:
    a, b, c = (service(name, f"2026-0{month}-01", "chat") for month, name in enumerate("abc", 1))
    owner, conflicts = names_of_chat(canaried(a, "b"), b, c)
    assert (owner, conflicts) == ("a", {("default/a", "default/c")})
    owner, conflicts = names_of_chat(a, b, canaried(c, "a"))
    assert (owner, conflicts) == ("c", {("default/c", "default/b")}), "it stands for its canary's age"
    owner, conflicts = names_of_chat(a, canaried(b, "a"), canaried(c, "b"))
    assert (owner, conflicts) == ("c", {("default/c", "default/a")}), "a canary's canary gets nothing of it"
    assert names_of_chat(canaried(a, "b"), canaried(b, "a")) == ("a", set())
    assert names_of_chat(canaried(a, "b"), canaried(b, "c"), canaried(c, "a"))[0] == "a"
    elsewhere = msgspec.structs.replace(b, namespace="team")
    assert names_of_chat(canaried(a, "b"), elsewhere)[1] == {("default/a", "team/b")}


def test_a_namespaced_name_always_reaches_its_own_service() -> None:
    thief = service("thief", "2020-01-01T00:00:00Z", "team/prod")
    owner = service("prod", "2026-01-01T00:00:00Z", "m", namespace="team")
    assert resolve_names(FleetDocument(services=(thief, owner))).names["team/prod"] is owner


def test_adapters_are_called_by_any_name_of_their_service_and_by_their_own_where_it_is_theirs_alone() -> None:
    replace = msgspec.structs.replace
    llama = replace(service("a", "2026-01-01T00:00:00Z", "llama", "chat"), adapters=("sql", "legal", "qwen"))
    qwen = replace(service("b", "2026-02-01T00:00:00Z", "qwen", "chat", "llama:legal"), adapters=("sql",))
    table = resolve_names(FleetDocument(services=(qwen, llama)))
    assert {name: (table.names[name].name, adapter) for name, adapter in table.adapters.items()} == {
        "llama:sql": ("a", "sql"), "chat:sql": ("a", "sql"), "default/a:sql": ("a", "sql"),
        "chat:legal": ("a", "legal"), "default/a:legal": ("a", "legal"), "legal": ("a", "legal"),
        "llama:qwen": ("a", "qwen"), "chat:qwen": ("a", "qwen"), "default/a:qwen": ("a", "qwen"),
        "qwen:sql": ("b", "sql"), "llama:legal:sql": ("b", "sql"), "default/b:sql": ("b", "sql"),
    }  # fmt: skip
    assert table.names["llama:legal"].name == "b", "a service's name beats an adapter's"
    assert table.names["qwen"].name == "b"
    assert {(conflict.name, conflict.loser) for conflict in table.conflicts} == {("chat", "default/b")}


def test_fleet_documents_round_trip_and_ignore_what_is_newer() -> None:
    document = FleetDocument(services=(service("a", "", "m"),))
    assert decode_fleet(encode_fleet(document)) == document
    newer = json.loads(encode_fleet(document))
    newer["version"] = 2
    newer["services"][0]["shadow"] = {"share": 10}
    assert decode_fleet(json.dumps(newer)).services == document.services


def test_internal_keys_differ_by_service_and_need_a_real_fleet_key() -> None:
    key = b"0123456789abcdef"
    assert internal_key(key, "uid-1") != internal_key(key, "uid-2")
    assert internal_key(key, "uid-1") == internal_key(key, "uid-1")
    for bad in ((b"short", "uid"), (key, "")):
        with pytest.raises(ValueError, match="must"):
            internal_key(*bad)


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("Bearer one", True), ("bearer two", True), ("Bearer  one ", True), ("Bearer three", False),
        ("Basic one", False), ("one", False), ("", False), (None, False), ("Bearer", False),
    ],
)  # fmt: skip
def test_key_ring(header: str | None, accepted: bool) -> None:
    assert KeyRing(["one", "two", ""]).accepts(header) is accepted


def test_retry_hints_are_what_sdks_read() -> None:
    assert Unavailable("x", retry_after_s=0.25).headers() == {"retry-after": "1", "retry-after-ms": "250"}
