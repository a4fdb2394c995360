"""Continuous batching of transformers with a store."""
