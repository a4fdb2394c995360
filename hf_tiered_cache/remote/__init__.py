"""Remote tier: what one machine computed, another restores.

A remote is an `ObjectBackend` that several machines share, such as an object store. `entries` finds segments in it by
prefix hashes, `link` looks prompts up and measures, `tier` brings segments to the local disk if that pays, and
`write_back` sends new ones.
"""
