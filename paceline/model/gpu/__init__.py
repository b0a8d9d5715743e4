"""The decoder's operations on a GPU, in Triton: kernels, the buffers a step travels in, the graph pool."""
