"""GGUF files: greedy tokens equal those of transformers with the widened weights, and what is not known is refused."""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

import gguf_files
from argosy_engine.api.doctor import diagnose
from argosy_engine.checkpoint import gguf_folder as conversion
from argosy_engine.checkpoint.gguf_folder import gguf_folder
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import ConfigError
from argosy_engine.frontend.model_source import local_model
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.params import SamplingParams
from argosy_engine.sizing.resources import DeviceMemory
from argosy_fetcher.model_fetch import FIRST_GGUF_BYTES
from gguf_files import CONFIGS, TINY, make_gguf
from greedy_reference import differing_tokens
from hub_server import HubServer

TYPES = {
    "llama of large blocks": (Type.Q4_K, Type.Q5_K, Type.Q6_K),
    "llama": (Type.Q8_0, Type.Q4_0, Type.F32),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(conversion, "private_folder", lambda name: _made(tmp_path / "cache"))
    return tmp_path / "cache"


def _made(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


@pytest.mark.parametrize(
    ("kind", "type_"), [(kind, each) for kind in CONFIGS for each in TYPES.get(kind, (Type.Q8_0,))]
)
def test_greedy_tokens_are_those_of_the_widened_weights(kind: str, type_: Type, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    model = make_gguf(file, kind, type_)
    args = EngineArgs.of(
        model=str(file),
        tokenizer=str(TINY),
        dtype="float32",
        device="cpu",
        threads=1,
        max_num_batched_tokens=64,
    )
    prompts = [[5, 6, 7], list(range(20, 90)), [9]]
    with local_model(args) as local:
        assert local.served_model_name == (str(file),)
        client = InprocClient(local)
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        outputs: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            client.add_request(EngineCoreRequest(str(index), prompt, params, time.time()))
        while client.has_work:
            for out in client.step().outputs:
                outputs.setdefault(out.request_id, []).extend(out.new_token_ids)
    for index, prompt in enumerate(prompts):
        assert differing_tokens(model, prompt, outputs[str(index)]) == []


def in_parts(path: Path) -> list[Path]:
    """Write a model in four parts."""
    make_gguf(path / "model.gguf", "llama", Type.Q8_0, part_tensors=6)
    return [path / f"model-0000{number}-of-00004.gguf" for number in (1, 2, 3, 4)]


def test_a_file_in_parts_has_the_weights_of_all(tmp_path: Path, own_cache: Path) -> None:
    parts = in_parts(tmp_path)
    assert sorted(tmp_path.glob("*.gguf")) == parts
    folder = gguf_folder(parts[0], "float32", has_tokenizer=False)
    make_gguf(tmp_path / "whole.gguf", "llama", Type.Q8_0)
    whole = load_file(
        gguf_folder(tmp_path / "whole.gguf", "float32", has_tokenizer=False) / "model.safetensors"
    )
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in stored.items())
    os.utime(parts[2], (1, 1))
    assert gguf_folder(parts[0], "float32", has_tokenizer=False) != folder


def _swap(parts: list[Path]) -> None:
    data = [each.read_bytes() for each in parts[1:3]]
    parts[1].write_bytes(data[1])
    parts[2].write_bytes(data[0])


def _repeat(parts: list[Path]) -> None:
    parts[2].write_bytes(parts[1].read_bytes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[2].unlink(), r"cannot read .*model-00003-of-00004.gguf"),
        (_swap, "model-00002-of-00004.gguf is not part 2 of 4 of it"),
        (_repeat, "model-00003-of-00004.gguf is not part 3 of 4 of it"),
        (
            lambda parts: parts[3].write_bytes(parts[3].read_bytes()[:-100]),
            "cut off|behind the end of the file",
        ),
        (lambda parts: parts[3].write_bytes(b"GGUF"), "model-00004-of-00004.gguf is cut off"),
        (
            lambda parts: make_gguf(parts[1], "llama", Type.Q8_0),
            "00002-of-00004.gguf is not part 2 of 4 of it",
        ),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    change: Callable[[list[Path]], object], message: str, tmp_path: Path
) -> None:
    parts = in_parts(tmp_path)
    change(parts)
    with pytest.raises(ConfigError, match=message):
        gguf_folder(parts[0], "float32", has_tokenizer=False)


def test_another_part_than_the_first_is_refused(tmp_path: Path) -> None:
    parts = in_parts(tmp_path)
    with pytest.raises(ConfigError, match="it is not the first of its 4 parts"):
        gguf_folder(parts[1], "float32", has_tokenizer=False)
    parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ConfigError, match="one of 4 parts, whose names must be"):
        gguf_folder(tmp_path / "first.gguf", "float32", has_tokenizer=False)


