"""Reuse of passages anywhere in a prompt (CacheTune): search, rankings and reports."""
