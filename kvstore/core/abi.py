"""The number of the native core's ABI. Made by `make core-layout`."""

ABI = 0x04E11863FC6F8EC2
"""64 bits of a hash over the layouts and signatures that the C sources were written for; a build says its own."""
