"""The number of the native core's ABI. Made by `make core-layout`."""

ABI = 0x63D4C489B60BFC3B
"""64 bits of a hash over the layouts and signatures that the C sources were written for; a build says its own."""
