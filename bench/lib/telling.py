"""Sentences and tables that pages about selective re-prefill share: workload, disk, memory, first requests."""

from __future__ import annotations

from typing import Any

from lib.pages import table

MIB = 1 << 20


def disk_and_memory(result: dict[str, Any]) -> str:
    """Format `Bench.described()` as sentences."""
    speed = result["disk_bytes_per_second"]
    disk = "the real disk" if speed == "real" else f"an emulated disk of {speed / 1e6:.0f} MB/s"
    return f"{workload_and_memory(result)}; {disk}. {calibrated(result)} {result['prompts']}"


def workload_and_memory(result: dict[str, Any]) -> str:
    """Format workload and memory, which are the same on any disk, without a full stop."""
    return (
        f"{result['prefixes']} prefixes of {result['prefix_tokens']} tokens, {result['kv_bytes'] / MIB:.0f} MiB of KV, "
        f"{sum(result['memory_bytes'].values()) / MIB:.1f} MiB of memory for KV and indexes; "
        f"{result['requests']['measured']} requests after {result['requests']['warm_up']} requests of warm-up"
    )


def calibrated(result: dict[str, Any]) -> str:
    """Describe the disk that is equivalent to the paper's, by both calibrations, in a sentence."""
    bulk, suffix = (result["calibration"][name] for name in ("bulk", "suffix"))
    return (
        f"Computing a token takes {1e3 * bulk['token_s']:.3g} ms in the bulk prefill of a prefix, and "
        f"{1e3 * suffix['token_s']:.3g} ms in a suffix of {result['suffix_tokens']} tokens. The ratio of loading to "
        f"computing equals that of the paper's machine at {bulk['bytes_per_second'] / 1e6:.3g} MB/s (bulk prefill) or "
        f"{suffix['bytes_per_second'] / 1e6:.3g} MB/s (suffix)."
    )


def memory_cell(row: dict[str, Any]) -> str:
    """Format a system's memory in MiB, "blocks + index"."""
    memory = row["memory_bytes"]
    index = f" + {memory['index'] / MIB:.1f}" if memory["index"] else ""
    return f"{(memory['device'] + memory['host']) / MIB:.1f}{index}"


def first_requests(systems: dict[str, dict[str, Any]]) -> str:
    """Format a table of the first request to each prefix, and of the time of later identification."""
    return table(
        ["system", "TTFT, ms", "MiB read", "scoring", "identification, ms", "identification later, ms"],
        [[name, *first_cells(row)] for name, row in systems.items()],
    )


def first_cells(row: dict[str, Any]) -> list[str]:
    """Format a system's cells of the table of first requests."""
    first, parts = row["first"], row["parts"]
    later_wait = parts["identify_wait_s"] + parts["identify_s"]
    return [
        f"{1e3 * first['ttft_mean_s']:.0f}",
        *(f"{first[name] / MIB:.2f}" for name in ("bytes_read", "bytes_identifying")),
        *(f"{1e3 * duration:.1f}" for duration in (first["identify_s"], later_wait)),
    ]
