"""Array and tensor kernels with a fixed summation order: pure functions that know neither the model nor the engine."""
