"""Arithmetic on arrays and tensors with a fixed order of additions: pure functions that know no model and no engine."""
