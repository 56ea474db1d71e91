"""Portable bits: the same seed gives the same weights on every x86-64 processor with AVX2 (docs/determinism.md).

    pins.py     what is set before torch and numpy are imported, in the driver and in every worker
    library.py  compiles kernels.c, once per machine
    kernels.c   replaces the products and functions of one variable that torch calls in MKL and oneDNN

The package imports neither torch nor numpy, because both read the variables when they are imported.
"""

from rlinf_embodied.portable.pins import describe, is_pinned, pin, require, verify, worker_variables

__all__ = ["describe", "is_pinned", "pin", "require", "verify", "worker_variables"]
