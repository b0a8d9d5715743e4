"""Device-specific operations of the decoder: one implementation of `base.Ops` per kind of device and guarantee.

`native` is exact on CPUs, `gpu` on CUDA devices. `plain` uses torch's own kernels without the guarantee; it is the
readable twin that the tests use as an oracle. A new device takes one implementation and one line in `choose.py`.
"""
