"""Model architectures: the forward pass over flattened tokens, made of `layers` from a `checkpoint`.

    registry               architectures by their name in config.json
    decoder                what llama, qwen3_next, mamba_hybrid, lfm2 and deepseek have in common
    llama                  Llama and what differs from it by its config: Qwen, Mistral, GLM, gpt-oss, ...
    layer_norm_decoder     Cohere, Cohere 2, StarCoder 2
    qwen3_next             Qwen3-Next and Qwen3.5
    mamba_hybrid           Granite 4, Bamba and Falcon-H1
    nemotron_h             Nemotron-H and Nemotron 3
    lfm2                   LFM2, with experts or without
    gemma                  Gemma 2 and the text part of Gemma 3
    gemma4                 the text part of Gemma 4
    deepseek               DeepSeek V2 and V3, GLM-4.7-Flash
    gpt2, opt              GPT-2, OPT
    gpt2_layers            layers of these two

    transformers_model     any other decoder, by transformers' modelling code
    transformers_attention the function by which it computes attention
    transformers_classes   which class of transformers' is a checkpoint's, and what of it is served
    transformers_follow    finds out what it computes before anything is loaded
    transformers_plan      divides it among ranks by transformers' own plan
    transformers_weights   its checkpoint, quantised or not, by transformers' loader
    transformers_states    what its layers keep that have states
    transformers_encoder   encoders such as BERT, for embeddings and labels
    transformers_probe     holds it against transformers' own attention before it is served

    pooled_model           a decoder of ours without its output head, for embeddings and labels

    config_file            reads and checks config.json
    pooling_file           finds out whether a checkpoint pools, and how
    fetch_check            refuses a model before it is fetched
    loader                 plans, checks and reads the weights

Must not know: the scheduler, sampling.
"""
