"""Which models a stream may go on with: equal fingerprints for the same weights however they are stored, others for
everything that would give other tokens."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from argosy_engine.checkpoint.fingerprint import (
    COMPANIONS,
    MAX_SAMPLES,
    OF_IMAGES,
    SAMPLE_BYTES,
    fingerprint,
    sample_offsets,
    weights_digest,
)
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import UtilityFailed


@pytest.fixture
def checkpoint(random_checkpoint: Any, tmp_path: Path) -> Path:
    """1 MB in one file, with everything that lies beside it."""
    path = tmp_path / "model"
    shutil.copytree(random_checkpoint("qwen2-bias")[0], path)
    for name in COMPANIONS:
        if not (path / name).is_file():
            (path / name).write_text("{}")
    (path / "tokenizer.json").unlink()
    return path


def fingerprint_of(path: Path, **flags: object) -> str:
    client = InprocClient(
        EngineArgs.of(
            model=str(path), device="cpu", threads=1, num_gpu_blocks_override=16, max_model_len=64, **flags
        )
    )
    client.close()
    return client.config.model_fingerprint


def change_tensor(path: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            change(tensors[name])
            save_file(tensors, file, {"format": "pt"})


def merge_lora(weight: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(1)
    up, down = (torch.randn(size, 2, generator=generator) for size in weight.shape)
    weight += 1e-3 * up @ down.T


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.bias", "lm_head.weight"]
)
def test_a_finetune_of_any_one_tensor_is_another_model(checkpoint: Path, name: str) -> None:
    """Sizes, headers and the beginning of the file are the same."""
    before = fingerprint_of(checkpoint)
    file = checkpoint / "model.safetensors"
    beginning, size = file.read_bytes()[: 1 << 16], file.stat().st_size
    change_tensor(
        checkpoint, name, lambda tensor: merge_lora(tensor) if tensor.ndim == 2 else tensor.add_(1e-3)
    )
    assert file.stat().st_size == size
    assert name == "lm_head.weight" or file.read_bytes()[: 1 << 16] == beginning
    assert fingerprint_of(checkpoint) != before


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "generation_config.json"])
def test_files_that_shape_prompts_and_defaults_are_part_of_the_fingerprint(
    checkpoint: Path, name: str
) -> None:
    before = fingerprint_of(checkpoint)
    (checkpoint / name).write_text('{"temperature": 0.5}')
    assert fingerprint_of(checkpoint) != before


@pytest.mark.parametrize(
    "flags",
    [
        {"dtype": "bfloat16"},
        {"logprobs_mode": "processed_logprobs"},
        {"logits_processors": ["probe_processors:NeverTwice"]},
        {"load_format": "dummy"},
        {"tool_call_parser": "hermes"},
        {"reasoning_parser": "qwen3"},
        {"enable_auto_tool_choice": False},
    ],
    ids=lambda flags: next(iter(flags)),
)
def test_flags_that_change_tokens_belong_to_the_model(checkpoint: Path, flags: dict[str, object]) -> None:
    assert fingerprint_of(checkpoint, **flags) != fingerprint_of(checkpoint)


def test_what_a_plugin_says_belongs_to_the_model_and_where_it_is_does_not(
    checkpoint: Path, tmp_path: Path
) -> None:
    """A stream that another replica continues is parsed there from its middle on."""
    found = []
    for number, source in enumerate(("# one", "# one", "# another")):
        plugin = tmp_path / f"plugin{number}.py"
        plugin.write_text(source)
        found.append(fingerprint_of(checkpoint, tool_parser_plugin=str(plugin)))
    assert found[0] == found[1]
    assert len({fingerprint_of(checkpoint), *found}) == 3


def test_the_file_of_a_logits_processor_belongs_to_the_model(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for remark in ("# one", "# one", "# another"):
        file = tmp_path / "own_processor.py"
        file.write_text(
            f"from probe_processors import NeverTwice\n\n\nclass Own(NeverTwice):\n    pass  {remark}\n"
        )
        sys.modules.pop("own_processor", None)
        importlib.invalidate_caches()
        found.append(fingerprint_of(checkpoint, logits_processors=["own_processor:Own"]))
    assert found[0] == found[1] != found[2]


def test_flags_that_change_speed_do_not(checkpoint: Path) -> None:
    assert fingerprint_of(checkpoint, max_num_seqs=3, block_size=32) == fingerprint_of(checkpoint)


def test_copies_of_the_same_weights_agree_however_they_are_stored(checkpoint: Path, tmp_path: Path) -> None:
    """A directory, a snapshot in the hub's cache (symlinks to blobs named by their digest), other shards."""
    hub = tmp_path / "models--org--name" / "snapshots" / "0123"
    blobs = tmp_path / "models--org--name" / "blobs"
    hub.mkdir(parents=True)
    blobs.mkdir()
    for index, file in enumerate(sorted(checkpoint.iterdir())):
        shutil.copy(file, blobs / f"{index:064x}")
        (hub / file.name).symlink_to(f"../../blobs/{index:064x}")
    sharded = tmp_path / "sharded"
    shutil.copytree(checkpoint, sharded)
    tensors = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    weight_map = {}
    for index, name in enumerate(reversed(list(tensors))):
        weight_map[name] = f"part-{index % 3}.safetensors"
    for shard in set(weight_map.values()):
        part = {name: tensors[name] for name, where in weight_map.items() if where == shard}
        save_file(part, sharded / shard)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert fingerprint_of(hub) == fingerprint_of(sharded) == fingerprint_of(checkpoint)


