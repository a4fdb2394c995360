"""Similarity of the attention of layers, by which layers of a conversation share KV (Krul)."""
