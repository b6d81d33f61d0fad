"""Benchmarks of a user's own: `argosy bench serve`, `throughput` and `latency`, with vLLM's flags and results.

bench_serve            argosy bench serve: the command, from its flags to the result
serve_args             its flags
endpoint_check         finds the model, and explains a wrong address, key or name before the load
load_generator         sends the requests as the arrivals say, and limits how many run at once
arrivals               when each request is sent
endpoint_request       request bodies, and what an answer is timed by
streaming_http         keep-alive HTTP connections that cost little CPU
bench_throughput       argosy bench throughput
bench_latency          argosy bench latency
offline_command        what these two have in common
vllm_bench_flags       flags of vLLM's that have no setting here
run_progress           a bar on a terminal, lines elsewhere
serving_metrics        TTFT, TPOT, ITL, E2EL, throughput, goodput
serving_report         the printed table
result_file            the JSON document, and where it is saved
plot                   the measurements as one HTML page

prompt_datasets        random, prefix_repetition, sharegpt and custom prompts
dataset_args           their flags
prompt_alignment       cuts them to their length in the server's tokens
prompt_tokenizer       tokens of prompts, with the model's tokenizer or without
benchmark_error        the error of all commands
"""
