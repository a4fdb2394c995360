"""The store on disk: segment files, their catalogue, quota and integrity. Knows no policy and no model."""

HASH_BYTES = 16
SCAN_BYTES = 4
EXACT = "exact"
"""Provenance of KV that computing its sequence gives."""
PASSAGE = "passage"
"""Provenance of KV of a passage that was computed alone."""
KEY_FILE_VARIABLE = "HF_TIERED_CACHE_KEY_FILE"
"""The environment variable that names the file of a store's key, for programs that take it on the command line."""
