"""`python -m hf_tiered_cache.cli`."""

from . import main

main()
