"""Command lines of `vllm serve` as production-stack's and KServe's examples write them: they parse unchanged, or say
what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy_engine.api import doctor
from argosy_engine.api.serve import build_parser, parse_args
from argosy_engine.model_configs.vision_config import VisionSpec
from argosy_engine.resolved_config import MediaConfig

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
KSERVE = "/mnt/models --served-model-name qwen2-7b --port 8000"
DATA_PARALLEL = (
    f"{KSERVE} --api-server-count {{}} --enable-expert-parallel --tensor-parallel-size 1 --data-parallel-size 2 "
    "--data-parallel-size-local {} --data-parallel-address {} --data-parallel-rpc-port 5555 "
    "--data-parallel-start-rank 0 --trust-remote-code"
)
FLAGS = """
    additional-config aggregate-engine-logging all2all-backend allow-credentials
    allow-deprecated-quantization allowed-headers allowed-local-media-path allowed-media-domains
    allowed-methods allowed-origins anthropic-disabled-thinking-effort api-key api-server-count
    async-scheduling attention-backend attention-config aux-output-config block-size chat-template
    chat-template-content-format code-revision cohere-format cohere-is-reasoning-model
    collect-detailed-traces compilation-config config-format convert cp-kv-cache-interleave-size
    cpu-distributed-timeout-seconds cpu-offload-gb cpu-offload-params cudagraph-capture-sizes
    cudagraph-metrics custom-histogram-buckets data-parallel-address data-parallel-backend
    data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb
    data-parallel-rank data-parallel-rpc-port data-parallel-size data-parallel-size-local
    data-parallel-start-rank data-parallel-supervisor-port dbo-decode-token-threshold
    dbo-prefill-token-threshold dcp-comm-backend dcp-kv-cache-interleave-size dcp-q-replicate
    decode-context-parallel-size default-chat-template-kwargs default-mm-loras device-ids
    device-memory-utilization diffusion-config disable-access-log-for-endpoints disable-cascade-attn
    disable-chunked-mm-input disable-custom-all-reduce disable-fastapi-docs
    disable-hybrid-kv-cache-manager disable-log-stats disable-nccl-for-dp-synchronization
    disable-sliding-window disable-uvicorn-access-log distributed-executor-backend
    distributed-timeout-seconds download-dir dp-supervisor-probe-failure-threshold
    dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s dp-sync-interval dtype
    ec-manager-config ec-transfer-config elastic-ep-max-dp-size enable-auto-tool-choice
    enable-batch-sharded-sampling enable-chunked-prefill enable-cumem-allocator enable-dbo
    enable-elastic-ep enable-ep-weight-filter enable-eplb enable-expert-parallel enable-fault-tolerance
    enable-flash-late-interaction enable-flashinfer-autotune enable-force-include-usage enable-hc-sp
    enable-layerwise-nvtx-tracing enable-log-deltas enable-log-outputs enable-log-requests
    enable-logging-iteration-details enable-lora enable-mamba-cache-stochastic-rounding
    enable-mamba-shared-prefix-checkpoint enable-mfu-metrics enable-mixed-moe-lora-format
    enable-mm-embeds enable-moe-shared-loras enable-nccl-comm-suspend enable-offline-docs
    enable-per-request-metrics enable-prefix-caching enable-prompt-embeds enable-prompt-tokens-details
    enable-request-id-headers enable-return-routed-experts enable-scale-out enable-server-load-tracking
    enable-shm-tensor-arena enable-sleep-mode enable-ssl-refresh enable-tokenizer-info-endpoint
    enable-tower-connector-lora enable-trace-replay enforce-eager engram-config eplb-config
    exclude-tools-when-tool-choice-none expert-placement-strategy fail-on-environ-validation
    fault-tolerance-config fingerprint-mode fingerprint-value fully-sharded-loras gdn-prefill-backend
    generation-config gpu-memory-utilization grpc grpc-port h11-max-header-count
    h11-max-incomplete-event-size headless help hf-config-path hf-overrides hf-token host
    ignore-patterns interleave-mm-strings io-processor-plugin ir-op-priority jit-monitor-mode
    jit-monitor-verbose kda-decode-backend kda-prefill-backend kernel-config kv-cache-dtype
    kv-cache-dtype-skip-layers kv-cache-memory-bytes kv-cache-metrics kv-cache-metrics-sample
    kv-events-config kv-offloading-backend kv-offloading-size kv-sharing-fast-prefill kv-transfer-config
    language-model-only limit-mm-per-prompt linear-backend load-format log-config-file log-error-stack
    log-level logging-config logits-processors logprobs-mode long-prefill-token-threshold
    long-prefill-token-threshold-adaptive lora-dtype lora-modules lora-target-modules mamba-backend
    mamba-block-size mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds mamba-ssm-cache-dtype
    mamba-ssu-algorithm master-addr master-port max-cpu-loras max-cudagraph-capture-size max-log-len
    max-logprobs max-lora-cls-labels max-lora-rank max-loras max-model-len max-num-active-seqs
    max-num-batched-tokens max-num-queued-reqs max-num-queued-tokens max-num-scheduled-tokens
    max-num-seqs max-parallel-loading-workers media-io-kwargs middleware mm-device-do-normalize
    mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path
    mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-encoder-only mm-encoder-tp-mode
    mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-gb mm-processor-cache-type
    mm-processor-device mm-processor-kwargs mm-shm-cache-max-object-size-mb mm-tensor-ipc model
    model-class-overrides model-impl model-loader-extra-config moe-backend nnodes node-rank
    num-gpu-blocks-override numa-bind numa-bind-cpus numa-bind-nodes offload-backend offload-group-size
    offload-num-in-group offload-params offload-prefetch-step optimization-level otlp-traces-endpoint
    override-generation-config per-request-spec-decode-metrics performance-mode pipeline-parallel-size
    pooler-config port prefill-context-parallel-size prefill-schedule-interval
    prefix-cache-retention-interval prefix-caching-hash-algo prefix-match-unit profiler-config
    pt-load-map-location quantization quantization-config ray-workers-use-nsight reasoning-config
    reasoning-parser reasoning-parser-plugin renderer-num-workers replayssm-buffer-len response-role
    return-sampling-mask return-tokens-as-token-ids revision root-path runner safetensors-load-strategy
    safetensors-prefetch-block-size safetensors-prefetch-num-threads scheduler-cls
    scheduler-reserve-full-isl scheduling-policy seed served-model-name show-hidden-metrics-for-version
    shutdown-timeout skip-mm-profiling skip-tokenizer-init sleep-mode-offload-cudagraph
    sleep-preserve-parameter-names sparse-indexer-topk-backend spec-method spec-model spec-tokens
    specialize-active-lora speculative-config sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs
    ssl-certfile ssl-ciphers ssl-keyfile stream-interval structured-outputs-config swa-bounded-replay
    tensor-parallel-size tokenizer tokenizer-mode tokenizer-revision tokens-only tool-call-parser
    tool-parser-plugin tool-server tool-strict-level trust-remote-code trust-request-chat-template
    trust-request-mm-kwargs ubatch-size uds use-fp64-gumbel use-replayssm use-tqdm-on-load
    uvicorn-log-level video-pruning-method video-pruning-rate watermark watermark-config
    weight-transfer-config worker-cls worker-extension-cls
