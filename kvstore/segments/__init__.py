"""Segment log (placeholder)."""
