"""The number of the native core's ABI. Made by `make core-layout`."""

ABI = 0xD42CD19415287F88
"""64 bits of a hash over the layouts and signatures that the C sources were written for; a build says its own."""
