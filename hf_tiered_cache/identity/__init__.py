"""Who made this KV: a name for everything that a model's keys and values depend on, and a watch over it."""

from .fingerprint import Fingerprinter, Identity, differing_facts, fingerprint
from .rope import rope_regime, varying_rope

__all__ = ["Fingerprinter", "Identity", "differing_facts", "fingerprint", "rope_regime", "varying_rope"]
