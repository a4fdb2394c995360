"""Remote tier: what one machine computed, another restores.

A remote is an `ObjectBackend` that several machines share, such as an object store. `entries` finds segments in it by
prefix hashes, `tier` brings them to the local disk, `write_back` sends new ones, and `link` decides whether that pays.
"""
