"""python -m argosy_engine.checkpoint.gguf_conversion FILE FOLDER DTYPE WHAT: write what a GGUF file has in Hugging
Face's layout: config.json, tokenizer.json, the chat template, and the weights, widened to DTYPE (F32, F16 or BF16).

The format is llama.cpp's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Files are read and blocks widened
by the package `gguf`, tokenizers by transformers. What is ours is the meaning of a file as llama.cpp's
convert_hf_to_gguf.py wrote it: the config of each architecture, the names of tensors, and what the converter has
changed in them. Must not be imported by the engine: it imports transformers.

Invariant: a key, a tensor or a value that is not known is refused by name: it may change what the model computes.

WHAT is `all`, `headers` (weights are a hole in the file, for whoever reads headers only, and gguf.json says which types
they have), `no tokenizer`, or `headers, no tokenizer`. Standard output has a line for each step: `of BYTES`, then
`done BYTES`. Exit codes: 0 it is written; 2 it is refused, and the last line of standard error says why.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray

from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.gguf_files import part_paths

Floats = NDArray[np.float32]
Change = Callable[[Floats], Floats]

_CHUNK_ELEMENTS = 1 << 24
"""Elements that are widened at a time."""
_MAX_LAYERS = 1024
_MAX_VALUES = 1 << 22
"""Of all keys and tensors; a vocabulary of 262,144 with merges has 2 million."""
_MAX_EXPERTS = 1024
_ITEMSIZE = {"F32": 4, "F16": 2, "BF16": 2}

_LLAMA3_SPLITS = frozenset({"llama3", "llama-v3", "llama-bpe", "tekken"})
"""Of these, prompts begin with a token for that unless the file says otherwise, and a word that is a token is kept."""
_SPLITS = _LLAMA3_SPLITS | {"qwen2", "deepseek-r1-qwen", "qwen35", "gpt-4o"}
"""How byte-level tokenizers split texts (`tokenizer.ggml.pre`), of those that transformers has the expression for."""


_CONTROL, _USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type`."""


class NotConvertible(Exception):
    """The file cannot be served; the message says why."""


class _Reader(gguf.GGUFReader):
    """Refuses what its base class reads on and on: it takes nothing for a number where the file has ended, and makes
    objects of hundreds of bytes of each element of an array."""

    _num_values = 0

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        found = super()._get(offset, dtype, count, override_order)
        self._num_values += 1
        if len(found) != int(count):
            raise ValueError("it ends within a key")
        if self._num_values > _MAX_VALUES:
            raise ValueError(f"its keys have more than {_MAX_VALUES} values")
        return found


def _read(path: Path) -> _Reader:
    try:
        return _Reader(path)
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise NotConvertible(
            f"{path.name} is cut off, damaged or no GGUF file ({str(error)[:200]}); copy it again"
        ) from None


