"""Model architectures: configuration, weights, and the forward pass over flattened tokens.

    registry               architectures by their name in config.json
    model_config           what of config.json determines the computation; no torch
    llama, llama_config    Llama, Mistral, Qwen2 and Qwen3
    qwen3_moe              Qwen3-MoE; its config is in llama_config
    gemma, gemma_config    Gemma 2 and the text part of Gemma 3
    gpt2, gpt2_config      GPT-2
    opt, opt_config        OPT

    layer_factory          makes a model's layers from its weights
    layers                 RMSNorm, alone and before a product
    gpt2_layers            layers of GPT-2 and OPT
    embedding              vectors of tokens
    rope, rope_config      frequencies of the rotary embedding
    moe                    router and experts as a model sees them
    experts                the experts' weighted sum, and what computes it
    token_exchange         tokens of all engine cores, for experts that they share
    linear                 linear layers as a model asks for them
    linear_method          how they are loaded and computed
    linear_kernels         ways to store a weight that is not quantised, and to multiply by it
    fp8_linear             linear layers in FP8
    quantization           choice between these
    quantization_config    how a checkpoint is quantised; no torch
    layer_kernels          what computes norms and activations
    triton_layer_kernels   the same by our Triton kernels
    layer_self_test        what these must compute on the device before they are used

    sharding               which part of a tensor a tensor-parallel rank takes; no torch
    stage                  which layers a pipeline's rank has; no torch

    model_path             from `builtin://NAME` or `file://PATH` to a folder
    config_file            reads and checks config.json
    fetch_check            refuses a model before it is fetched
    folder_check           files that are missing or damaged
    file_permission        the error for files that may not be read
    fingerprint            digest that equal replicas have in common

    loader                 plans, checks and reads the weights
    checkpoint             the files of a checkpoint
    safetensors_header     names, shapes and offsets of its tensors; no torch
    byte_ranges            where a tensor, or a rank's part of it, lies in a file; no torch
    weights                where a model's constructor takes its tensors from
    streamed_weights       tensors on their way from files to a GPU
    staged_reader          threads that read files ahead

Must not know: the scheduler, sampling.
"""