"""
"""All of vLLM 0.32's `vllm serve`."""


def parsed(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, object, str]:
    options, args = parse_args(line.split())
    return options, args, capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "facebook/opt-125m --host 0.0.0.0 --port 8000 --no-enable-prefix-caching",
            {"host": "0.0.0.0", "port": 8000, "enable_prefix_caching": False},
        ),
        (
            f"{LLAMA} --host 0.0.0.0 --port 8000 --enable-auto-tool-choice --tool-call-parser llama3_json "
            "--no-enable-chunked-prefill --enable-prefix-caching --max-model-len 2048 --dtype bfloat16 "
            "--tensor-parallel-size 1 --max-num-seqs 64 --gpu_memory_utilization 0.85 "
            "--chat-template {%for(m)in(messages)%}{{m.content}}{%endfor%}",
            {
                "tool_call_parser": "llama3_json",
                "gpu_memory_utilization": 0.85,
                "dtype": "bfloat16",
                "chat_template": "{%for(m)in(messages)%}{{m.content}}{%endfor%}",
            },
        ),
        (
            "mistralai/Mistral-7B-Instruct-v0.2 --host 0.0.0.0 --port 8000 --max-model-len 4096 --dtype half "
            "--disable-log-requests --swap-space 0 --load-format safetensors",
            {"dtype": "float16", "load_format": "auto"},
        ),
        (
            "ibm-granite/granite-3.0-3b-a800m-instruct --host 0.0.0.0 --port 8000 --enable-sleep-mode "
            "--trust-remote-code --max-num-batched-tokens 8192 --kv-cache-dtype fp8",
            {"kv_cache_dtype": "fp8"},
        ),
        (
            "Qwen/Qwen3-32B --load-format runai_streamer --compilation-config "
            '{"cudagraph_mode":"FULL_AND_PIECEWISE"} --hf-overrides '
            '{"rope_scaling":{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":32768}}',
            {
                "load_format": "auto",
                "hf_overrides": {
                    "rope_scaling": {
                        "rope_type": "yarn",
                        "factor": 4.0,
                        "original_max_position_embeddings": 32768,
                    }
                },
            },
        ),
        (f"{KSERVE} --disable-log-requests", {"served_model_name": ("qwen2-7b",)}),
        (
            f"{KSERVE} --enable-auto-tool-choice --tool-call-parser=qwen3_coder --enable-log-requests "
            '--enable-log-outputs --reasoning-parser qwen3 --reasoning-config {"reasoning_start_str":"<think>"}',
            {"enable_log_requests": True, "reasoning_parser": "qwen3"},
        ),
        (
            f"{KSERVE} --enable-ssl-refresh --ssl-certfile /etc/ssl/certs/tls.crt --ssl-keyfile "
            "/etc/ssl/certs/tls.key --uvicorn-log-level info --disable-uvicorn-access-log",
            {"enable_ssl_refresh": True, "ssl_certfile": "/etc/ssl/certs/tls.crt"},
        ),
        (f"{KSERVE} --middleware a.b --middleware c.d.E", {"middleware": ("a.b", "c.d.E")}),
        (DATA_PARALLEL.format(1, 2, "10.0.0.4"), {"data_parallel_size": 2, "enable_expert_parallel": True}),
        (
            "--port=8080 --served-model-name=opt --model=/mnt/models",
            {"port": 8080, "served_model_name": ("opt",), "model": "/mnt/models"},
        ),
        (
            "/mnt/models --served-model-name llama publishers/ns/models/llama --port 8000 "
            "--disable-access-log-for-endpoints /health,/metrics,/ping --shutdown-timeout 15 --max-model-len -1 "
            "--enforce-eager",
            {
                "served_model_name": ("llama", "publishers/ns/models/llama"),
                "max_model_len": "auto",
                "shutdown_timeout": 15,
            },
        ),
        (
            f"{KSERVE} --tensor-parallel-size=8 --reasoning-parser=qwen3 --disable-cascade-attn -O3 "
            '--model-loader-extra-config {"enable_multithread_load":true,"num_threads":96} '
            '--structured-outputs-config {"backend":"auto"} --mm-processor-cache-gb 0 --language-model-only',
            {"tensor_parallel_size": 8},
        ),
        (
            f"{KSERVE} alias --root-path /models/qwen --uds /tmp/vllm.sock --generation-config vllm "
            '--override-generation-config {"temperature":0.5} --default-chat-template-kwargs '
            '{"enable_thinking":false} --enable-prompt-tokens-details --enable-force-include-usage '
            "--return-tokens-as-token-ids --enable-server-load-tracking --no-enable-lora",
            {"root_path": "/models/qwen", "served_model_name": None, "uds": "/tmp/vllm.sock"},
        ),
    ],
)
def test_a_command_line_of_an_example_parses_unchanged(
    line: str, expected: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    if "alias" in line:
        line = line.replace("--port 8000 alias", "--port 8000").replace("qwen2-7b", "qwen2-7b alias")
        expected = {**expected, "served_model_name": ("qwen2-7b", "alias")}
    options, args, _ = parsed(line, capsys)
    for name, value in expected.items():
        assert getattr(args if hasattr(args, name) else options, name) == value, name


@pytest.mark.parametrize(
    ("line", "model", "keys"),
    [
        ("builtin://tiny --api-key a b --port 1 --api-key c", "builtin://tiny", ("a", "b", "c")),
        ("--api-key a b --model builtin://tiny", "builtin://tiny", ("a", "b")),
        ("--api-key a builtin://tiny", "builtin://tiny", ("a",)),
        ("--api-key a b builtin://tiny --port 1", "builtin://tiny", ("a", "b")),
        ("--api-key a builtin://tiny --api-key b", "builtin://tiny", ("a", "b")),
    ],
)
def test_a_flag_of_keys_takes_several_and_leaves_the_model(
    line: str, model: str, keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """A model behind keys was always the model, unlike in vLLM, which would open the server to its name."""
    options, args, _ = parsed(line, capsys)
    assert (args.model, options.api_key) == (model, keys)


def test_a_single_value_of_a_flag_of_keys_is_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--api-key builtin://tiny", capsys)
    assert "give a model" in capsys.readouterr().err


def test_flags_without_effect_are_named_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, told = parsed("builtin://tiny --disable-log-requests --swap_space=4 --no-enable-lora", capsys)
    assert told.splitlines() == [
        "argosy serve: --disable-log-requests has no effect: requests are logged with --enable-log-requests only",
        "argosy serve: --swap-space has no effect: preempted requests are computed anew",
    ]
    for neutral in ("--node-rank 0 --response-role assistant", "--profiler-config {}"):
        assert parsed(f"builtin://tiny {neutral}", capsys)[2] == ""


def test_flags_of_earlier_versions_without_effect_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "--guided-decoding-backend outlines --num-scheduler-steps 8 --use-v2-block-manager --enable-reasoning "
        "--disable-frontend-multiprocessing --task generate --max-context-len-to-capture 8192"
    )
    _, _, told = parsed(f"builtin://tiny {line}", capsys)
    assert told.count("has no effect") == len(told.splitlines()) == 6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--api-server-count 0", "--api-server-count"),
        ("-asc 65", "--api-server-count"),
        ("--middleware a:b", "--middleware: must be an import path such as"),
        ("--enable-lora --max_loras 4", "--enable-lora is not supported: adapters are not served yet"),
        ("--lora-modules a=b c=d", "--lora-modules is not supported"),
        ("--kv-transfer-config {}", "--kv-transfer-config is not supported: KV caches are not moved"),
        (
            "--data-parallel-size 2 --data-parallel-size-local 1",
            "--data-parallel-size-local is not supported",
        ),
        ("--data-parallel-start-rank 2", "--data-parallel-start-rank is not supported: an engine's cores"),
        ("--model builtin://tiny", "give one model, as argument or with --model"),
        ("--hf-token x", "--hf-token is not supported: the variable HF_TOKEN has the token"),
        ('--rope-scaling {"factor":2}', "--rope-scaling is not supported: use --hf-overrides"),
        ("--rope-theta 1e6", "--rope-theta is not supported: use --hf-overrides"),
        ("--speculative-model x", "--speculative-model is not supported"),
        ("--tokenizer-revision x", "or a directory (--tokenizer)"),
        (
            "-q torchao",
            "torchao is not supported: such weights are not read; leave the flag out to take what config.json says",
        ),
        ("--quantization gguf", "engine.type vllm in an InferenceService, or argosy router --replica"),
        ("--load-format tensorizer", "tensorizer is not supported: weights are read from safetensors files"),
        ("--kv-cache-dtype fp8_e5m2", "fp8_e5m2 is not supported: keys and values in 8 bits are fp8 (e4m3)"),
        ('--profiler-config {"profiler":"torch"}', "--profiler-config is not supported"),
        ("--stream-interval 0", "--stream-interval: must be"),
        ("--tokenizer-mode slow", "there is one implementation of each; leave the flag out"),
        ("--ssl-certfile a", "--ssl-certfile and --ssl-keyfile need each other"),
        ("--enable-ssl-refresh", "--enable-ssl-refresh needs --ssl-certfile"),
        ("--chat-template /no/such.jinja", "--chat-template /no/such.jinja cannot be read"),
        ("--generation-config /no/such", "cannot read /no/such/generation_config.json"),
        ('--override-generation-config {"temperature":9}', "--override-generation-config"),
        ('--override-generation-config {"top":9}', "unknown field `top`"),
        ("--default-chat-template-kwargs nope", "--default-chat-template-kwargs is not JSON"),
        ("--root-path models", "--root-path: must begin with / and have no ?, # or white space"),
        ("--warm-up-from host:8000", "--warm-up-from: must be a URL such as http://HOST:PORT"),
        ("--swap_spaces 4", "unknown argument --swap_spaces; did you mean --swap-space?"),
        ("--custom-histogram-buckets 1 2", "--custom-histogram-buckets is not supported: the buckets are"),
        ("--guided-decoding-disable-any-whitespace", "is not supported: grammars allow white space in JSON"),
        ("-dpl 2", "--data-parallel-size-local is not supported"),
        ("--structured-outputs-config {", "--structured-outputs-config is not a JSON object: '{'"),
        ("--structured-outputs-config []", "--structured-outputs-config is not a JSON object: '[]'"),
        (
            '--structured-outputs-config {"disable_any_whitespace":true}',
            "disable_any_whitespace is not supported: grammars allow white space in JSON; a request forbids it",
        ),
        (
            '--structured-outputs-config {"enable_in_reasoning":true}',
            "enable_in_reasoning is not supported: a grammar applies to what follows the reasoning; turn",
        ),
        (
            "--structured-outputs-config.disable_additional_properties true",
            "disable_additional_properties is not supported",
        ),
        (
            '--structured-outputs-config {"whitespace":0}',
            "there is no whitespace, but backend, reasoning_parser",
        ),
        ('--structured-outputs-config {"backend":"x"}', "backend must be one of auto, xgrammar, guidance"),
        ('--structured-outputs-config {"reasoning_parser":"x"}', "--reasoning-parser"),
        ('--structured-outputs-config {"reasoning_parser":[1]}', "reasoning_parser must be a name"),
        ("--cudagraph-capture-sizes 1 x", "--cudagraph-capture-sizes: must be 1 to 256 whole numbers from 1"),
        ("--max-cudagraph-capture-size 0", "--max-cudagraph-capture-size: must be a whole number from 1"),
        (
            "--cudagraph-capture-sizes 1 -cc.cudagraph_capture_sizes+ 2",
            "cudagraph_capture_sizes of --compilation-config are the same: give one",
        ),
        (
            "--cudagraph-capture-sizes 1 2 --max-cudagraph-capture-size 4",
            "--max-cudagraph-capture-size 4 is not the largest of the sizes to capture, 2",
        ),
        (
            "--max-num-seqs 4096 --max-cudagraph-capture-size 8192",
            "sizes are too many; give them, by --cudagraph-capture-sizes",
        ),
    ],
)
def test_what_is_missing_is_refused_by_name(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse_args(["builtin://tiny", *flags.split()])
    error = capsys.readouterr().err
    assert left.value.code == 2
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "name", "told"),
    [
        ('{"reasoning_parser":"deepseek_r1","backend":"xgrammar"}', "deepseek_r1", ""),
        ('{"reasoning_parser":"deepseek_r1"} --reasoning-parser qwen3', "qwen3", ""),
        ('{"disable_any_whitespace":false,"backend":"auto","reasoning_parser":""}', None, ""),
        ('{"backend":"guidance"}', None, "backend has no effect: there is one backend of grammars, xgrammar"),
    ],
)
def test_a_config_of_structured_outputs_is_read_by_key(
    flags: str, name: str | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, args, printed = parsed(f"builtin://tiny --structured-outputs-config {flags}", capsys)
    assert getattr(args, "reasoning_parser") == name  # noqa: B009
    assert printed == (f"argosy serve: --structured-outputs-config: {told}\n" if told else "")


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("--cudagraph-capture-sizes 4 2 1", (4, 2, 1)),
        ("--cudagraph-capture-sizes 2 4 --max-cudagraph-capture-size 4", (2, 4)),
        ("--max-cudagraph-capture-size 4 -cc.cudagraph_capture_sizes+ 2,4", (2, 4)),
        ("--max-cudagraph-capture-size 20", (1, 2, 4, 8, 16, 20)),
        ("--max-cudagraph-capture-size 256", ()),
        ("--max-cudagraph-capture-size 512 --max-num-seqs 12", ()),
    ],
)
def test_sizes_to_capture_are_part_of_the_compilation_config(
    flags: str, sizes: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    _, args = parse_args(f"builtin://tiny {flags}".split())
    assert args.compilation_config.cudagraph_capture_sizes == sizes
    assert capsys.readouterr().err == ""


def test_sizes_to_capture_may_exceed_the_default_s() -> None:
    _, args = parse_args(["m", "--max-num-seqs", "1000", "--max-cudagraph-capture-size", "600"])
    assert args.compilation_config.cudagraph_capture_sizes[-3:] == (576, 592, 600)


def test_flags_have_vllm_s_short_forms() -> None:
    assert parse_args(["m", "-ep"])[1].enable_expert_parallel
    parser = build_parser()
    parser.parse_args(
        [
            "m",
            *[
                "-dpn",
                "0",
                "-dpr",
                "0",
                "-dpl",
                "1",
                "-dpa",
                "a",
                "-dpp",
                "1",
                "-dpb",
                "mp",
                "-ac",
                "{}",
                "-dc",
                "{}",
                "-sc",
                "{}",
            ],
        ]
    )
    parser.parse_args(["m", "-dph", "-dpe", "-dpm"])


def test_every_flag_of_vllm_is_known() -> None:
    known = build_parser().flag_names
    assert [flag for flag in FLAGS.split() if f"--{flag}" not in known] == []


def test_a_model_of_the_command_line_wins_over_the_file_s(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: builtin://other\n")
    for line in (["builtin://tiny"], ["--model", "builtin://tiny"]):
        assert parse_args([*line, "--config", str(file)])[1].model == "builtin://tiny"
    assert parse_args(["--config", str(file)])[1].model == "builtin://other"


def test_a_file_of_flags_takes_those_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: builtin://tiny\nswap-space: 4\ndisable_log_requests: true\napi-server-count: 1\n")
    parse_args(["--config", str(file)])
    assert "--swap-space has no effect" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "told"), [
    (["--limit-mm-per-prompt", "image=4,video=0"], "--limit-mm-per-prompt is not JSON"),
    (["--limit-mm-per-prompt", '{"image": -1}'], "image must be a whole number from 0 to 4096"),
    (["--limit-mm-per-prompt", '{"image": true}'], "image must be a whole number from 0 to 4096"),
    (["--limit-mm-per-prompt.picture", "1"], "there is no 'picture', but image, video and audio"),
    (["--media-io-kwargs", '{"image": {"rgba_background_color": [0, 0, 256]}}'], "three whole numbers from 0 to 255"),
    (["--media-io-kwargs", '{"image": {"num_frames": 3}}'], "there is no 'num_frames' of images"),
    (["--media-io-kwargs", '{"image": 3}'], "must have an object for image"),
    (["--allowed-local-media-path", "/no/such/directory"], "is no directory of this machine"),
    (["--allowed-media-domains", "https://example.com"], "--allowed-media-domains"),
])  # fmt: skip
def test_flags_for_images_are_checked(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["builtin://tiny", *flags])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_flags_for_images_are_vllms(tmp_path: Path) -> None:
    vision = VisionSpec(fields='{"model_type": "llava"}', image_token_id=3)

    def media(*flags: str) -> MediaConfig:
        return parse_args(["builtin://tiny", *flags])[1].media_config(vision)

    found = media(
        *(
            "--limit-mm-per-prompt",
            '{"image": {"count": 2, "width": 640}, "video": 1}',
            "--mm-processor-cache-gb=2",
        ),
        *(
            "--mm-processor-kwargs.max_pixels",
            "5000",
            "--media-io-kwargs.image.rgba_background_color",
            "[0,0,0]",
        ),
        *("--allowed-media-domains", "example.com", "[2001:db8::1]:80", "--trust-request-mm-kwargs"),
        *("--allowed-local-media-path", str(tmp_path)),
    )
    assert found == MediaConfig(
        vision=vision, max_images=2, cache_bytes=2 << 30, processor_kwargs={"max_pixels": 5000},
        background=(0, 0, 0), allowed_domains=("example.com", "[2001:db8::1]:80"), trusts_request_kwargs=True,
        allowed_path=str(tmp_path),
    )  # fmt: skip
    assert found.model_type == "llava"
    settings = [media(*flags).setting() for flags in ([], ["--mm-processor-kwargs.max_pixels", "5000"])]
    assert not settings[0]
    assert len({*settings, found.setting()}) == 3  # replicas with the same one continue each other's streams
    for flags in (["--language-model-only"], ["--limit-mm-per-prompt.image=0"]):
        assert media(*flags).vision is None
        assert media(*flags).why_blind == flags[0].partition(".")[0]


