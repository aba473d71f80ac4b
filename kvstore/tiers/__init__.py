"""Tiers below the arena, each bounded, each behind the contract in :mod:`kvstore.tiers.tier`."""
