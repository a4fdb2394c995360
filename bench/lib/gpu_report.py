"""What the rows of `on_gpu.py` say: tables with medians, and each time as a share of the roofline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lib.common import median, ratio
from lib.pages import table
from roofline import Machine, ModelShape, compute_seconds, restored_seconds

Rows = list[dict[str, Any]]
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_TIERS = {"device": "device", "host": "host", "page cache": "page cache"}


def report(rows: Rows) -> str:
    """The page."""
    stages: dict[str, Rows] = defaultdict(list)
    for row in rows:
        stages[row["stage"].split()[0]].append(row)
    measured = {
        name: [row for row in some if "skipped" not in row and row["what"] != "done"] for name, some in stages.items()
    }
    machine, told = machine_of(measured.get("probe", []))
    parts = [
        _machine(measured.get("probe", [])),
        _probe(measured.get("probe", [])),
        _tests(measured.get("tests", [])),
        _prefixes(measured.get("prefix", []) + measured.get("kvikio", []), machine, told),
        _decoding(measured.get("decode", [])),
        _syncs(measured.get("syncs", [])),
        _trace(measured.get("trace", [])),
        _times("Within a budget of 5 %", measured.get("selective", []), "recompute"),
        _times("Passages in a prompt", measured.get("passages", []), "full recompute"),
        _skipped(rows),
    ]
    return "\n".join(part for part in parts if part)


def machine_of(rows: Rows) -> tuple[Machine, str]:
    """The roofline's machine, with what the probe measured in place of what is assumed; and which that is."""
    named = {"h2d": "H2D, pinned", "hbm": "copy in device memory"}
    found: dict[str, float] = {}
    for name, what in named.items():
        if speeds := _all(rows, what, "bytes_per_s"):
            found[name] = median(speeds)
    for name, begins in (("disk", "disk, O_DIRECT"), ("page_cache", "disk, page cache")):
        if speeds := [row["bytes_per_s"] for row in rows if row["what"].startswith(begins)]:
            found[name] = median(speeds)
    device = next((row["device"] for row in rows if row["what"] == "machine"), "")
    if device == "CPU":  # nothing to cross, and its memory in the place of the device's
        found |= {"h2d": float("inf"), "hbm": 2 * median(_all(rows, "copy in host memory", "bytes_per_s") or [1e10])}
    if not any(name in device for name in ("H100", "H200")):
        found["peak"] = float("inf")
    assumed = [name for name in ("h2d", "hbm", "disk", "page_cache") if name not in found]
    return replace(Machine(), **found), ", ".join(assumed)


def _all(rows: Rows, what: str, key: str) -> list[float]:
    return [row[key] for row in rows if row["what"] == what and key in row]


def _groups(rows: Rows, *keys: str) -> dict[tuple[Any, ...], Rows]:
    found: dict[tuple[Any, ...], Rows] = defaultdict(list)
    for row in rows:
        found[tuple(row.get(key) for key in keys)].append(row)
    return found


def _ms(values: Iterable[float]) -> str:
    return f"{1e3 * median(values):.2f} ms"


def _machine(rows: Rows) -> str:
    found = next((row for row in rows if row["what"] == "machine"), None)
    if found is None:
        return "# Run without a probe\n"
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in found["packages"].items())
    return (
        f"# Measured on {found['device']}\n\n{found['cpu']}, {found['cores']} cores, "
        f"{found['ram_bytes'] / 2**30:.0f} GiB of memory, {found['file_system']}; {found['date']}, "
        f"commit {found['commit']}. Python {found['python']}, CUDA "
        f"{found['cuda']}, driver {found['driver']}, nvidia-fs {'loaded' if found['nvidia_fs'] else 'not loaded'}; "
        f"{packages}. Random weights. Medians.\n"
    )


def _probe(rows: Rows) -> str:
    lines = []
    for (what,), some in _groups([row for row in rows if "seconds" in row], "what").items():
        speed = median(row.get("bytes_per_s") or row["flops_per_s"] for row in some)
        shown = f"{speed / 1e9:.2f} GB/s" if "bytes_per_s" in some[0] else f"{speed / 1e12:.0f} TFLOP/s"
        lines.append([what, shown, _ms(row["seconds"] for row in some), str(len(some))])
    return "## Probe\n\n" + table(["", "speed", "time", "n"], lines) if lines else ""


def _tests(rows: Rows) -> str:
    counts = next((row for row in rows if row["what"] == "tests/gpu"), None)
    if counts is None:
        return ""
    said = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "error", "skipped") if name in counts)
    failed = "".join(f"- {row['test']}\n" for row in rows if row["what"] == "failed test")
    return f"## tests/gpu\n\n{said or 'no test was run'}\n\n{failed}"


