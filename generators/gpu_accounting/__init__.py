"""Counts what a step of the engine does on a GPU, without one: launches, copies, waits and bytes, on fake CUDA tensors.

    fake_device   CUDA tensors without a device, and copies between host and device
    step_trace    records the operations of a step
    traffic       bytes that our kernels read and write
    models        the published configs that are counted
    measurement   builds the engine's runner, runs steps and counts
    __main__      writes the table

Must not know: time. Counts say what a device is asked to do, not how long it takes.
"""
