"""What is changed in a model while it is attached, and how it is put back. Nothing here happens at import."""

from .attach import attach, attachment_of, detach

__all__ = ["attach", "attachment_of", "detach"]