def _prefixes(rows: Rows, machine: Machine, assumed: str) -> str:
    lines = []
    for (shape, dtype, prefix), some in sorted(_groups(rows, "shape", "dtype", "prefix").items()):
        model, ways = ModelShape.of(shape, _BYTES[dtype]), _groups(some, "what")
        times = {what: [row["seconds"] for row in group] for (what,), group in ways.items()}
        for what, taken in sorted(times.items(), key=lambda item: -median(item[1])):
            least = _least(model, machine, what, prefix, some[0]["suffix"], dtype, times)
            lines.append([
                f"{shape}, {prefix}: {what}",
                _ms(taken),
                f"{1e3 * min(taken):.2f} – {1e3 * max(taken):.2f}",
                str(len(taken)),
                "–" if "computed" not in times else f"{median(times['computed']) / median(taken):.1f} ×",
                "–" if least is None else f"{1e3 * least:.2f} ms",
                "–" if least is None else f"{least / median(taken):.0%}",
            ])  # fmt: skip
    if not lines:
        return ""
    inputs = f" (assumed, because the probe did not measure it: {assumed})" if assumed else ""
    return (
        "## Time to first token after a prefix\n\n"
        + table(
            ["shape, prefix: from", "median", "range, ms", "n", "computed ÷ it", "roofline", "share of roofline"], lines
        )
        + "\nThe roofline of a restore is the maximum of two times: moving its KV with the probe's bandwidths"
        + f"{inputs}, and the time with a DynamicCache. That of *computed* uses the peak (docs/roofline.md).\n"
    )


def _least(
    model: ModelShape, machine: Machine, what: str, prefix: int, suffix: int, dtype: str, times: dict[str, list[float]]
) -> float | None:
    """The roofline of one way, in seconds, or None."""
    if what == "DynamicCache":
        return None
    if what == "computed":
        known = dtype != "float32" and machine.peak < float("inf")
        return compute_seconds(model, replace(machine, share=1.0), prefix + suffix) if known else None
    tier = _TIERS.get(what, "disk")
    computing = median(times["DynamicCache"]) if "DynamicCache" in times else None
    return restored_seconds(model, machine, tier, prefix, suffix, computing)


def _decoding(rows: Rows) -> str:
    lines = []
    for (shape, prefix), some in _groups(rows, "shape", "prefix").items():
        ours, theirs = (_all(some, what, "seconds") for what in ("ours", "DynamicCache"))
        turns = min(len(ours), len(theirs))
        if turns:
            over = ratio(ours[:turns], theirs[:turns])
            lines.append([f"{shape}, {prefix}", _ms(ours), _ms(theirs), f"{over:.3f}", str(turns)])
    return (
        "## Time of a decoded token\n\n" + table(["shape, prefix", "ours", "DynamicCache", "ratio", "n"], lines)
        if lines
        else ""
    )


def _syncs(rows: Rows) -> str:
    totals = [row for row in rows if "layers" in row]
    if not totals:
        return ""
    lines = [[row["what"], str(row["count"]), str(row["layers"])] for row in totals]
    sites = [[row["what"].removesuffix(", site"), row["site"], str(row["count"])] for row in rows if "site" in row]
    kind = (
        "from the warnings of CUDA"
        if totals[0]["kind"] == "_sync_sites"
        else "counted on the CPU, as in tests/restore/test_waits.py"
    )
    return (
        f"## Waits for the GPU, {kind}\n\n"
        + table(["", "waits", "layers"], lines)
        + ("\n" + table(["", "call site", "waits"], sites) if sites else "")
    )


def _trace(rows: Rows) -> str:
    lines = [
        [row["what"], str(row["kernels"]), str(row["copies"]), str(row["operations"]), str(row["layers"])]
        for row in rows
    ]
    return (
        "## Profile of a warm pass\n\n" + table(["", "kernels", "copies", "operations", "layers"], lines)
        if lines
        else ""
    )


def _times(heading: str, rows: Rows, slowest: str) -> str:
    groups = _groups(rows, "what")
    if not groups:
        return ""
    full = [row["seconds"] for (what,), some in groups.items() if what.startswith(slowest) for row in some]
    lines = [
        [
            what,
            _ms(row["seconds"] for row in some),
            "–" if not full else f"{median(full) / median(row['seconds'] for row in some):.2f} ×",
            str(len(some)),
        ]
        for (what,), some in groups.items()
    ]
    about = rows[0]
    known = ", ".join(
        f"{name} {about[name]}" for name in ("shape", "dtype", "prefixes", "prefix", "tokens") if name in about
    )
    return f"## {heading}\n\n{known}.\n\n" + table(["", "time to first token", "recompute ÷ it", "n"], lines)


def _skipped(rows: Rows) -> str:
    done = {row["stage"] for row in rows if row["what"] == "done"}
    begun = {row["stage"] for row in rows} - {"run"}
    lines = [f"- {row['stage']}, {row['what']}: {row['skipped']}" for row in rows if "skipped" in row]
    told = {row["stage"] for row in rows if row.get("skipped") and row["what"] in ("the rest", "all of it")}
    lines += [f"- {stage}: the run ended in this stage" for stage in sorted(begun - done - told)]
    return "## Not measured\n\n" + "\n".join(dict.fromkeys(lines)) + "\n" if lines else ""
