"""GGUF files of a hub: which file a quantisation means, what is fetched of it, and what is read of its header."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from hypothesis import given
from hypothesis import strategies as st

from argosy_fetcher import model_fetch
from argosy_fetcher.errors import Offline, UnsupportedModel
from argosy_fetcher.gguf_files import CutOff, NotGguf, choose_gguf, read_header
from argosy_fetcher.model_fetch import fetch_configs, fetch_headers
from argosy_fetcher.progress import Progress
from argosy_fetcher.pull import PulledModel, find_model, open_store, pull_model, stored_gguf
from argosy_fetcher.source_uri import from_argument, parse
from hub_faults import Fault
from hub_server import HubServer
from scripted_source import ScriptedSource, Stop

NAMES = (
    "Tiny-8B-Q4_K_M.gguf",
    "Tiny-8B-UD-Q4_K_XL.gguf",
    "Tiny-8B-IQ4_XS.gguf",
    "tiny-8b.q8_0.gguf",
    "Tiny-8B-f16.q6_k.gguf",
    "BF16/Tiny-8B-BF16-00001-of-00002.gguf",
    "BF16/Tiny-8B-BF16-00002-of-00002.gguf",
    "one/Tiny-8B-Q2_K-00001-of-00001.gguf",
    "mmproj-Tiny-8B-F16.gguf",
    "Tiny-8B.imatrix.gguf",
    "README.md",
    "config.json",
)
THERE = "there are BF16, IQ4_XS, Q2_K, Q4_K_M, Q6_K, Q8_0, UD-Q4_K_XL: hf://acme/tiny:QUANT"
PARTS = NAMES[5:7]


@pytest.mark.parametrize(
    ("quantization", "path"),
    [
        ("Q4_K_M", "Tiny-8B-Q4_K_M.gguf"),
        ("q4_k_m", "Tiny-8B-Q4_K_M.gguf"),
        ("UD-Q4_K_XL", "Tiny-8B-UD-Q4_K_XL.gguf"),
        ("Q4_K_XL", "Tiny-8B-UD-Q4_K_XL.gguf"),
        ("IQ4_XS", "Tiny-8B-IQ4_XS.gguf"),
        ("Q8_0", "tiny-8b.q8_0.gguf"),
        ("F16.Q6_K", "Tiny-8B-f16.q6_k.gguf"),
        ("Q6_K", "Tiny-8B-f16.q6_k.gguf"),
        ("Q2_K", "one/Tiny-8B-Q2_K-00001-of-00001.gguf"),
    ],
)
def test_a_quantisation_means_one_file(quantization: str, path: str) -> None:
    assert choose_gguf("hf://acme/tiny:Q", quantization, NAMES) == (path,)


def test_a_file_in_parts_is_all_of_them_in_order_unless_there_is_a_whole_one() -> None:
    for names in (NAMES, NAMES[::-1]):
        assert choose_gguf("hf://acme/tiny:BF16", "BF16", names) == PARTS
    assert choose_gguf("hf://acme/tiny:BF16", "BF16", ("tiny-bf16.gguf", *NAMES)) == ("tiny-bf16.gguf",)


@pytest.mark.parametrize(
    ("quantization", "names", "message"),
    [
        ("Q5_K_M", NAMES, f"hf://acme/tiny:Q5_K_M has no GGUF file of this quantisation; {THERE}"),
        ("Q4_K", NAMES, f"hf://acme/tiny:Q4_K has no GGUF file of this quantisation; {THERE}"),
        ("K_M", NAMES[1:], "has no GGUF file of this quantisation; there are"),
        ("F16", NAMES, "has no GGUF file of this quantisation; there are"),
        (
            "BF16",
            NAMES[:6],
            "is in 2 parts, of which 'BF16/Tiny-8B-BF16-00002-of-00002.gguf' and 0 more are not",
        ),
        ("BF16", (*NAMES, "BF16/Tiny-8B-BF16-00001-of-00003.gguf"), "means 2 files"),
        ("BF16", ("a-BF16-00001-of-99999.gguf",), "is no part of at most 1000"),
        ("BF16", ("a-BF16-00000-of-00002.gguf",), "is no part of at most 1000"),
        ("Q4_K_M", ("README.md",), "quantisation; it has no GGUF files of a model"),
        (
            "Q4_0",
            ("a-Q4_0.gguf", "qat/a-qat-Q4_0.gguf"),
            "means 2 files: 'a-Q4_0.gguf', 'qat/a-qat-Q4_0.gguf'; give more .* hf://acme/tiny:a-Q4_0",
        ),
    ],
)
def test_other_quantisations_are_refused_with_those_that_there_are(
    quantization: str, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        choose_gguf(f"hf://acme/tiny:{quantization}", quantization, names)


def test_more_of_the_name_tells_two_files_apart() -> None:
    names = ("a-Q4_0.gguf", "qat/a-qat-Q4_0.gguf")
    assert choose_gguf("hf://acme/tiny", "A-Q4_0", names) == ("a-Q4_0.gguf",)
    assert choose_gguf("hf://acme/tiny", "QAT-Q4_0", names) == ("qat/a-qat-Q4_0.gguf",)


CONTENT = {name: b"GGUF" + name.encode() * 1000 for name in NAMES if name.endswith(".gguf")}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.add_model("acme/tiny", CONTENT)
        yield server


def pull(hub: HubServer, store: Path, model: str, **environment: str) -> PulledModel:
    values = {
        "HF_ENDPOINT": hub.endpoint,
        "ARGOSY_MODELS_DIR": str(store),
        "HF_HOME": str(store / "hf"),
        **environment,
    }
    return pull_model(from_argument(model), progress=Progress(), environment=values)


def test_exactly_one_file_is_fetched_and_resumed(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.add("content", Fault(cut_after=1000), path="Tiny-8B-Q4_K_M.gguf")
    with closing(pull(hub, tmp_path, "acme/tiny:q4_k_m")) as model:
        assert model.source == f"hf://acme/tiny:Q4_K_M?endpoint={hub.endpoint}"
        file = stored_gguf(parse("hf://acme/tiny:Q4_K_M"), model.path)
        assert file == model.path / "Tiny-8B-Q4_K_M.gguf"
        assert file.read_bytes() == CONTENT[file.name]
    assert {seen.path for seen in hub.requests("content")} == {"Tiny-8B-Q4_K_M.gguf"}
    hub.forget_requests()
    with closing(pull(hub, tmp_path, "acme/tiny:Q4_K_M@main")):
        assert hub.requests() == []


def test_all_parts_of_a_file_are_fetched(hub: HubServer, tmp_path: Path) -> None:
    with closing(pull(hub, tmp_path, "acme/tiny:BF16")) as model:
        file = stored_gguf(parse("hf://acme/tiny:BF16"), model.path)
        assert file == model.path / PARTS[0]
        assert [(model.path / each).read_bytes() for each in PARTS] == [CONTENT[each] for each in PARTS]
    assert {seen.path for seen in hub.requests("content")} == set(PARTS)


def test_quantisations_of_one_commit_are_models_of_their_own(hub: HubServer, tmp_path: Path) -> None:
    quantizations = ("Q4_K_M", "Q2_K")
    for each in quantizations:
        with closing(pull(hub, tmp_path, f"acme/tiny:{each}")) as model:
            assert stored_gguf(parse(f"hf://acme/tiny:{each}"), model.path).read_bytes()
    store = open_store(str(tmp_path), {})
    sources = [f"hf://acme/tiny:{each}?endpoint={hub.endpoint}" for each in sorted(quantizations)]
    assert [model.source for model in store.list()] == sources
    store.remove(store.list()[0])
    assert [model.source for model in store.list()] == sources[1:]
    with closing(pull(hub, tmp_path, "acme/tiny:Q4_K_M", ARGOSY_OFFLINE="1")):
        pass
    with pytest.raises(Offline, match="acme/tiny:Q2_K"):
        pull(hub, tmp_path, "acme/tiny:Q2_K", ARGOSY_OFFLINE="1")


def test_a_file_that_the_digest_is_not_of_is_refused(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.add("content", Fault(flip_at=900), path="Tiny-8B-Q4_K_M.gguf")
    with closing(pull(hub, tmp_path, "acme/tiny:Q4_K_M")) as model:  # fetched again
        assert (model.path / "Tiny-8B-Q4_K_M.gguf").read_bytes() == CONTENT["Tiny-8B-Q4_K_M.gguf"]
    assert len(hub.requests("content")) > 1


def test_without_a_quantisation_the_files_are_listed(hub: HubServer, tmp_path: Path) -> None:
    there = "it has GGUF files, of which one is served; there are BF16, IQ4_XS, Q2_K, .*hf://acme/tiny:QUANT"
    with pytest.raises(UnsupportedModel, match=f"has no config.json; {there}"):
        pull(hub, tmp_path, "acme/tiny")
    hub.add_model("acme/with-config", {**CONTENT, "config.json": b"{}", "tokenizer.json": b"{}"})
    with pytest.raises(UnsupportedModel, match=r"has no model\.safetensors; it has GGUF files"):
        pull(hub, tmp_path, "acme/with-config")
    assert hub.requests("content", "Tiny-8B-Q4_K_M.gguf") == []


def test_the_cache_of_the_hub_serves_offline(hub: HubServer, tmp_path: Path) -> None:
    snapshot_download("acme/tiny", cache_dir=tmp_path / "hub", endpoint=hub.endpoint, token=False)
    environment = {"HF_HOME": str(tmp_path), "ARGOSY_MODELS_DIR": str(tmp_path / "store")}
    for quantization in ("Q4_K_M", "Q2_K"):
        uri = parse(f"hf://acme/tiny:{quantization}")
        assert find_model(uri, environment=environment) is None
        found = find_model(uri, environment={**environment, "HF_HUB_OFFLINE": "1"})
        assert found is not None
        file = stored_gguf(uri, found.path)
        assert file.read_bytes() == CONTENT[file.relative_to(found.path).as_posix()]
        assert (found.source, found.size) == (str(uri), file.stat().st_size)
    absent = parse("hf://acme/tiny:Q5_0")
    assert find_model(absent, environment={**environment, "HF_HUB_OFFLINE": "1"}) is None


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _field(name: str, kind: int, value: bytes) -> bytes:
    return _string(name) + struct.pack("<I", kind) + value


def _tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    numbers = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return _string(name) + numbers


def gguf(*, num_tokens: int = 300, alignment: int = 64, data: bytes = b"") -> tuple[bytes, int]:
    """Return a file, and where its header ends."""
    tokens = b"".join(_string(f"token {number}") for number in range(num_tokens))
    fields = [
        _field("general.architecture", 8, _string("llama")),
        _field("general.alignment", 4, struct.pack("<I", alignment)),
        _field("llama.rope.freq_base", 6, struct.pack("<f", 10000.0)),
        _field("llama.flag", 7, b"\1"),
        _field("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, num_tokens) + tokens),
        _field("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, num_tokens) + bytes(4 * num_tokens)),
    ]
    tensors = [_tensor("a.weight", (64, 2), 0, 0), _tensor("rope_freqs.weight", (16,), 0, 512)]
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields)) + b"".join([*fields, *tensors])
    content = header + bytes(-len(header) % alignment) + b"w" * 512 + b"f" * 64 + data
    return content, len(header)


QUANTIZED = "hf://acme/tiny:Q8_0"


@pytest.mark.parametrize("num_tokens", [3, 1000])
def test_of_a_remote_file_the_header_and_the_rotation_are_read(
    num_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_fetch, "FIRST_GGUF_BYTES", 1000)
    content, end = gguf(num_tokens=num_tokens, data=b"w" * 200_000)
    source = ScriptedSource({"folder/tiny-q8_0.gguf": content}, name=QUANTIZED, chunk_bytes=500)
    source.on_read = lambda read: Stop(after=700) if read.number == 1 else None
    fetch_headers(source, tmp_path)
    stored = (tmp_path / "tiny-q8_0.gguf").read_bytes()
    rotation = content.index(b"f" * 64)
    assert len(stored) == len(content)
    assert stored[:end] == content[:end]
    assert stored[end:rotation] == bytes(rotation - end)
    assert stored[rotation : rotation + 64] == b"f" * 64
    assert not any(stored[rotation + 64 :])
    assert sum(read.stop - read.start for read in source.reads) < 3 * end + 2000


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GG",
        b"GGML" + bytes(100),
        struct.pack("<4sIQQ", b"GGUF", 1, 0, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 1 << 40, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 40),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 1 << 60),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + _field("a", 13, b""),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + _field("a", 9, struct.pack("<IQ", 9, 1)),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + _field("a", 9, struct.pack("<IQ", 4, 1 << 60)),
        struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + _field("general.alignment", 4, bytes(4)),
        struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + _tensor("a", (1,) * 5, 0, 0),
        struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + _tensor("rope_freqs.weight", (1 << 60,), 0, 0),
        gguf()[0][:3000],
    ],
)
def test_headers_that_are_none_are_refused(content: bytes, tmp_path: Path) -> None:
    source = ScriptedSource({"tiny-q8_0.gguf": content}, name=QUANTIZED)
    with pytest.raises(UnsupportedModel, match="is not a GGUF file of version 2 or 3"):
        fetch_headers(source, tmp_path)
    assert not (tmp_path / "tiny-q8_0.gguf").exists()


def test_the_headers_of_all_parts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, end = gguf(data=b"w" * 200_000)
    names = [f"tiny-q8_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    files = {f"folder/{name}": content for name in names}
    monkeypatch.setattr(model_fetch, "FIRST_GGUF_BYTES", end)
    fetch_headers(ScriptedSource(files, name=QUANTIZED), tmp_path)
    stored = [(tmp_path / name).read_bytes() for name in names]
    assert all(len(each) == len(content) and each[:end] == content[:end] for each in stored)
    monkeypatch.setattr(model_fetch, "MAX_STORED_BYTES", 3 * end - 1)
    for name in names:
        (tmp_path / name).unlink()
    with pytest.raises(UnsupportedModel, match="headers of the weights have more than"):
        fetch_headers(ScriptedSource(files, name=QUANTIZED), tmp_path)


def test_a_long_header_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_fetch, "FIRST_GGUF_BYTES", 100)
    monkeypatch.setattr(model_fetch, "MAX_HEADER_BYTES", 2000)
    source = ScriptedSource({"tiny-q8_0.gguf": gguf()[0]}, name=QUANTIZED)
    with pytest.raises(UnsupportedModel, match="more than 2000 bytes"):
        fetch_headers(source, tmp_path)
    assert max(read.stop for read in source.reads) <= 2000


WHOLE, END = gguf()


@given(at=st.integers(0, END - 1), byte=st.integers(0, 255), length=st.integers(0, END))
def test_a_header_ends_where_it_does_or_is_refused(at: int, byte: int, length: int) -> None:
    assert read_header(WHOLE).num_bytes == END
    with pytest.raises(CutOff):
        read_header(WHOLE[: min(length, END - 1)])
    damaged = WHOLE[:at] + bytes([byte]) + WHOLE[at + 1 :]
    with suppress(CutOff, NotGguf):
        assert 0 < read_header(damaged).num_bytes <= len(damaged)


def test_configs_cannot_be_read_apart(tmp_path: Path) -> None:
    source = ScriptedSource({"tiny-q8_0.gguf": WHOLE}, name=QUANTIZED)
    assert fetch_configs(source, tmp_path) is None
    assert source.reads == []
