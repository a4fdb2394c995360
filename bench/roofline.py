"""Lower bound of the time to restore a prefix from each tier, compared with the time to compute it.

    python bench/roofline.py                                        # the table of docs/roofline.md
    python bench/roofline.py --shape qwen2.5-0.5b --prefix 4096
    python bench/roofline.py --h2d 26 --disk 3.2 --peak 312 --hbm 2039    # another machine
    python bench/roofline.py --json

Nothing is measured here. Formulas and the sources of all inputs: docs/roofline.md. `on_gpu.py read` compares measured
times with the roofline, and uses the bandwidths of its probe instead of those assumed here.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from lib.common import SHAPES, vocabulary
from lib.pages import table

from hf_tiered_cache.store.geometry import HASH_TOKENS

GB = 1e9
LONGEST = 1 << 15
"""Maximum number of tokens of a break-even."""
KERNELS = 57
"""Kernels per layer of a warm pass, measured on an H100: 48 with `DynamicCache`, and 9 of this library."""


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a model that determine its computation and its KV."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    dtype_bytes: int = 2

    @classmethod
    def of(cls, name: str, dtype_bytes: int = 2) -> ModelShape:
        """Return the dimensions of a shape in `common.SHAPES`."""
        shape = SHAPES[name]
        return cls(
            name,
            shape["num_hidden_layers"],
            shape["hidden_size"],
            shape["intermediate_size"],
            shape["num_attention_heads"],
            shape["num_key_value_heads"],
            shape["hidden_size"] // shape["num_attention_heads"],
            vocabulary(name),
            dtype_bytes,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def block_parameters(self) -> int:
        """Number of weights that every token uses: projections and MLPs, without embedding and head."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    def flops(self, tokens: int, prefix: int = 0) -> float:
        """Return the operations of a pass of `tokens` after a prefix of `prefix`; the head computes one token."""
        pairs = tokens * prefix + tokens * (tokens + 1) / 2
        attention = 4 * self.layers * self.heads * self.head_dim * pairs
        return 2 * self.block_parameters * tokens + attention + 2 * self.hidden * self.vocabulary

    def pass_bytes(self, positions: int) -> float:
        """Return the bytes that any pass reads from device memory: weights once, and the KV of all positions."""
        head = self.hidden * self.vocabulary
        return (self.block_parameters + head) * self.dtype_bytes + positions * self.token_bytes


@dataclass(frozen=True)
class Machine:
    """Bandwidths in bytes per second, and times in seconds. The defaults are those of docs/roofline.md.

    Args:
        peak: Floating-point operations per second of the device, dense, in the model's data type.
        share: Share of the peak that a long prefill reaches.
        hbm: Bandwidth of device memory.
        h2d: Bandwidth from page-locked host memory to the device.
        page_cache: Bandwidth from the page cache to host memory, all threads.
        disk: Bandwidth of sequential direct reads.
        overhead: Constant time of a restore: hashing, lookup, and latency of the first read.
        launch: Time that the host takes to launch a kernel.
    """

    peak: float = 989.4e12
    share: float = 0.4
    hbm: float = 3.35e12
    h2d: float = 55e9
    page_cache: float = 20e9
    disk: float = 7e9
    overhead: float = 2e-3
    launch: float = 5e-6


def compute_seconds(model: ModelShape, machine: Machine, tokens: int, prefix: int = 0) -> float:
    """Return the time of a pass of `tokens` after `prefix` tokens, limited by arithmetic or by memory bandwidth."""
    arithmetic = model.flops(tokens, prefix) / (machine.peak * machine.share)
    return max(arithmetic, model.pass_bytes(tokens + prefix) / machine.hbm)


def transfer_seconds(model: ModelShape, machine: Machine, tier: str, tokens: int) -> float:
    """Return the time to move a prefix's KV to device memory: the slowest step, since all are concurrent.

    In device memory, each byte is read once and written once.
    """
    nbytes = tokens * model.token_bytes
    steps = [2 * nbytes / machine.hbm]
    if tier != "device":
        steps.append(nbytes / machine.h2d)
    if tier == "page cache":
        steps.append(nbytes / machine.page_cache)
    if tier == "disk":
        steps.append(nbytes / machine.disk)
    return max(steps)


def restored_seconds(
    model: ModelShape, machine: Machine, tier: str, prefix: int, suffix: int, computing: float | None = None
) -> float:
    """Return the time to first token after a restored prefix, whose KV moves while the suffix is computed.

    Args:
        model: Dimensions of the model.
        machine: Bandwidths of the machine.
        tier: Tier that holds the prefix.
        prefix: Number of restored tokens.
        suffix: Number of computed tokens.
        computing: Measured seconds of the suffix after a prefix in device memory, or None to calculate them.
    """
    if computing is None:
        computing = compute_seconds(model, machine, suffix, prefix)
    return max(computing, transfer_seconds(model, machine, tier, prefix))


def reachable_seconds(model: ModelShape, machine: Machine, tier: str, prefix: int, suffix: int) -> float:
    """Return the time to first token that eager PyTorch can reach: the slowest of transfer, kernels and launches.

    Besides the suffix, the device rotates the keys (four passes over them), and repeats the KV heads for the query
    heads: it reads KV once, writes the repeated KV and reads it in attention.
    """
    nbytes = prefix * model.token_bytes
    repeated = nbytes * (2 * model.heads / model.kv_heads if model.heads > model.kv_heads else 0)
    kernels = compute_seconds(model, machine, suffix, prefix) + (2 * nbytes + repeated) / machine.hbm
    launches = model.layers * KERNELS * machine.launch
    return max(transfer_seconds(model, machine, tier, prefix), kernels, launches)


