"""The cache that transformers sees, and the execution of its passes."""
