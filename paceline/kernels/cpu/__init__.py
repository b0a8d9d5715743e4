"""Kernels for a CPU, compiled by numba: linear layers, attention, norms, the sampler."""
