"""On-disk store: segment files with their catalogue, quota and integrity checks. Independent of policies and models.

- Blocks: `geometry` and `shape` cut the KV of a segment into blocks, which `codecs` and `pairs` encode.
- Files: `format` is the segment file. `sidecars` are arrays that belong to a segment, `records` small JSON files of
  `conversations` and `documents`. `container` and `cipher` hold what segments and sidecars share.
- Places: `backend` is the interface. A `folder` (`root`, `tree`, `kinds`) and `objects` (`backends/`) implement it.
- Store: `disk` publishes, finds and opens segments (`segment`), with an `index` (`catalogue`, `database`) and a
  `quota`. The thread of `writer` publishes them, and `engines/` read their blocks.
- Maintenance: `maintain` verifies and cleans up. `relayout` converts segments.
"""

HASH_BYTES = 16
SCAN_BYTES = 4
EXACT = "exact"
"""Provenance of KV that is identical to a full computation of its sequence."""
PASSAGE = "passage"
"""Provenance of KV of a passage that was computed on its own."""
KEY_FILE_VARIABLE = "HF_TIERED_CACHE_KEY_FILE"
"""Environment variable with the path of the store's key file, for programs that accept it on the command line."""


def hashes_of(chain: bytes) -> list[bytes]:
    """Return the prefix hashes that a chain concatenates."""
    return [chain[start : start + HASH_BYTES] for start in range(0, len(chain), HASH_BYTES)]
