"""CPU kernels, compiled by numba: linear layers, attention, norms, the sampler."""
