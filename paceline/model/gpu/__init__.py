"""Memory on a GPU: keys and values, and the static buffers that a step travels in."""
