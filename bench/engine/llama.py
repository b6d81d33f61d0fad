"""llama.cpp as a contender of offline.py: the same weights as GGUF, and greedy decoding through the C interface of
llama-cpp-python. Runs in an interpreter that has llama-cpp-python, built with GGML_NATIVE=ON, and gguf.

All sequences are decoded in one batch a step, as a server with that many slots does. Embedding and output head, which
are one tensor, have 8 bits where the layers have 8 or 4: llama-quantize leaves no bfloat16 there, and our head has 8.
`Llama.tune` tries the settings that a user can give and keeps the fastest.
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WIDTHS = {"llama-bf16": "BF16", "llama-q8_0": "Q8_0", "llama-q4_0": "Q4_0"}
"""Contenders, and the type of their weights."""


def write_gguf(folder: Path, width: str) -> Path:
    """Write a Qwen3 checkpoint of random_model.py as GGUF beside it, unless that was done; return the file."""
    import gguf

    file = folder / f"{width}-head-of-8-bits.gguf" if width != "BF16" else folder / "BF16.gguf"
    if file.exists():
        return file
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "qwen3")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    for name, bits in stored_tensors(folder / "model.safetensors"):
        numbers = (bits.astype(np.uint32) << 16).view(np.float32)
        is_plain = numbers.ndim == 1
        kind = "F32" if is_plain else "Q8_0" if "embed" in name and width != "BF16" else width
        form = gguf.GGMLQuantizationType[kind]
        stored = numbers if is_plain else gguf.quants.quantize(numbers, form)
        found = names.get_name(name, try_suffixes=(".weight",))
        assert found is not None, name
        writer.add_tensor(found, stored, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return part.rename(file)


def stored_tensors(file: Path) -> Any:
    """Yield the names and bits, uint16, of the bfloat16 tensors in a safetensors file."""
    data = np.memmap(file, np.uint8, "r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(bytes(data[8:start])).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", name
        begin, end = entry["data_offsets"]
        yield name, np.array(data[start + begin : start + end]).view(np.uint16).reshape(entry["shape"])


class Settings(NamedTuple):
    """Settings of a context of llama.cpp."""

    threads: int
    flash_attention: bool = True
    unified_cache: bool = False
    """Whether all sequences share one buffer of keys and values (--kv-unified)."""
    micro_batch: int = 512
    """Tokens that are computed at once (--ubatch-size)."""


class Llama:
    """A model in llama.cpp that continues prompts greedily.

    Args:
        threads: most of them.
        sequences: continued at once.
        length: most tokens of a sequence.
    """

    def __init__(self, file: Path, threads: int, sequences: int, length: int) -> None:
        import llama_cpp

        self._c = llama_cpp
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
        assert self._model, f"llama.cpp cannot load {file}"
        self._sequences, self._length, self._size = sequences, length, 2048
        self._batch = llama_cpp.llama_batch_init(self._size, 0, 1)
        self._settings, self._context = Settings(threads), None
        self._apply(self._settings)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def _apply(self, settings: Settings) -> None:
        if self._context is not None:
            self._c.llama_free(self._context)
        params = self._c.llama_context_default_params()
        params.n_ctx = self._sequences * math.ceil((self._length + 1) / 256) * 256
        params.n_batch, params.n_ubatch = self._size, settings.micro_batch
        params.n_seq_max, params.kv_unified = self._sequences, settings.unified_cache
        params.n_threads = params.n_threads_batch = settings.threads
        params.flash_attn_type = int(settings.flash_attention)
        self._context = self._c.llama_init_from_model(self._model, params)
        assert self._context, f"llama.cpp cannot make a context of {settings}"

    def tune(self, prompts: list[list[int]], tokens: int) -> None:
        """Change one setting after the other, and keep what continues these prompts fastest."""
        best, best_s = self._settings, self._time(self._settings, prompts, tokens)
        changes: list[dict[str, int]] = [{"flash_attention": False}, {"threads": max(best.threads // 2, 1)}]
        if len(prompts) > 1:
            changes.append({"unified_cache": True})
        if sum(map(len, prompts)) > best.micro_batch // 4:
            changes += [{"micro_batch": size} for size in (128, 2048)]
        for change in changes:
            tried = best._replace(**change)
            if (seconds := self._time(tried, prompts, tokens)) < best_s:
                best, best_s = tried, seconds
        self._apply(best)
        print(f"fastest: {best}", file=sys.stderr, flush=True)

    def _time(self, settings: Settings, prompts: list[list[int]], tokens: int) -> float:
        self._apply(settings)
        least = math.inf
        for _ in range(2):
            before = time.perf_counter()
            self.generate(prompts, tokens)
            least = min(least, time.perf_counter() - before)
        return least

    def generate(self, prompts: list[list[int]], tokens: int) -> int:
        """Continue prompts by so many tokens each; return the number of all of them."""
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        pending = [
            (token, place, index, place == len(prompt) - 1)
            for index, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        last: dict[int, int] = {}
        for start in range(0, len(pending), self._size):
            last |= self._decode(pending[start : start + self._size])
        for step in range(1, tokens):
            last = self._decode(
                [(last[index], len(prompt) + step - 1, index, True) for index, prompt in enumerate(prompts)]
            )
        return len(prompts) * tokens

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Decode (token, position, sequence, whether to sample); return the next token of each sampled sequence."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for place, (token, position, sequence, is_last) in enumerate(entries):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = is_last
        status = self._c.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode: {status}"
        return {
            entry[2]: int(np.argmax(self._logits(place))) for place, entry in enumerate(entries) if entry[3]
        }

    def _logits(self, place: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.ctypeslib.as_array(self._c.llama_get_logits_ith(self._context, place), (self.vocab_size,))
