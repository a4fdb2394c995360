"""Model identity: a fingerprint of everything that a model's keys and values depend on, and detection of changes."""

from .fingerprint import Fingerprinter, Identity, differing_facts, fingerprint, fingerprint_of, fingerprinter_of
from .settings import rope_regime, varying_rope

__all__ = [
    "Fingerprinter",
    "Identity",
    "differing_facts",
    "fingerprint",
    "fingerprint_of",
    "fingerprinter_of",
    "rope_regime",
    "varying_rope",
]
