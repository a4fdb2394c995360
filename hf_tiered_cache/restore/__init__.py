"""Restore of stored KV: plans which positions are restored or computed, and copies blocks into keys and values."""