def break_even(model: ModelShape, machine: Machine, tier: str, suffix: int) -> int | None:
    """Return the minimum number of tokens for which a restore is faster than computing; None above LONGEST."""

    def pays(tokens: int) -> bool:
        restore_time = restored_seconds(model, machine, tier, tokens, suffix) + machine.overhead
        return restore_time < compute_seconds(model, machine, tokens + suffix)

    lengths = range(HASH_TOKENS, LONGEST + 1, HASH_TOKENS)
    last = max((tokens for tokens in lengths if not pays(tokens)), default=0)
    return None if last == LONGEST else last + HASH_TOKENS


def places(machine: Machine, disks: list[float]) -> dict[str, tuple[str, Machine]]:
    """Return the tier and the machine of each row of the table."""
    rows = {tier: (tier, machine) for tier in ("device", "host", "page cache")}
    return rows | {f"disk, {disk / GB:g} GB/s": ("disk", replace(machine, disk=disk)) for disk in disks}


def roofline(model: ModelShape, machine: Machine, prefix: int, suffix: int, disks: list[float]) -> dict[str, Any]:
    """Return all figures, JSON-ready."""
    rows = {}
    for name, (tier, at) in places(machine, disks).items():
        rows[name] = {
            "transfer_s": transfer_seconds(model, at, tier, prefix),
            "first_token_s": restored_seconds(model, at, tier, prefix, suffix),
            "reachable_s": reachable_seconds(model, at, tier, prefix, suffix),
            "break_even_tokens": break_even(model, at, tier, suffix),
        }
    return {
        "model": asdict(model),
        "machine": asdict(machine),
        "prefix": prefix,
        "suffix": suffix,
        "kv_bytes": prefix * model.token_bytes,
        "flops": model.flops(prefix + suffix),
        "suffix_s": compute_seconds(model, machine, suffix, prefix),
        "compute_s": {
            f"{share:.0%}": compute_seconds(model, replace(machine, share=share), prefix + suffix)
            for share in sorted({0.25, machine.share, 0.6})
        },
        "tiers": rows,
    }


def report(figures: dict[str, Any]) -> str:
    """Return the figures in Markdown."""
    compute_s = figures["compute_s"][f"{figures['machine']['share']:.0%}"]
    rows = [
        [
            name,
            f"{1e3 * row['transfer_s']:.1f} ms",
            f"{1e3 * row['first_token_s']:.1f} ms",
            f"{1e3 * row['reachable_s']:.1f} ms",
            f"{compute_s / row['first_token_s']:.1f} ×",
            "never" if row["break_even_tokens"] is None else f"{row['break_even_tokens']:,}",
        ]
        for name, row in figures["tiers"].items()
    ]
    computing = ", ".join(f"{1e3 * seconds:.0f} ms at {share}" for share, seconds in figures["compute_s"].items())
    model, tokens, kv_bytes = figures["model"], figures["prefix"], figures["kv_bytes"]
    kv = f"{kv_bytes / 1e6:.1f} MB of KV ({kv_bytes // tokens / 1024:g} KiB per token)"
    return (
        f"{model['name']}, {model['dtype_bytes']} bytes per number, a prefix of {tokens:,} tokens and a suffix of "
        f"{figures['suffix']}: {kv}, {figures['flops'] / 1e12:.0f} TFLOP. Computing everything takes {computing} of "
        f"peak. The suffix alone, after a restored prefix, takes {1e3 * figures['suffix_s']:.1f} ms.\n\n"
        + table(
            ["from", "transfer", "minimum TTFT", "reachable", "computing ÷ minimum", "pays off from (tokens)"], rows
        )
    )


def main() -> None:
    """Compute the minimum time to restore a prefix, and the length from which it pays off. Measures nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", default="qwen2.5-7b", choices=SHAPES, help="shape of the model")
    add("--dtype-bytes", type=int, default=2, help="bytes per number: 2 for bfloat16")
    add("--prefix", type=int, default=16384, help="number of restored tokens")
    add("--suffix", type=int, default=64, help="number of computed tokens after them")
    add("--peak", type=float, default=Machine.peak / 1e12, help="peak TFLOP/s of the device, dense")
    add("--share", type=float, default=Machine.share, help="share of the peak that prefill reaches")
    add("--hbm", type=float, default=Machine.hbm / GB, help="bandwidth of device memory, GB/s")
    add("--h2d", type=float, default=Machine.h2d / GB, help="bandwidth from pinned host memory to the device, GB/s")
    add("--page-cache", type=float, default=Machine.page_cache / GB, help="bandwidth from the page cache, GB/s")
    add("--disk", type=float, action="append", help="bandwidth of a disk, GB/s; can be repeated")
    add("--overhead", type=float, default=Machine.overhead * 1e3, help="constant time of a restore, ms")
    add("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    bandwidths = arguments.hbm * GB, arguments.h2d * GB, arguments.page_cache * GB
    machine = Machine(arguments.peak * 1e12, arguments.share, *bandwidths, overhead=arguments.overhead / 1e3)
    disks = [speed * GB for speed in arguments.disk or (1.5, 7.0, 14.0)]
    figures = roofline(
        ModelShape.of(arguments.shape, arguments.dtype_bytes), machine, arguments.prefix, arguments.suffix, disks
    )
    print(json.dumps(figures, indent=1) if arguments.json else report(figures))


if __name__ == "__main__":
    main()
