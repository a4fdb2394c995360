"""Remote tier: what one machine computed, another restores.

A remote is an `ObjectBackend` that several machines share, such as an object store. `link` finds segments in it by
prefix hashes and measures it, `tier` brings them to the local disk if that pays, and `write_back` sends new ones.
"""
