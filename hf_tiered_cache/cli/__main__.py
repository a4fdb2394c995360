"""Entry point of `python -m hf_tiered_cache.cli`."""

from . import main

if __name__ == "__main__":
    main()
