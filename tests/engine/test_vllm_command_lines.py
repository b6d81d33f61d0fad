"""Command lines of `vllm serve` as production-stack's and KServe's examples write them: they parse unchanged, or say
what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy_engine.api.serve import parse_args

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
KSERVE = "/mnt/models --served-model-name qwen2-7b --port 8000"
DATA_PARALLEL = (
    f"{KSERVE} --api-server-count {{}} --enable-expert-parallel --tensor-parallel-size 1 --data-parallel-size 2 "
    "--data-parallel-size-local {} --data-parallel-address {} --data-parallel-start-rank 0 --trust-remote-code"
)


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
        (DATA_PARALLEL.format(1, 2, "localhost"), {"data_parallel_size": 2, "enable_expert_parallel": True}),
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


def test_flags_without_effect_are_named_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, told = parsed("builtin://tiny --disable-log-requests --swap_space=4 --no-enable-lora", capsys)
    assert told.splitlines() == [
        "argosy serve: --disable-log-requests has no effect: requests are logged with --enable-log-requests only",
        "argosy serve: --swap-space has no effect: preempted requests are computed anew",
    ]
    assert parsed("builtin://tiny --node-rank 0 --response-role assistant", capsys)[2] == ""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--api-server-count 0", "--api-server-count"),
        ("-asc 65", "--api-server-count"),
        ("--middleware a:b", "--middleware: "),
        ("--enable-lora --max_loras 4", "--enable-lora is not supported: adapters are not served yet"),
        ("--lora-modules a=b c=d", "--lora-modules is not supported"),
        ("--kv-transfer-config {}", "--kv-transfer-config is not supported: KV caches are not moved"),
        (
            "--data-parallel-size 2 --data-parallel-size-local 1",
            "--data-parallel-size-local is not supported",
        ),
        ("--data-parallel-address 10.0.0.1", "--data-parallel-address is not supported: an engine's cores"),
        ("--tokenizer-mode slow", "--tokenizer-mode is not supported"),
        ("--ssl-certfile a", "--ssl-certfile and --ssl-keyfile need each other"),
        ("--enable-ssl-refresh", "--enable-ssl-refresh needs --ssl-certfile"),
        ("--chat-template /no/such.jinja", "--chat-template /no/such.jinja cannot be read"),
        ("--generation-config /no/such", "cannot read /no/such/generation_config.json"),
        ('--override-generation-config {"temperature":9}', "--override-generation-config"),
        ('--override-generation-config {"top":9}', "unknown field `top`"),
        ("--default-chat-template-kwargs nope", "--default-chat-template-kwargs is not JSON"),
        ("--root-path models", "--root-path"),
        ("--swap_spaces 4", "unknown argument --swap_spaces; did you mean --swap-space?"),
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


def test_a_file_of_flags_takes_those_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: builtin://tiny\nswap-space: 4\ndisable_log_requests: true\napi-server-count: 1\n")
    parse_args(["--config", str(file)])
    assert "--swap-space has no effect" in capsys.readouterr().err
