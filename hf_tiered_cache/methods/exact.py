"""Exact reuse: restore the longest stored prefix, compute the rest."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Method


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """Every layer computes the suffix, and sees every token before it: the output is that of no reuse at all."""
