"""Attention of our own, registered beside the implementations of transformers."""
