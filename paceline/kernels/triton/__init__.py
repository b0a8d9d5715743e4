"""Kernels for a GPU, in Triton: linear layers, attention, norms, the sampler, and their backward passes."""
