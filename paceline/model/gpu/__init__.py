"""GPU memory: keys and values, and the static buffers of a step's input."""
