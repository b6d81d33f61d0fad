"""The kernels of Gated DeltaNets against float64, step by step over blocks with stale states."""
