"""PyTorch, imported on first use: a store opens, lists and cleans up without it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or "torch" in sys.modules:
    import torch as torch
else:
    torch = _stand_in = ModuleType("torch", "Stand-in that imports torch when an attribute is read.")

    def _load(name: str) -> Any:
        """Import torch, and replace the stand-in in all modules of this package, so that each calls it only once."""
        import torch as loaded

        for module_name, module in list(sys.modules.items()):
            if module_name.startswith("hf_tiered_cache.") and vars(module).get("torch") is _stand_in:
                module.torch = loaded
        return getattr(loaded, name)

    torch.__getattr__ = _load