def test_a_file_is_converted_once_for_each_dtype(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "model.gguf"
    make_gguf(file, "qwen2", Type.Q8_0)
    notes: list[str] = []
    first = gguf_folder(file, "bfloat16", has_tokenizer=False, note=notes.append)
    assert notes[0].startswith("model.gguf is widened to bfloat16, once: ")
    assert notes[-1].startswith("widened ")
    assert gguf_folder(file, "bfloat16", has_tokenizer=False, note=notes.append) == first
    assert len([note for note in notes if "once" in note]) == 1
    assert gguf_folder(file, "float32", has_tokenizer=False) != first
    make_gguf(file, "qwen2", Type.Q4_0)
    assert gguf_folder(file, "bfloat16", has_tokenizer=False) != first
    assert not [each for each in own_cache.iterdir() if each.name.startswith(".converting")]


def test_the_tokenizer_template_and_ends_are_the_files(tmp_path: Path) -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    make_gguf(tmp_path / "model.gguf", "qwen2", Type.Q8_0)
    folder = gguf_folder(tmp_path / "model.gguf", "float32")
    ours = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZE_REGEX), "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
    for text in ("Hello world, it's 1234!", "<|im_start|>user\nHi<|im_end|>", "  a\n\n\tb é 你好", ""):
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    assert "im_start" in (folder / "chat_template.jinja").read_text()
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_a_tokenizer_of_llama_3_begins_prompts_and_does_not_split_tokens(tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": None}
    make_gguf(tmp_path / "model.gguf", "llama", Type.Q8_0, changes=changes)
    folder = gguf_folder(tmp_path / "model.gguf", "float32")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("Hi").ids[0] == 1
    assert tokenizer.encode("Hi", add_special_tokens=False).ids[0] != 1
    assert json.loads((folder / "tokenizer.json").read_text())["model"]["ignore_merges"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"general.architecture": "rwkv7"},
            "architecture 'rwkv7' is not known as GGUF; there are llama, qwen2",
        ),
        ({"llama.attention.unheard_of": 3}, "keys llama.attention.unheard_of are not known"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type 'longrope' is not known"),
        ({"llama.attention.value_length": 8}, "values have another size than its keys"),
        ({"llama.block_count": 1}, "of a layer that it does not have"),
        ({"llama.block_count": 1 << 20}, "more than 1024"),
        ({"llama.context_length": None}, "it has no llama.context_length"),
        ({"llama.rope.freq_base": "much"}, "is 'much', which is no float"),
        ({"llama.vocab_size": 7}, "vocab_size is not the number of its embeddings"),
        ({"split.count": 2}, "one of 2 parts, whose names must be NAME-00001-of-00002.gguf"),
        (
            {"tokenizer.ggml.pre": "unheard-of"},
            r"splits texts \('unheard-of'\) is not known.*--tokenizer PATH",
        ),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    make_gguf(file, "llama", Type.Q8_0, changes=changes)
    with pytest.raises(ConfigError, match=message):
        gguf_folder(file, "float32", has_tokenizer="tokenizer.ggml.pre" in changes)


def test_another_tokenizer_takes_the_place_of_one_that_is_not_known(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    make_gguf(file, "llama", Type.Q8_0, changes={"tokenizer.ggml.pre": "unheard-of"})
    with local_model(EngineArgs.of(model=str(file), tokenizer=str(TINY), device="cpu")) as local:
        assert not (Path(local.model) / "tokenizer.json").exists()
        assert local.tokenizer == str(TINY)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("ARGOSY_MODELS_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def test_a_file_of_a_hub_is_widened_as_one_of_this_machine(hub: HubServer, tmp_path: Path) -> None:
    file = tmp_path / "Tiny-Q8_0.gguf"
    make_gguf(file, "llama with scaled rotation", Type.Q8_0)
    hub.add_model("acme/tiny", {"files/Tiny-Q8_0.gguf": file, "Tiny-Q4_0.gguf": b"GGUF"})
    args = EngineArgs.of(model="acme/tiny:q8_0", device="cpu", dtype="bfloat16")
    own = gguf_folder(file, "bfloat16")
    with local_model(args) as local:
        assert local.served_model_name == ("acme/tiny:Q8_0",)
        folder = Path(local.model)
        assert folder != own
        names = sorted(path.name for path in folder.iterdir())
        assert names == sorted(path.name for path in own.iterdir())
        assert all((folder / name).read_bytes() == (own / name).read_bytes() for name in names)


def test_a_file_of_a_hub_may_be_in_parts(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = in_parts(tmp_path)
    hub.add_model("acme/tiny", {f"files/{part.name}": part for part in parts})
    own = gguf_folder(parts[0], "bfloat16")
    for offline in (False, True):  # as the engine of a pod finds what was fetched
        if offline:
            monkeypatch.setenv("ARGOSY_OFFLINE", "1")
        args = EngineArgs.of(model="hf://acme/tiny:model@main", device="cpu", dtype="bfloat16")
        with local_model(args) as local:
            weights = Path(local.model) / "model.safetensors"
            assert weights.read_bytes() == (own / "model.safetensors").read_bytes()


def test_a_file_of_a_hub_that_is_refused_is_not_fetched(hub: HubServer, tmp_path: Path) -> None:
    file = tmp_path / "Tiny-Q8_0.gguf"
    refused = {"llama.attention.unheard_of": 3}, {"tokenizer.ggml.pre": "unheard-of"}
    for number, changes in enumerate(refused):
        make_gguf(file, "llama", Type.Q8_0, changes=changes)
        content = file.read_bytes() + bytes(5 * FIRST_GGUF_BYTES)
        hub.add_model(f"acme/refused-{number}", {file.name: content})
        args = EngineArgs.of(model=f"acme/refused-{number}:Q8_0", device="cpu")
        with pytest.raises(ConfigError, match="unheard"), local_model(args):
            pass
        assert hub.sent_bytes < 2 * FIRST_GGUF_BYTES
        hub.forget_requests()
    assert not (tmp_path / "store").exists()
    args = EngineArgs.of(model="acme/refused-1:Q8_0", device="cpu", tokenizer=str(TINY))
    with local_model(args) as local:
        assert not (Path(local.model) / "tokenizer.json").exists()


def test_the_doctor_tells_types_and_sizes_and_fetches_headers_only(hub: HubServer, tmp_path: Path) -> None:
    file = tmp_path / "Tiny-Q4_0.gguf"
    make_gguf(file, "llama", Type.Q4_0)
    hub.add_model("acme/tiny", {file.name: file})
    memory = DeviceMemory("cpu", "host", 64 << 30, 64 << 30)
    for model in (str(file), "acme/tiny:Q4_0"):
        args = EngineArgs.of(model=model, device="cpu", dtype="bfloat16")
        diagnosis = diagnose(args, memory)
        assert diagnosis.fits
        assert diagnosis.weights is not None
        sizes = re.fullmatch(
            r"GGUF weights Q4_0 ([\d.]+) KiB, F32 ([\d.]+) KiB: ([\d.]+) KiB in the file, ([\d.]+) KiB on disk and in "
            r"memory, because they are widened to bfloat16",
            diagnosis.weights,
        )
        assert sizes is not None
        quantized, plain, stored, widened = map(float, sizes.groups())
        assert stored == pytest.approx(quantized + plain, abs=0.02)
        # 18 bytes for 32 numbers of Q4_0, 4 for one of F32, and 2 for each in bfloat16.
        assert widened == pytest.approx(quantized * 64 / 18 + plain / 2, abs=0.1)
    assert not (tmp_path / "store").exists()


def test_damaged_files_are_refused(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "model.gguf"
    make_gguf(file, "llama", Type.Q8_0)
    whole = file.read_bytes()
    for damaged in (b"", b"GGUF", whole[:300], whole[:-1000], b"GGML" + whole[4:]):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"cut off, damaged|behind the end"):
            gguf_folder(file, "float32", has_tokenizer=False)
    infinite = np.array([np.inf], np.float16).tobytes()
    at = len(whole) - 34 * 4
    file.write_bytes(whole[:at] + infinite * 68)
    with pytest.raises(ConfigError, match="not finite"):
        gguf_folder(file, "float32", has_tokenizer=False)
    assert not [each for each in own_cache.iterdir() if each.is_dir()]


def _sentencepiece(writer: Any) -> None:
    words = ["\u2581", "H", "i", "Hi", "\u2581Hi", "\n", "<|user|>", "<|end|>", "<end_of_turn>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokens += [f"zq{index}" for index in range(1018 - len(tokens))]
    kinds = [
        2 if i == 0 else 3 if i < 3 or t in words[6:] else 6 if i < 259 else 1 for i, t in enumerate(tokens)
    ]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


@pytest.mark.parametrize(
    ("kind", "changes", "wanted"),
    [
        ("llama", {}, ["<s>", "<|user|>", "\u2581Hi"]),
        ("llama", {"tokenizer.ggml.add_space_prefix": False}, ["<s>", "<|user|>", "Hi"]),
    ],
)
def test_spaces_begin_texts_as_the_file_says(
    kind: str, changes: dict[str, Any], wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "add_tokenizer", _sentencepiece)
    make_gguf(
        tmp_path / "model.gguf", kind, Type.Q8_0, changes={"tokenizer.ggml.add_bos_token": True, **changes}
    )
    ours = tokenizers.Tokenizer.from_file(
        str(gguf_folder(tmp_path / "model.gguf", "float32") / "tokenizer.json")
    )
    assert ours.encode("<|user|>Hi").tokens == wanted


def test_phi_3_drops_spaces_after_control_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "add_tokenizer", _sentencepiece)
    make_gguf(tmp_path / "model.gguf", "phi3", Type.Q8_0, changes={"tokenizer.ggml.add_bos_token": True})
    ours = tokenizers.Tokenizer.from_file(
        str(gguf_folder(tmp_path / "model.gguf", "float32") / "tokenizer.json")
    )
    assert ours.encode("<|user|>\nHi<|end|>\n").ids == [1, 265, 263, 266]


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_ends_of_turns_end_though_no_key_names_them(
    has_tokenizer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_files, "add_tokenizer", _sentencepiece)
    make_gguf(tmp_path / "model.gguf", "gemma3", Type.Q8_0, changes={"tokenizer.ggml.add_bos_token": True})
    folder = gguf_folder(tmp_path / "model.gguf", "float32", has_tokenizer=has_tokenizer)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 266, 267]


def test_control_tokens_of_any_characters_keep_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(writer: Any) -> None:
        tokenizer = json.loads((TINY / "tokenizer.json").read_text())
        by_id = {i: t for t, i in tokenizer["model"]["vocab"].items()} | {
            e["id"]: e["content"] for e in tokenizer["added_tokens"]
        }
        tokens = [by_id[i] for i in range(len(by_id))]
        tokens[1], tokens[1018] = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>"
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("deepseek-r1-qwen")
        writer.add_token_list(tokens)
        writer.add_token_types(
            [4 if i == 1018 else 3 if i < 3 or i > 1018 else 1 for i in range(len(tokens))]
        )
        writer.add_token_merges([" ".join(m) for m in tokenizer["model"]["merges"]])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    monkeypatch.setattr(gguf_files, "add_tokenizer", add)
    make_gguf(tmp_path / "model.gguf", "qwen2", Type.Q8_0, changes={"tokenizer.ggml.add_bos_token": True})
    ours = tokenizers.Tokenizer.from_file(
        str(gguf_folder(tmp_path / "model.gguf", "float32") / "tokenizer.json")
    )
    assert ours.encode("<\uff5cUser\uff5c>Hi").ids == [1, 1018, 791]
    assert ours.get_vocab_size() == 1024


def test_a_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    make_gguf(tmp_path / "model.gguf", "llama", Type.Q8_0, changes={"llama.rope.scaling.factor": 8.0})
    folder = gguf_folder(tmp_path / "model.gguf", "float32", has_tokenizer=False)
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 8.0,
    }


@pytest.mark.timeout(30)
def test_an_array_longer_than_the_file_is_refused_at_once(tmp_path: Path) -> None:
    name = b"general.architecture"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(name)) + name
    (tmp_path / "model.gguf").write_bytes(head + struct.pack("<IIQ", 9, 0, 1 << 40))
    with pytest.raises(ConfigError, match="ends within a key"):
        gguf_folder(tmp_path / "model.gguf", "float32")


def test_what_a_killed_start_left_is_removed_by_the_next(tmp_path: Path, own_cache: Path) -> None:
    make_gguf(tmp_path / "model.gguf", "qwen2", Type.Q8_0)
    folder = gguf_folder(tmp_path / "model.gguf", "float32", has_tokenizer=False)
    left = own_cache / f".converting-{folder.name}"
    folder.rename(left)  # as SIGKILL and SIGTERM leave it
    gguf_folder(tmp_path / "model.gguf", "float32", has_tokenizer=False)
    assert not left.exists()


def test_a_folder_that_is_served_is_not_removed(tmp_path: Path) -> None:
    folders = []
    args = EngineArgs.of(model=str(tmp_path / "0.gguf"), tokenizer=str(TINY), dtype="float32", device="cpu")
    for index in range(8):
        make_gguf(tmp_path / f"{index}.gguf", "qwen2", Type.Q8_0)
    with local_model(args) as local:
        for index in range(1, 8):
            folders.append(gguf_folder(tmp_path / f"{index}.gguf", "float32", has_tokenizer=False))
        assert Path(local.model).is_dir()
        assert [folder.is_dir() for folder in folders] == [False, False, False, True, True, True, True]
    gguf_folder(tmp_path / "1.gguf", "float32", has_tokenizer=False)
    assert not Path(local.model).exists()
