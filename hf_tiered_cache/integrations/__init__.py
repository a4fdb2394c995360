"""Integrations of the store into other programs, one file each; their dependencies are installed with extras."""
