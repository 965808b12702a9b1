"""Advantages, losses, corrections and aggregations: plain functions, found by name in a registry."""
