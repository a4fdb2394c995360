"""Patches of an attached model, and how they are undone. Nothing here happens at import."""

from .attach import attach, attachment_of, detach

__all__ = ["attach", "attachment_of", "detach"]
