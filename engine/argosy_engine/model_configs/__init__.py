"""What config.json says about a model, as far as it determines the computation. No torch.

    model_config           what all families have
    llama_config           Llama and what differs from it by its config
    llama_families         what config.json says of each of these
    layer_norm_config      Cohere, Cohere 2, StarCoder 2
    experts_config         mixtures of experts
    qwen3_next_config      Qwen3-Next and Qwen3.5
    mamba_config           Granite 4, Bamba, Falcon-H1 and Nemotron-H
    lfm2_config            LFM2
    gemma_config           Gemma 2 and the text part of Gemma 3
    gemma4_config          the text part of Gemma 4
    deepseek_config        DeepSeek V2 and V3, GLM-4.7-Flash
    gpt2_config            GPT-2
    opt_config             OPT
    transformers_config    decoders of transformers' modelling code
    encoder_config         encoders of transformers' modelling code
    wrapper_config         the text part of a model for images, video or sound
    rope_config            the rotary embedding
    quantization_config    how a checkpoint is quantised
    pooling_spec           what a model computes that is served for pooling

    model_use              the flags that say how a model is used
    sharding               which part of a tensor a tensor-parallel rank takes
    stage                  which layers a pipeline's rank has
    file_permission        the error for files that may not be read

Must not know: weights, layers.
"""