class _File:
    """A GGUF file's keys and tensors. Keys of the architecture that nobody reads are refused by `check_all_read`."""

    def __init__(self, path: Path) -> None:
        self._reader = _read(path)
        self._read: set[str] = set()
        self.tensors: dict[str, gguf.ReaderTensor] = {}
        self._add(path, self._reader)
        self._add_parts(path, max(int(self.key("split.count", int, 1)), 1))
        self.architecture = self.key("general.architecture", str)

    def _add_parts(self, path: Path, count: int) -> None:
        """Read the parts behind the first, which has all keys of the model."""
        if int(self.key("split.no", int, 0)):
            raise NotConvertible(f"it is not the first of its {count} parts; give that one")
        try:
            names = part_paths(path.name)
        except UnsupportedModel as error:
            raise NotConvertible(str(error)) from None
        if len(names) != count:
            raise NotConvertible(
                f"it is one of {count} parts, whose names must be NAME-00001-of-{count:05}.gguf and so on; rename them"
            )
        for number, name in enumerate(names[1:], 1):
            part = path.with_name(name)
            reader = _read(part)
            place = [self.key(f"split.{key}", int, -1, reader) for key in ("no", "count")]
            if place != [number, count] or any(
                not key.startswith(("split.", "GGUF.")) for key in reader.fields
            ):
                raise NotConvertible(f"{name} is not part {number + 1} of {count} of it; copy it again")
            self._add(part, reader)
        if int(self.key("split.tensors.count", int, len(self.tensors))) != len(self.tensors):
            raise NotConvertible("its parts have another number of tensors than it says; copy them again")

    def _add(self, path: Path, reader: _Reader) -> None:
        size = path.stat().st_size
        for tensor in reader.tensors:
            if tensor.name in self.tensors:
                raise NotConvertible(f"two of its parts have {tensor.name[:100]}; copy them again")
            if tensor.data_offset + tensor.n_bytes > size:
                raise NotConvertible(f"{tensor.name} ends behind the end of the file; copy it again")
            self.tensors[tensor.name] = tensor

    def key(self, name: str, kind: type, default: Any = None, reader: _Reader | None = None) -> Any:
        """Return a value, of int, float (which integers are too), bool or str.

        Args:
            reader: of another part than the first.
        """
        field = (reader or self._reader).fields.get(name)
        if field is None:
            if default is None:
                raise NotConvertible(f"it has no {name}")
            return default
        value = field.contents()
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise NotConvertible(f"{name} is {str(value)[:60]!r}, which is no {kind.__name__}")
        return value

    def has(self, name: str) -> bool:
        return name in self._reader.fields

    def own(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a value of the architecture."""
        self._read.add(name)
        return self.key(f"{self.architecture}.{name}", kind, default)

    def count(self, name: str, default: int | None = None, most: int = 1 << 24) -> int:
        value = self.own(name, int, default)
        if not 0 <= value <= most:
            raise NotConvertible(f"{self.architecture}.{name} is {value}, more than {most} or less than 0")
        return int(value)

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary, by id. A list of 150,000 texts takes tenths of a second to read."""
        return self._list("tokens", str)

    @cached_property
    def special_tokens(self) -> dict[int, int]:
        """The types of control and user-defined tokens by id."""
        types = self._list("token_type", int)[: len(self.tokens)]
        return {id_: type_ for id_, type_ in enumerate(types) if type_ in (_CONTROL, _USER_DEFINED)}

    def _list(self, name: str, kind: Callable[[Any], Any]) -> list[Any]:
        field = self._reader.fields.get(f"tokenizer.ggml.{name}")
        return [] if field is None else [kind(each) for each in field.contents()]

    def check_all_read(self) -> None:
        prefix = f"{self.architecture}."
        unknown = [
            name
            for name in self._reader.fields
            if name.startswith(prefix) and name[len(prefix) :] not in self._read
        ]
        if unknown:
            raise NotConvertible(f"its keys {', '.join(unknown[:4])[:300]} are not known")


class _Target(NamedTuple):
    """A tensor in Hugging Face's layout, and where it comes from."""

    name: str
    shape: tuple[int, ...]
    source: str
    """Name of the tensor in the file."""
    expert: int | None = None
    """The expert whose part it is; None: the whole tensor."""
    change: Change | None = None
    """Undoes what the converter has done to it, to whole tensors."""


def _common(file: _File) -> dict[str, Any]:
    """Return what the configs of all architectures share."""
    heads = file.count("attention.head_count", most=4096)
    hidden = file.count("embedding_length")
    layers = file.count("block_count", most=_MAX_LAYERS)
    if not heads or not hidden or not layers:
        raise NotConvertible("it has no layers, or layers without heads")
    head_dim = file.count("attention.key_length", hidden // heads, most=4096)
    if file.count("attention.value_length", head_dim) != head_dim:
        raise NotConvertible("its values have another size than its keys")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise NotConvertible("it has no token_embd.weight; is it a model, or an adapter or a projector?")
    vocab_size = int(embedding.shape[1])
    if file.count("vocab_size", vocab_size) != vocab_size:
        raise NotConvertible("its vocab_size is not the number of its embeddings")
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": file.count("attention.head_count_kv", heads, most=4096),
        "head_dim": head_dim,
        "intermediate_size": file.count("feed_forward_length", 0),
        "max_position_embeddings": file.count("context_length"),
        "rms_norm_eps": float(file.own("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": float(file.own("rope.freq_base", float, 10000.0)),
        "vocab_size": vocab_size,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    rotary = file.count("rope.dimension_count", head_dim)
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    for name, id_ in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
        if file.has(f"tokenizer.ggml.{id_}_token_id"):
            config[name] = int(file.key(f"tokenizer.ggml.{id_}_token_id", int))
    return config


def _rope_scaling(file: _File, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return `rope_scaling`, from the keys or, for Llama 3's kind, from the factors that the converter computed."""
    kind = file.own("rope.scaling.type", str, "linear")  # llama.cpp's default; without a factor it is none
    file.own("rope.scaling.finetuned", bool, default=False)
    factor = file.own("rope.scaling.factor", float, 1.0)
    original = file.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        return _llama3_scaling(np.asarray(factors.data, np.float32).reshape(-1), config)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        if file.own("rope.scaling.attn_factor", float, 1.0) != 1.0:
            raise NotConvertible("its rope.scaling.attn_factor is not 1")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise NotConvertible(f"its rope.scaling.type {kind[:40]!r} is not known")


def _llama3_scaling(factors: Floats, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with which transformers computes these divisors of the frequencies."""
    low, high, original = 1.0, 4.0, 8192
    factor = float(round(float(factors.max()), 3))
    frequencies = 1.0 / config["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
    lengths = 2 * np.pi / frequencies
    smooth = np.clip((original / lengths - low) / (high - low), 0, 1)
    if len(factors) != len(lengths) or not np.allclose(
        factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3
    ):
        raise NotConvertible("its rope_freqs.weight is not of Llama 3's kind")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _config(file: _File) -> dict[str, Any]:
    """Return config.json.

    Raises:
        NotConvertible: the architecture, or one of its keys, is not known.
    """
    if file.architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise NotConvertible(
            f"its architecture {file.architecture[:40]!r} is not known as GGUF; there are {known}"
        )
    architecture, model_type = _ARCHITECTURES[file.architecture]
    config = _common(file)
    num_experts = file.count("expert_count", 0, most=_MAX_EXPERTS)
    if file.architecture == "llama" and num_experts:
        architecture, model_type = "MixtralForCausalLM", "mixtral"
        config["num_local_experts"] = num_experts
        config["num_experts_per_tok"] = file.count("expert_used_count")
    elif file.architecture == "llama":
        file.count("expert_used_count", 0)
        config |= {
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        }
    if file.architecture in ("qwen2moe", "qwen3moe"):
        config |= {
            "num_experts": num_experts,
            "num_experts_per_tok": file.count("expert_used_count"),
            "moe_intermediate_size": file.count("expert_feed_forward_length"),
            "norm_topk_prob": file.architecture == "qwen3moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        if file.count("expert_gating_func", 1) != 1 or file.own("expert_weights_scale", float, 1.0) != 1.0:
            raise NotConvertible("its experts are chosen in another way than by softmax")
        if file.architecture == "qwen2moe":
            shared = file.count("expert_shared_feed_forward_length", 0)
            config["shared_expert_intermediate_size"] = shared
    if file.architecture in ("gemma2", "gemma3"):
        config |= _gemma(file, config)
    else:
        config["hidden_act"] = "silu"
    if file.architecture == "phi3":
        if file.count("attention.sliding_window", 0):
            config["sliding_window"] = file.count("attention.sliding_window")
        config["pad_token_id"] = None
    if (scaling := _rope_scaling(file, config)) is not None:
        config["rope_scaling"] = scaling
    if "rope_factors_long.weight" in file.tensors:
        raise NotConvertible("its rope factors for long texts (longrope) are not known as GGUF")
    file.check_all_read()
    if file.architecture == "gemma3":
        _gemma3_rope(config)
    return {"architectures": [architecture], "model_type": model_type, "torch_dtype": "bfloat16", **config}


def _gemma(file: _File, config: Mapping[str, Any]) -> dict[str, Any]:
    # The largest model of each generation scales its queries by what each head would have of the hidden size.
    is_largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[file.architecture]
    found = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": file.count("attention.sliding_window"),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if is_largest
        else config["head_dim"],
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    if file.architecture == "gemma3":
        found["rope_local_base_freq"] = float(file.own("rope.freq_base_swa", float, 10000.0))
        if file.count("attention.sliding_window_pattern", 6) != 6:
            raise NotConvertible("its attention.sliding_window_pattern is not 6")
    if file.architecture == "gemma2":
        found["attn_logit_softcapping"] = float(file.own("attn_logit_softcapping", float))
        found["final_logit_softcapping"] = float(file.own("final_logit_softcapping", float))
    elif file.has("gemma3.final_logit_softcapping"):
        found["final_logit_softcapping"] = float(file.own("final_logit_softcapping", float))
    return found


def _gemma3_rope(config: dict[str, Any]) -> None:
    """Five of six layers have a window and a base of their own."""
    kinds = [
        "full_attention" if (index + 1) % 6 == 0 else "sliding_attention"
        for index in range(config["num_hidden_layers"])
    ]
    scaling = config.pop("rope_scaling", None) or {"rope_type": "default"}
    theta, theta_of_windows = config.pop("rope_theta"), config.pop("rope_local_base_freq")
    config["layer_types"] = kinds
    config["rope_parameters"] = {
        "full_attention": {**scaling, "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": theta_of_windows},
    }


_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
}
"""`general.architecture`: the class and the `model_type` in config.json."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GEMMA_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAMES = {
    "gemma2": _GEMMA_NAMES,
    "gemma3": _GEMMA_NAMES,
    "phi3": _LAYER_NAMES | {"ffn_up": "mlp.gate_up_proj"},
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_MIXTRAL_EXPERTS = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _targets(file: _File, config: Mapping[str, Any]) -> list[_Target]:
    """Return the tensors of the checkpoint.

    Raises:
        NotConvertible: a tensor of the file is not known.
    """
    found: list[_Target] = []
    for name, tensor in file.tensors.items():
        if name != "rope_freqs.weight":
            shape = tuple(int(size) for size in reversed(tensor.shape))
            found += _named(file.architecture, name, shape, config)
    return found


def _named(
    architecture: str, source: str, shape: tuple[int, ...], config: Mapping[str, Any]
) -> Iterator[_Target]:
    stem, _, kind = source.rpartition(".")
    is_mixtral = config["model_type"] == "mixtral"
    if stem in _TOP and kind == "weight":
        is_offset = architecture.startswith("gemma") and "norm" in stem
        yield _Target(f"{_TOP[stem]}.{kind}", shape, source, change=_less_one if is_offset else None)
        return
    block, _, part = stem.removeprefix("blk.").partition(".")
    if not stem.startswith("blk.") or not block.isdecimal() or kind not in ("weight", "bias"):
        raise NotConvertible(f"its tensor {source[:100]} is not known")
    if int(block) >= config["num_hidden_layers"]:
        raise NotConvertible(f"its tensor {source[:100]} is of a layer that it does not have")
    layer = f"model.layers.{int(block)}."
    if part in _EXPERTS and kind == "weight" and len(shape) == 3:
        prefix = f"{layer}block_sparse_moe.experts." if is_mixtral else f"{layer}mlp.experts."
        names = _MIXTRAL_EXPERTS if is_mixtral else _EXPERTS
        if shape[0] != config.get("num_local_experts", config.get("num_experts")):
            raise NotConvertible(f"its tensor {source[:100]} has {shape[0]} experts")
        for expert in range(shape[0]):
            yield _Target(f"{prefix}{expert}.{names[part]}.weight", shape[1:], source, expert)
        return
    name = _NAMES.get(architecture, _LAYER_NAMES).get(part)
    if name is None:
        raise NotConvertible(f"its tensor {source[:100]} is not known")
    change: Change | None = None
    if architecture == "llama" and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        change = _halves_of(heads)
    elif architecture.startswith("gemma") and part.endswith("norm"):
        change = _less_one
    elif part == "ffn_gate_inp_shexp":
        shape = (1, *shape[-1:])
    if is_mixtral and part == "ffn_gate_inp":
        name = "block_sparse_moe.gate"
    yield _Target(f"{layer}{name}.{kind}", shape, source, change=change)


def _less_one(weight: Floats) -> Floats:
    return weight - np.float32(1)


def _halves_of(heads: int) -> Change:
    """Undo the order in which llama.cpp rotates neighbours: rows of a head alternate between its halves."""

    def change(weight: Floats) -> Floats:
        if weight.shape[0] % (2 * heads):
            raise NotConvertible(f"{weight.shape[0]} rows of queries or keys are no {heads} heads")
        parts = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
        return parts.swapaxes(1, 2).reshape(weight.shape)

    return change


def _widened(file: _File, target: _Target) -> Iterator[Floats]:
    """Yield the rows of a target in order."""
    tensor = file.tensors[target.source]
    data = tensor.data if target.expert is None else tensor.data[target.expert]
    try:
        if target.change is not None or data.ndim < 2:
            whole = gguf.dequantize(np.asarray(data), tensor.tensor_type)
            yield whole if target.change is None else target.change(whole)
            return
        step = max(_CHUNK_ELEMENTS // max(target.shape[-1], 1), 1)
        for start in range(0, len(data), step):
            yield gguf.dequantize(np.asarray(data[start : start + step]), tensor.tensor_type)
    except NotImplementedError:
        raise NotConvertible(
            f"{target.source} is of type {tensor.tensor_type.name}, which is not read"
        ) from None


def _encoded(values: Floats, dtype: str, name: str) -> bytes:
    """Round to nearest even."""
    if not np.isfinite(values).all():
        raise NotConvertible(f"{name} has numbers that are not finite; copy it again")
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "F32":
        return values.tobytes()
    if dtype == "F16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if not np.isfinite(half).all():
            raise NotConvertible(f"{name} has numbers that are too large for float16; use --dtype bfloat16")
        return half.tobytes()
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def _write_weights(file: _File, targets: list[_Target], path: Path, dtype: str, *, has_data: bool) -> None:
    header: dict[str, Any] = {}
    end = 0
    for target in targets:
        begin, end = end, end + int(np.prod(target.shape)) * _ITEMSIZE[dtype]
        header[target.name] = {"dtype": dtype, "shape": list(target.shape), "data_offsets": [begin, end]}
    if len(header) != len(targets):
        raise NotConvertible("two of its tensors have the same meaning")
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    print("of", end, flush=True)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        if not has_data:
            out.truncate(8 + len(encoded) + end)
            return
        for target in targets:
            written = 0
            for rows in _widened(file, target):
                written += out.write(_encoded(rows, dtype, target.source))
                print("done", rows.size * _ITEMSIZE[dtype], flush=True)
            if written != int(np.prod(target.shape)) * _ITEMSIZE[dtype]:
                raise NotConvertible(f"{target.source} has another size than its shape says; copy it again")


def _write_tokenizer(file: _File, path: Path, folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    kind, split = file.key("tokenizer.ggml.model", str), file.key("tokenizer.ggml.pre", str, "default")
    remedy = "give a folder with this model's tokenizer.json with --tokenizer PATH"
    if kind not in ("gpt2", "llama"):
        raise NotConvertible(f"its tokenizer {kind[:40]!r} is not known; {remedy}")
    if kind == "gpt2" and split not in _SPLITS:
        raise NotConvertible(f"how its tokenizer splits texts ({split[:40]!r}) is not known; {remedy}")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    backend = tokenizer.backend_tokenizer
    is_llama3 = kind == "gpt2" and split in _LLAMA3_SPLITS
    if is_llama3:
        backend.model.ignore_merges = True
    if kind == "llama" and not file.architecture.startswith("gemma"):
        # As llama.cpp does it, which has a space at the beginning of each text between two special tokens.
        has_space = file.key("tokenizer.ggml.add_space_prefix", bool, True)
        first = [normalizers.Prepend("\u2581")] if has_space else []
        backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "\u2581")])
        backend.pre_tokenizer = None
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if has_space else [])])
    adds_bos = file.key("tokenizer.ggml.add_bos_token", bool, kind == "llama" or is_llama3)
    if adds_bos and _first(tokenizer) != tokenizer.bos_token_id and tokenizer.bos_token:
        begin = tokenizer.bos_token
        backend.post_processor = TemplateProcessing(
            single=[begin, "$A"], pair=[begin, "$A", "$B"], special_tokens=[(begin, tokenizer.bos_token_id)]
        )
    if adds_bos != (_first(tokenizer) == tokenizer.bos_token_id):
        raise NotConvertible(f"transformers makes a tokenizer of it that begins prompts otherwise; {remedy}")
    tokenizer.save_pretrained(folder)
    _write_special_tokens(
        file, folder / "tokenizer.json", strips=kind == "llama" and file.architecture == "phi3"
    )
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for id_ in file.special_tokens:
        token = file.tokens[id_]
        if made.token_to_id(token) not in (id_, None):
            raise NotConvertible(f"transformers gives its token {token[:60]!r} another number; {remedy}")
    if made.get_vocab_size() > len(file.tokens):
        raise NotConvertible(
            f"transformers makes a tokenizer of it that has more tokens than the file; {remedy}"
        )


def _write_special_tokens(file: _File, path: Path, *, strips: bool) -> None:
    """Write the control and user-defined tokens of the file as it spells them, each by its own number: transformers
    leaves out those of other characters than the byte-level alphabet has, and gives new numbers to some.

    Args:
        strips: whether spaces after them are dropped (Phi-3, as its tokenizer.json says and llama.cpp does).
    """
    saved = json.loads(path.read_text())
    vocab: dict[str, int] = saved["model"]["vocab"]
    by_id = {id_: token for token, id_ in vocab.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added: list[dict[str, Any]] = []
    for id_, type_ in file.special_tokens.items():
        token = file.tokens[id_]
        if not token or by_id.get(id_) is None:
            continue
        if by_id[id_] != token and saved["model"]["type"] == "BPE" and not by_id[id_].strip("\u2581"):
            continue  # spaces, which Gemma's tokenizer spells otherwise
        vocab[token] = vocab.pop(by_id[id_])
        rstrip = strips and type_ == _CONTROL and token not in ("<unk>", "<s>", "<|endoftext|>")
        added.append({"id": id_, "content": token, **flags, "rstrip": rstrip, "special": type_ == _CONTROL})
    known = {each["content"] for each in added}
    ids = {token: id_ for id_, token in enumerate(file.tokens)}
    added += [
        {**each, "id": ids[each["content"]]}
        for each in saved["added_tokens"]
        if each["content"] in ids and each["content"] not in known
    ]
    saved["added_tokens"] = sorted(added, key=lambda each: int(each["id"]))
    for name, each in ((saved["post_processor"] or {}).get("special_tokens") or {}).items():
        each["ids"] = [ids[name]]
    path.write_text(json.dumps(saved, ensure_ascii=False))


_ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>"}
    | {"<EOT>", "_<EOT>", "<end_of_utterance>"}
)
"""Texts of tokens that end a turn in every file of llama.cpp's: most converters write the id of one end only."""


def _write_ends(file: _File, folder: Path) -> None:
    ends = [
        int(file.key(f"tokenizer.ggml.{name}_token_id", int))
        for name in ("eos", "eot", "eom")
        if file.has(f"tokenizer.ggml.{name}_token_id")
    ]
    ends += [id_ for id_ in file.special_tokens if file.tokens[id_] in _ENDS]
    if ends:
        (folder / "generation_config.json").write_text(
            json.dumps({"eos_token_id": list(dict.fromkeys(ends))})
        )


def _first(tokenizer: Any) -> int:
    """Return the first token of a prompt."""
    return int(tokenizer.backend_tokenizer.encode("a").ids[0])


def _types(file: _File) -> dict[str, int]:
    """Return each type of tensors with the bytes that it has in the file, the largest first."""
    found: dict[str, int] = {}
    for tensor in file.tensors.values():
        name = tensor.tensor_type.name
        found[name] = found.get(name, 0) + int(tensor.n_bytes)
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def main() -> int:
    """Converts a file."""
    path, folder, dtype, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    try:
        file = _File(path)
        config = _config(file)
        targets = _targets(file, config)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        _write_ends(file, folder)
        if "no tokenizer" not in what:
            _write_tokenizer(file, path, folder)
        has_data = "headers" not in what
        _write_weights(file, targets, folder / "model.safetensors", dtype, has_data=has_data)
        if not has_data:
            (folder / "gguf.json").write_text(json.dumps(_types(file)))
    except NotConvertible as refused:
        print(refused, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
