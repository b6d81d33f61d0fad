"""Sampling: logits processors, and the batched sampler that turns logits into tokens.

sampler              Sampler: the interface, the order of its steps, and the state of each slot
torch_sampler        by torch, and on a CPU by our C++ kernels
topk_topp_sampler    its draw: temperature, min_p, top-k, top-p
logprobs             its log probabilities
kernel_sampler       by our Triton kernels, on GPUs
request_tables       what these kernels read of each request's parameters
sampler_self_test    what they must compute on the device before they are used

logits_processor     interface of logits processors, built-in ones, isolation of custom ones
noise                random numbers as a function of seed and position
token_logprobs       log probabilities on their way to the client; no torch
upload               copies to a device without waiting for it
"""
