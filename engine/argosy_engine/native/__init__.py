"""Our own CPU kernels: C++ sources, their build on first use, and bindings. Optional: without them torch computes."""
