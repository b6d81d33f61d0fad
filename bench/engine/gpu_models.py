"""Published shapes with random weights, drawn on the device: what a step must read, decodes, prompts, a server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from gpu_device import Device
from gpu_steps import draw_prompts, generate, token_seconds
from random_model import VOCAB_SIZE

PROMPT_TOKENS_PER_STEP = 8192


class Model(NamedTuple):
    """A published shape."""

    name: str
    config: dict[str, Any]
    flags: Mapping[str, Any] = MappingProxyType({})
    batches: tuple[int, ...] = (1, 8, 64, 256)

    @property
    def layer_elements(self) -> int:
        """Elements of a layer's matrices, without experts."""
        c = self.config
        heads = c["head_dim"] * (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"])
        inner = 0 if "num_experts" in c else c["intermediate_size"]
        return int(c["hidden_size"] * (heads + 3 * inner + c.get("num_experts", 0)))

    @property
    def expert_elements(self) -> int:
        return 3 * int(self.config["hidden_size"]) * int(self.config.get("moe_intermediate_size", 0))

    def step_bytes(self, requests: int, context: float) -> float:
        """Bytes that a decode step must read. Of the experts, as many as tokens that choose evenly hit."""
        c = self.config
        itemsize = 1 if self.flags.get("quantization") == "fp8" else 2
        experts = c.get("num_experts", 0)
        hit = experts * (1 - (1 - c.get("num_experts_per_tok", 0) / experts) ** requests) if experts else 0
        layer = (self.layer_elements + hit * self.expert_elements) * itemsize
        head = 2 * c["vocab_size"] * c["hidden_size"]
        kv = 4 * c["num_key_value_heads"] * c["head_dim"] * requests * context
        return float(c["num_hidden_layers"] * (layer + kv) + head)

    def prompt_flops_per_token(self) -> float:
        """Operations of the matrices that each token of a prompt passes: without attention and the output head."""
        chosen = self.config.get("num_experts_per_tok", 0)
        return 2.0 * self.config["num_hidden_layers"] * (self.layer_elements + chosen * self.expert_elements)

    def write(self, folder: Path, tokenizer: Path) -> Path:
        """Write a config and a tokenizer, without weights; return the folder."""
        path = folder / self.name
        path.mkdir(parents=True, exist_ok=True)
        for file in tokenizer.iterdir():
            if file.name.startswith("tokenizer") or file.suffix == ".jinja":
                shutil.copyfile(file, path / file.name)
        (path / "config.json").write_text(json.dumps(self.config))
        return path


_COMMON = {"eos_token_id": 2, "pad_token_id": 0, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"}
_LLAMA_8B = _COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
_QWEN_30B = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
SERVED = Model("Llama-3-8B, 8192 tokens", _LLAMA_8B | {"vocab_size": VOCAB_SIZE})
"""With the vocabulary of its tokenizer."""
MODELS = {
    "dense": Model("Llama-3-8B", _LLAMA_8B),
    "fp8": Model("Llama-3-8B, FP8 weights", _LLAMA_8B, {"quantization": "fp8"}, (1, 8, 64)),
    "experts": Model("Qwen3-30B-A3B", _QWEN_30B, batches=(1, 8, 64)),
}


def start(model: Model, path: Path, device: Device) -> Any:
    from argosy_engine import LLM

    return LLM(
        str(path), device=device.torch.type, dtype="bfloat16", load_format="dummy", gpu_memory_utilization=0.85,
        max_model_len=4096, max_num_batched_tokens=PROMPT_TOKENS_PER_STEP, **model.flags,
    )  # fmt: skip


def measure(llm: Any, model: Model, device: Device, bandwidth: float, flops: float) -> Iterator[str]:
    """Yield lines of a table of decodes, and the speed of prompts."""
    context, length = 1024, 64
    yield f"| {model.name}: batch, at {context} tokens | ms per step | tok/s | share of the roofline |"
    yield "|---|---|---|---|"
    for count in model.batches:
        batch = draw_prompts(f"decode {count}", count, context)
        seconds = token_seconds(lambda *run: generate(llm, *run), batch, length, device)
        share = model.step_bytes(count, context + length / 2) / bandwidth / seconds
        yield f"| {count} | {seconds * 1e3:.2f} | {count / seconds:.0f} | {share:.0%} |"
    speeds = []
    for number in range(3):
        batch = draw_prompts(f"prefill {number}", 16, context)
        device.synchronize()
        before = time.perf_counter()
        generate(llm, batch, 1)
        speeds.append(16 * context / (time.perf_counter() - before))
    share = max(speeds) * model.prompt_flops_per_token() / flops
    yield f"\nprompts of {context} tokens: {max(speeds):.0f} tok/s, {share:.0%} of one large product's speed"


def serve(path: Path, rates: tuple[str, ...]) -> Iterator[str]:
    """Start `argosy serve` and measure it with `argosy bench serve`, 512 + 128 tokens per request.

    The model must not have more tokens than its tokenizer: a token without a text reaches the client with the next one.

    Raises:
        RuntimeError: the server ended, or a benchmark failed.
    """
    argosy, port = [sys.executable, "-m", "argosy"], 8471
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("w+") as log:
        server = subprocess.Popen(
            [*argosy, "serve", str(path), "--served-model-name", "random", "--load-format", "dummy", "--device",
             "cuda", "--dtype", "bfloat16", "--max-model-len", "4096", "--port", str(port)],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            while True:
                if server.poll() is not None:
                    raise RuntimeError(f"the server ended: {Path(log.name).read_text()[-400:]}")
                try:
                    urllib.request.urlopen(f"{url}/ready", timeout=5)
                    break
                except OSError:
                    time.sleep(0.2)
            yield "| requests/s asked | requests/s | output tok/s | TTFT p50, p99 ms | TPOT p50 ms | ITL p99 ms |"
            yield "|---|---|---|---|---|---|"
            for seed, rate in enumerate(rates):  # other prompts each time: those of the last run are cached
                yield _bench(argosy, url, path, rate, seed)
        finally:
            server.terminate()
            server.wait(timeout=30)


def _bench(argosy: list[str], url: str, path: Path, rate: str, seed: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*argosy, "bench", "serve", "--base-url", url, "--model", "random", "--tokenizer", str(path),
             "--num-prompts", "256", "--random-input-len", "512", "--random-output-len", "128", "--ignore-eos",
             "--request-rate", rate, "--seed", str(seed), "--save-result", "--result-dir", folder,
             "--result-filename", "result.json"],
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"argosy bench serve failed: {done.stderr[-400:]}")
        found = json.loads((Path(folder) / "result.json").read_text())
    figures = (found[key] for key in ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms"))
    ttft, ttft_p99, tpot, itl = figures
    speed = f"{found['request_throughput']:.1f} | {found['output_throughput']:.0f}"
    return f"| {rate} | {speed} | {ttft:.0f}, {ttft_p99:.0f} | {tpot:.1f} | {itl:.1f} |"
