"""Restores KV: plans what is restored and what computed, and turns stored blocks into a layer's keys and values."""
