"""Each family of vLLM's metrics is in our registry, or in a table of docs/observability.md with the reason why not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from argosy_engine import LLM
from argosy_engine.api.observability.metrics import EngineMetrics

TEXT = (Path(__file__).parents[1] / "docs" / "observability.md").read_text()
FAMILIES = re.findall(
    r"\w+",
    """
admission_rejections cache_config_info corrupted_requests diffusion_num_canvas_positions
diffusion_num_committed_tokens diffusion_num_denoising_steps e2e_request_latency_seconds engine_sleep_state
estimated_flops_per_gpu estimated_read_bytes_per_gpu estimated_write_bytes_per_gpu external_prefix_cache_hits
external_prefix_cache_queries generation_tokens hf3fs_load_duration_seconds hf3fs_num_failed_load
hf3fs_num_failed_save hf3fs_save_duration_seconds hisparse_cache_hits hisparse_cache_misses
hisparse_host_block_idle_before_evict_seconds hisparse_host_block_lifetime_seconds
hisparse_host_block_reuse_gap_seconds hisparse_host_cache_usage_perc hisparse_host_to_device_bytes
hisparse_pending_page_transfers inter_token_latency_seconds iteration_tokens_total
kv_block_idle_before_evict_seconds kv_block_lifetime_seconds kv_block_reuse_gap_seconds kv_cache_usage_perc
kv_offload_allocation_failure kv_offload_load_bytes kv_offload_load_time kv_offload_store_bytes
kv_offload_store_time kv_offload_stores_skipped kv_offload_tiering_chunk_hits kv_offload_tiering_chunk_queries
lora_requests_info mm_cache_hits mm_cache_queries mooncake_store_operation mooncake_store_operation_bytes
mooncake_store_operation_failed_keys mooncake_store_operation_keys mooncake_store_operation_time_seconds
nixl_bytes_transferred nixl_num_descriptors nixl_num_failed_notifications nixl_num_failed_transfers
nixl_num_kv_expired_reqs nixl_num_notifications_after_expiry nixl_post_time_seconds nixl_xfer_time_seconds
num_preemptions num_requests_kv_fetch_by_stage num_requests_running num_requests_waiting
num_requests_waiting_by_reason prefix_cache_hits prefix_cache_queries prompt_tokens prompt_tokens_by_source
prompt_tokens_cached prompt_tokens_cached_by_source request_decode_time_seconds request_generation_tokens
request_inference_time_seconds request_max_num_generation_tokens request_num_preemptions
request_params_max_tokens request_params_n request_prefill_kv_computed_tokens request_prefill_time_seconds
request_prompt_tokens request_queue_time_seconds request_success request_time_per_output_token_seconds
rl_weight_update_operation_duration_seconds rl_weight_update_operations_in_flight
simple_kv_offload_info simple_kv_offload_load_blocks simple_kv_offload_pending_store_blocks
simple_kv_offload_save_outcomes simple_kv_offload_used_blocks sleep_mode_operation_duration_seconds
sleep_mode_operations_in_flight spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos
spec_decode_num_draft_tokens spec_decode_num_drafts time_to_first_token_seconds tool_call_parser_invocations
watermark_requests websocket_connection_duration_seconds websocket_connections websocket_connections_active
""",
)
"""Families of vLLM 0.32, without the prefix `vllm:` and without the suffix of counters."""


def left_out() -> list[str]:
    """Return the patterns of the table."""
    (table,) = re.findall(r"\| vLLM's families \|.*?\n\n", TEXT, re.DOTALL)
    return re.findall(r"`vllm:([\w*]+)`", table)


@pytest.fixture(scope="module")
def ours() -> Iterator[set[str]]:
    with LLM(
        "builtin://tiny", device="cpu", threads=1, num_gpu_blocks_override=300, kv_cache_metrics=True
    ) as llm:
        registry = EngineMetrics(llm.config).registry
        yield {
            metric.name.removeprefix("vllm:")
            for metric in registry.collect()
            if metric.name.startswith("vllm:")
        }


def test_every_family_of_vllm_is_there_or_left_out_with_a_reason(ours: set[str]) -> None:
    patterns = left_out()
    unexplained = [
        name for name in FAMILIES if (name in ours) == any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    assert not unexplained, "in neither of the two, or in both"
    assert not [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in FAMILIES)]


def test_no_family_has_vllms_prefix_that_vllm_does_not_have(ours: set[str]) -> None:
    assert ours <= set(FAMILIES)
