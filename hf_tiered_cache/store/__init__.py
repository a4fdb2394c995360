"""The store on disk: segment files, their catalogue, quota and integrity. Knows no policy and no model."""

HASH_BYTES = 16
EXACT = "exact"
"""Provenance of KV that computing its sequence gives."""
KEY_FILE_VARIABLE = "HF_TIERED_CACHE_KEY_FILE"
"""The environment variable that names the file of a store's key, for programs that take it on the command line."""
