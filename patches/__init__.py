"""Patches of an attached model, and their removal. Importing this package patches nothing."""
