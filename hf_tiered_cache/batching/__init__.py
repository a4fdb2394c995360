"""Continuous batching of transformers with a store behind its pages."""
