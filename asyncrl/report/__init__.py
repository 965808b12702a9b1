"""Runs side by side on one page: a file that a browser shows without a network."""
