"""The device side of the decoder: one implementation of `base.Ops` per kind of device and guarantee.

`native` is exact on CPUs, `gpu` on CUDA devices; `plain` is the library's own kernels, the readable twin the tests use
as an oracle, without the guarantee. Adding a device is one new implementation and one line in `choose.py`.
"""
