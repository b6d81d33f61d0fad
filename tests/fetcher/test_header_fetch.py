"""Headers of a remote model: what is read of it, and what is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from argosy_fetcher import model_fetch
from argosy_fetcher.errors import TransientError, UnsupportedModel
from argosy_fetcher.model_fetch import FIRST_BYTES, MAX_HEADER_BYTES, MAX_WEIGHT_FILES, fetch_headers
from argosy_fetcher.retry import RetryPolicy
from argosy_fetcher.source import RemoteFile
from scripted_source import ScriptedSource, Stop

AT_ONCE = RetryPolicy(max_outage=0, wait=lambda event, seconds: None)
TOKENIZER = {"tokenizer.json": b"{}"}
CONFIG = {"config.json": b'{"architectures": ["LlamaForCausalLM"]}'}


def weights(num_tensors: int = 2, tensor_bytes: int = 100_000) -> bytes:
    header = {
        f"layers.{number}.weight": {
            "dtype": "U8",
            "shape": [tensor_bytes],
            "data_offsets": [number * tensor_bytes, (number + 1) * tensor_bytes],
        }
        for number in range(num_tensors)
    }
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"w" * (num_tensors * tensor_bytes)


def header_of(content: bytes) -> bytes:
    return content[: 8 + struct.unpack("<Q", content[:8])[0]]


def test_configs_are_whole_and_weights_are_headers(tmp_path: Path) -> None:
    shards = {f"model-0000{number}-of-00002.safetensors": weights() for number in (1, 2)}
    index = json.dumps({"weight_map": {f"{name}.w": name for name in shards}}).encode()
    source = ScriptedSource(
        {**CONFIG, **TOKENIZER, **shards, "model.safetensors.index.json": index, "README.md": b"#"},
        chunk_bytes=1000,
    )
    fetch_headers(source, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*CONFIG, *shards, "model.safetensors.index.json"}
    for name, content in shards.items():
        file = tmp_path / name
        assert file.stat().st_size == len(content)
        with file.open("rb") as opened:
            start = opened.read(len(header_of(content)) + 10)
        assert start == header_of(content) + bytes(10)
        assert file.stat().st_blocks * 512 < len(content)
    assert (tmp_path / "model.safetensors.index.json").read_bytes() == index
    assert max(read.stop for read in source.reads if read.path in shards) <= FIRST_BYTES


def test_a_long_header_is_read_to_its_end(tmp_path: Path) -> None:
    content = weights(num_tensors=3000, tensor_bytes=100)
    header = header_of(content)
    assert len(header) > 2 * FIRST_BYTES
    source = ScriptedSource({**CONFIG, **TOKENIZER, "model.safetensors": content}, chunk_bytes=1000)
    fetch_headers(source, tmp_path)
    with (tmp_path / "model.safetensors").open("rb") as opened:
        assert opened.read(len(header)) == header
    assert max(read.stop for read in source.reads) == len(header)


def test_a_cut_read_goes_on(tmp_path: Path) -> None:
    content = weights()
    source = ScriptedSource({**CONFIG, **TOKENIZER, "model.safetensors": content}, chunk_bytes=10)

    source.on_read = lambda read: Stop(after=50) if read.number < 4 else None
    source.snapshot_failures = [TransientError("busy")]
    fetch_headers(source, tmp_path, retry=AT_ONCE)
    with (tmp_path / "model.safetensors").open("rb") as opened:
        assert opened.read(len(header_of(content))) == header_of(content)


def test_a_source_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    source = ScriptedSource({**CONFIG, **TOKENIZER, "model.safetensors": weights()})
    source.on_read = lambda read: Stop(error=TransientError("503")) if "model" in read.path else None
    with pytest.raises(TransientError, match=r"hf://acme/tiny: model\.safetensors: gave up after 3 failures"):
        fetch_headers(source, tmp_path, retry=AT_ONCE)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 1000) + b"{}",
        struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}",
        b"\xff" * 64,
    ],
)
def test_what_is_not_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    source = ScriptedSource({**CONFIG, **TOKENIZER, "model.safetensors": content})
    with pytest.raises(UnsupportedModel, match=r"model\.safetensors is not a safetensors file"):
        fetch_headers(source, tmp_path)


def test_the_config_is_checked_before_any_weight_is_read(tmp_path: Path) -> None:
    def refuse(config: dict[str, object]) -> None:
        raise UnsupportedModel(f"{config['architectures']} is not served")

    source = ScriptedSource({**CONFIG, **TOKENIZER, "model.safetensors": weights()})
    with pytest.raises(UnsupportedModel, match=r"\['LlamaForCausalLM'\] is not served"):
        fetch_headers(source, tmp_path, check_config=refuse)
    assert source.paths_read() == {"config.json"}


def sharded(shards: dict[str, bytes]) -> ScriptedSource:
    index = json.dumps({"weight_map": {f"{name}.w": name for name in shards}}).encode()
    return ScriptedSource({**CONFIG, **TOKENIZER, **shards, "model.safetensors.index.json": index})


def test_more_files_than_any_model_has_are_refused(tmp_path: Path) -> None:
    source = sharded({f"{number}.safetensors": b"" for number in range(MAX_WEIGHT_FILES + 1)})
    with pytest.raises(UnsupportedModel, match=r"in 2001 files; headers of at most 2000 are read"):
        fetch_headers(source, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_holes_are_bounded_together(tmp_path: Path) -> None:
    source = sharded({f"{number}.safetensors": weights() for number in range(3)})
    source.files = tuple(
        RemoteFile(file.path, 6 << 40 if file.path[0].isdigit() else file.size, file.digest)
        for file in source.files
    )
    with pytest.raises(UnsupportedModel, match=rf"have {18 << 40} bytes; headers are read of at most"):
        fetch_headers(source, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_headers_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sharded({f"{number}.safetensors": weights() for number in range(3)})
    monkeypatch.setattr(model_fetch, "MAX_STORED_BYTES", 2 * len(header_of(weights())))
    with pytest.raises(UnsupportedModel, match="the headers of the weights have more than"):
        fetch_headers(source, tmp_path)


def test_headers_in_an_archive_are_not_read(tmp_path: Path) -> None:
    source = ScriptedSource({"model.tar": b"x" * 100}, packing={"model.tar": "tar"})
    with pytest.raises(UnsupportedModel, match=r"is an archive.*`argosy models pull hf://acme/tiny`"):
        fetch_headers(source, tmp_path)
    assert source.reads == []