def test_nothing_is_written_beside_the_weights(checkpoint: Path) -> None:
    """Volumes with models are read-only."""
    before = sorted(os.listdir(checkpoint)), checkpoint.stat().st_mtime_ns
    fingerprint_of(checkpoint)
    assert (sorted(os.listdir(checkpoint)), checkpoint.stat().st_mtime_ns) == before


def test_an_engine_does_not_wake_up_with_other_weights(checkpoint: Path) -> None:
    """Streams would be resumed with them, because the routers know the fingerprint of the start."""
    client = InprocClient(
        EngineArgs.of(
            model=str(checkpoint), device="cpu", threads=1, num_gpu_blocks_override=16, max_model_len=64
        )
    )
    client.call_utility("sleep", 2)
    change_tensor(checkpoint, "lm_head.weight", merge_lora)
    with pytest.raises(UtilityFailed, match="has changed"):
        client.call_utility("wake_up")
    client.close()


# What sampling sees and what it does not


def write_checkpoint(path: Path, sizes: list[int], *, is_sparse: bool = False) -> int:
    """Zeroed uint8 tensors; where their data starts."""
    offsets = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    header = json.dumps(
        {
            f"t{index}": {"dtype": "U8", "shape": [size], "data_offsets": offsets[index : index + 2]}
            for index, size in enumerate(sizes)
        }
    ).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        if is_sparse:
            file.truncate(8 + len(header) + offsets[-1])
        else:
            file.write(bytes(offsets[-1]))
    return 8 + len(header)


def stride(size: int, num_samples: int) -> int:
    """Any run of this many bytes contains a sampled one."""
    if size <= num_samples * SAMPLE_BYTES:
        return 1
    return -(-(size - SAMPLE_BYTES) // max(num_samples - 1, 1)) - SAMPLE_BYTES + 1


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40 * SAMPLE_BYTES), min_size=1, max_size=4),
    num_samples=st.integers(2, 12),
    data=st.data(),
)
def test_every_changed_run_of_a_stride_is_seen(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], num_samples: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("run")
    start = write_checkpoint(path, sizes)
    max_samples = num_samples * len(sizes)
    before = weights_digest(path, max_samples)
    index = data.draw(st.integers(0, len(sizes) - 1))
    length = min(stride(sizes[index], num_samples), sizes[index])
    first = data.draw(st.integers(0, sizes[index] - length))
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(start + sum(sizes[:index]) + first)
        file.write(b"\x01" * length)
    assert weights_digest(path, max_samples) != before
    shutil.rmtree(path)


def test_one_byte_between_two_samples_is_not_seen(tmp_path: Path) -> None:
    """The fingerprint detects finetunes, not tampering: whoever can write the weights can serve other ones."""
    size = 10 * SAMPLE_BYTES
    start = write_checkpoint(tmp_path, [size])
    before = weights_digest(tmp_path, 2)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(start + size // 2)
        file.write(b"\x01")
    assert weights_digest(tmp_path, 2) == before
    assert weights_digest(tmp_path) != before


@pytest.mark.parametrize(
    ("size", "num_samples"), [(0, 3), (1, 1), (4096, 1), (4097, 1), (8192, 2), (10**9, 7)]
)
def test_samples_stay_inside_the_tensor(size: int, num_samples: int) -> None:
    offsets = sample_offsets(size, num_samples)
    assert len(offsets) <= num_samples
    assert all(0 <= offset < size for offset in offsets)
    if size > num_samples * SAMPLE_BYTES:
        assert all(offset + SAMPLE_BYTES <= size for offset in offsets)


@pytest.mark.parametrize("num_tensors", [300, 10_000], ids=["dense", "experts"])
def test_sixteen_gigabytes_cost_a_few_megabytes_of_reading(tmp_path: Path, num_tensors: int) -> None:
    write_checkpoint(tmp_path, [(16 << 30) // num_tensors] * num_tensors, is_sparse=True)
    header_bytes = 200 * num_tensors
    before = read_bytes()
    weights_digest(tmp_path)
    assert read_bytes() - before < max(MAX_SAMPLES, num_tensors) * SAMPLE_BYTES + header_bytes


def read_bytes() -> int:
    """That this thread has asked the kernel for."""
    counters = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
    return int(counters["rchar"])


@pytest.mark.parametrize("name", OF_IMAGES)
def test_what_becomes_of_images_is_part_of_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = [fingerprint(tmp_path, [], has_weights=False)]
    for content in ("{}", '{"patch_size": 14}'):
        (tmp_path / name).write_text(content)
        found.append(fingerprint(tmp_path, [], has_weights=False))
    assert len(set(found)) == 3
