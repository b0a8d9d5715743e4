"""GPU kernels in Triton: linear layers, attention, norms, the sampler, and their backward passes."""