def test_keys_behind_a_dot_are_json() -> None:
    line = (
        f"{LLAMA} --override-generation-config.temperature 0.5 --limit-mm-per-prompt.image 0 -cc.mode 3 "
        "--compilation_config.cudagraph_mode=NONE --structured-outputs-config.backend xgrammar -O.level=2 "
        "--attention-backend TRITON_ATTN"
    )
    _, args = parse_args(line.split())
    assert args.request_defaults.override_generation_config.temperature == 0.5
    assert (args.compilation_config.level, args.compilation_config.cudagraph_mode) == (3, "NONE")
    assert args.attention_backend == "triton"


def test_doctor_takes_the_command_line_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert build_parser().flag_names - doctor.build_parser().flag_names == frozenset()
    line = "builtin://tiny --device cpu --port 8000 --api-key k --trust-remote-code --config-format auto"
    assert doctor.main(line.split()) == 0
    notice = capsys.readouterr().err
    assert notice.endswith(
        "argosy doctor: --trust-remote-code has no effect: a checkpoint's code is never run; its model runs on "
        "argosy's own code or on transformers'\n"
    )
    with pytest.raises(SystemExit) as ended:
        doctor.main(["builtin://tiny", "--skip-tokenizer-init"])
    assert ended.value.code == 2
    assert "--skip-tokenizer-init is not supported: there are no endpoints" in capsys.readouterr().err
