"""Flags of `vllm bench` without a setting here, so that its command lines run unchanged or name what is missing.

Owns: the lists of each benchmark. Must not know: how such flags are parsed (`argosy_engine.vllm_flags`).
"""

from __future__ import annotations

from argosy_engine.vllm_flags import VllmFlag

_TRUST = VllmFlag("trust-remote-code", "a checkpoint's code is never run; the engine's own model is", True)
_MODE = VllmFlag("tokenizer-mode", "a model's tokenizer.json is read in one way")
_PROFILE = VllmFlag("profile", "there is no profiler; see the engine's metrics", True)
_HUB = "data sets are not fetched; give a file, by --dataset-name custom or sharegpt"

SERVE_WITHOUT_EFFECT = (
    _TRUST,
    _MODE,
    VllmFlag("no-stream", "files are read whole", True),
    VllmFlag("enable-multimodal-chat", "prompts are texts", True),
    VllmFlag("custom-ensure-client-side-data", "prompts are texts", True),
)
SERVE_REFUSED = (
    _PROFILE,
    VllmFlag(
        "use-beam-search", 'the server searches: --extra-body \'{"use_beam_search": true, "n": 4}\'', True
    ),
    VllmFlag("self-timed", "traces are not replayed here; argosy bench router --replay does", True),
    VllmFlag("probe-request-rate", "run a second client beside this one", neutral=("0", "0.0")),
    VllmFlag("plot-dataset-stats", "--save-detailed has the lengths", True),
    VllmFlag("hf-subset", _HUB),
    VllmFlag("hf-split", _HUB),
    VllmFlag("hf-name", _HUB),
    VllmFlag("hf-output-len", _HUB),
)
OFFLINE_WITHOUT_EFFECT = (
    VllmFlag("async-engine", "the engine's core steps by itself either way", True),
    VllmFlag("prequeue-requests", "all prompts are queued before the first step", True),
    VllmFlag("enable-multimodal-chat", "prompts are texts", True),
)
OFFLINE_REFUSED = (
    _PROFILE,
    VllmFlag("disable-detokenize", "outputs always become text, as servers send it", True),
    VllmFlag("lora-path", "adapters are not served yet; serve the merged model"),
    VllmFlag("hf-subset", _HUB),
    VllmFlag("hf-split", _HUB),
)
