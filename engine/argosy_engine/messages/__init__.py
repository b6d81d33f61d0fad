"""Messages between client, engine core and workers: the contract that both sides of each read. No torch.

core_messages        client <-> core: requests, outputs, statistics, utility calls
handshake            client <-> core's process, while it starts
scheduler_output     core -> worker: a scheduled step
model_runner_output  worker -> core: what the step has sampled
worker_info          worker -> core: model, device and memory
collective_rpc       client -> core -> worker: a call of a method of every worker
sleep_levels         client -> core: how deep to sleep
"""
