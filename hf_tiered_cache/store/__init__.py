"""What is on disk: segment files, their catalogue, quota and integrity. Knows no policy and no model."""

LINK_BYTES = 16
EXACT = "exact"
"""Provenance of KV that computing its sequence gives."""
