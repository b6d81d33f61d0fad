"""A model's folder: which files it has, whether they are whole, and how tensors are read from them.

    model_path             from `builtin://NAME` or `file://PATH` to a folder
    folder_check           files that are missing or damaged
    tokenizer_files        what the tokenizer is read from; converts what is no tokenizer.json
    tokenizer_conversion   the program that converts; imports transformers or mistral-common
    checkpoint_shards      the files of the weights; no torch
    safetensors_header     names, shapes and offsets of their tensors; no torch
    byte_ranges            where a tensor, or a rank's part of it, lies in a file; no torch
    fingerprint            digest that equal replicas have in common

    weights                where a model's constructor takes its tensors from
    streamed_weights       tensors on their way from files to a GPU
    staged_reader          threads that read files ahead

Must not know: layers, what is computed with the tensors.
"""
