"""The number of the native core's ABI. Made by `make core-layout`."""

ABI = 0xC271524F32927280
"""64 bits of a hash over the layouts and signatures that the C sources were written for; a build says its own."""
