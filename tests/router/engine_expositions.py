"""Metrics of vLLM and SGLang in the text format, with the load that they state."""

from __future__ import annotations

from argosy_router.fleet.foreign_engines import PRIOR_PROMPT_TOKENS, EngineLoad


def vllm(
    *,
    running: int = 0,
    waiting: int = 0,
    usage: float = 0.0,
    looked_up: int = 0,
    found: int = 0,
    rank: int = 0,
) -> bytes:
    """The part that counts, between series that only look alike."""
    labels = f'{{engine="{rank}",model_name="a}}\\"b"}}'
    return f"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{labels} {running}.0
vllm:num_requests_waiting{labels} {waiting}.0
vllm:num_requests_waiting_by_reason{{engine="{rank}",reason="capacity"}} 77.0
vllm:kv_cache_usage_perc{labels} {usage}
vllm:prefix_cache_queries_total{labels} {looked_up}.0
vllm:prefix_cache_hits_total{labels} {found}.0
vllm:prefix_cache_queries_created{labels} 1.7e+09
vllm:request_prompt_tokens_bucket{{engine="{rank}",le="1.0"}} 3.0
vllm:request_prompt_tokens_count{labels} 4.0
vllm:request_prompt_tokens_sum{labels} 2e+03
python_gc_objects_collected_total{{generation="0"}} 1.0
""".encode()


SGLANG = b"""# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 5.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 2.0
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.28
sglang:num_requests_total{model_name="m"} 10.0
sglang:prompt_tokens_total{model_name="m"} 8e+03
sglang:cached_tokens_total{cache_source="device",model_name="m"} 5000.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 1000.0
"""

EXPOSITIONS = {
    "vLLM": (
        vllm(running=3, waiting=2, usage=0.5, looked_up=100, found=75),
        EngineLoad(3, 2, 0.5, 250, 100.0),
    ),
    "vLLM with data parallelism": (
        vllm(running=3, waiting=1, usage=0.2, looked_up=10) + vllm(rank=1, running=4, waiting=2, usage=0.4),
        EngineLoad(7, 3, 0.3, 1500, 10.0),
    ),
    "vLLM before it finished a prompt": (
        b"vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n",
        EngineLoad(1, 2, 0.0, int(2 * PRIOR_PROMPT_TOKENS), 0.0),
    ),
    "vLLM V0": (
        b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\nvllm:gpu_cache_usage_perc 0.25\n",
        EngineLoad(1, 0, 0.25, 0, 0.0),
    ),
    "SGLang": (SGLANG, EngineLoad(5, 2, 0.28, 400, 8000.0)),
    "values nobody can use": (
        b"vllm:num_requests_running NaN\nvllm:num_requests_running 2\nvllm:num_requests_waiting +Inf\n"
        b"vllm:kv_cache_usage_perc -1\nvllm:num_requests_waiting many\nvllm:kv_cache_usage_perc 7\n",
        EngineLoad(2, 0, 1.0, 0, 0.0),
    ),
    "another program": (b"http_requests_total 5\n", None),
    "no exposition": (b"\xff\xfe<html>", None),
    "nothing": (b"", None),
}
