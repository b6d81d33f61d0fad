"""What models are made of: layers, how their weights are loaded, divided and quantised, and what computes them.

    layer_factory          makes a model's layers from its weights
    norms                  RMSNorm, alone and before a product
    embedding              vectors of tokens
    rope                   frequencies of the rotary embedding
    linear                 linear layers as a model asks for them
    linear_method          how they are loaded and computed
    linear_kernels         ways to store a weight that is not quantised, and to multiply by it
    fp8_linear             linear layers in FP8
    widened_linear         those whose weights are widened at load: FP8 in blocks, MXFP4
    quantization           choice between these
    mlp                    gated MLPs and mixtures of experts, as a model sees them
    experts                the experts' weighted sum, and what computes it
    delta_net              Gated DeltaNets between their projections, and what computes them
    mamba                  Mamba-2 layers between their projections, and what computes them
    short_conv             LFM2's short convolutions between their projections, and what computes them
    causal_conv            the convolution of all three, in plain torch
    token_exchange         tokens of all engine cores, for experts that they share

    layer_kernels          what computes norms and activations
    triton_layer_kernels   the same by our Triton kernels
    layer_self_test        what these must compute on the device before they are used
    layer_compiler         torch.compile of parts of layers
    plain_operations       whether layers call torch rather than our kernels

Must not know: architectures, the scheduler, sampling.
"""
