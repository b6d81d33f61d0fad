"""CPU kernels: C++ sources, their build on first use, and bindings. Optional: without them the engine uses torch."""
