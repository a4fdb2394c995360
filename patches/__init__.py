"""Patches of an attached model, and their removal. Importing this package patches nothing."""

from .attach import attach, attachment_of, detach

__all__ = ["attach", "attachment_of", "detach"]
