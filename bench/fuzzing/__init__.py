"""The fuzzer of everything that reads files: `bench/fuzz.py` is its command, `tests/test_fuzz.py` runs a slice."""
