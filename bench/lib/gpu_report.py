"""Report on the rows of `on_gpu.py`: tables of medians, and each time as a share of the roofline."""

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
    """Return the page in Markdown."""
    stages: dict[str, Rows] = defaultdict(list)
    for row in rows:
        stages[row["stage"].split()[0]].append(row)
    measured_rows = {
        name: [row for row in stage_rows if not _is_skip(row) and row["what"] != "done"]
        for name, stage_rows in stages.items()
    }
    machine, assumed = machine_of(measured_rows.get("probe", []))
    parts = [
        _machine(measured_rows.get("probe", [])),
        _probe(measured_rows.get("probe", [])),
        _tests(measured_rows.get("tests", [])),
        _prefixes(measured_rows.get("prefix", []) + measured_rows.get("kvikio", []), machine, assumed),
        _decoding(measured_rows.get("decode", [])),
        _syncs(measured_rows.get("syncs", [])),
        _trace(measured_rows.get("trace", [])),
        _times("Within a budget of 5 %", measured_rows.get("selective", []), "recompute"),
        _times("Passages in a prompt", measured_rows.get("passages", []), "full recompute"),
        _skipped(rows),
    ]
    return "\n".join(part for part in parts if part)


def machine_of(rows: Rows) -> tuple[Machine, str]:
    """Return the roofline's machine with the measured bandwidths, and the names of those that are assumed."""
    labels = {"h2d": "H2D, pinned", "hbm": "copy in device memory"}
    values: dict[str, float] = {}
    for name, label in labels.items():
        if speeds := _all(rows, label, "bytes_per_s"):
            values[name] = median(speeds)
    for name, label_prefix in (("disk", "disk, O_DIRECT"), ("page_cache", "disk, page cache")):
        if speeds := [row["bytes_per_s"] for row in rows if row["what"].startswith(label_prefix)]:
            values[name] = median(speeds)
    device = next((row["device"] for row in rows if row["what"] == "machine"), "")
    if device == "CPU":  # nothing to cross, and its memory in the place of the device's
        values |= {"h2d": float("inf"), "hbm": 2 * median(_all(rows, "copy in host memory", "bytes_per_s") or [1e10])}
    if not any(name in device for name in ("H100", "H200")):
        values["peak"] = float("inf")
    assumed = [name for name in ("h2d", "hbm", "disk", "page_cache") if name not in values]
    return replace(Machine(), **values), ", ".join(assumed)


def _all(rows: Rows, label: str, key: str) -> list[float]:
    return [row[key] for row in rows if row["what"] == label and key in row]


def _groups(rows: Rows, *keys: str) -> dict[tuple[Any, ...], Rows]:
    groups: dict[tuple[Any, ...], Rows] = defaultdict(list)
    for row in rows:
        groups[tuple(row.get(key) for key in keys)].append(row)
    return groups


def _ms(values: Iterable[float]) -> str:
    return f"{1e3 * median(values):.2f} ms"


def _machine(rows: Rows) -> str:
    info = next((row for row in rows if row["what"] == "machine"), None)
    if info is None:
        return "# Run without a probe\n"
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in info["packages"].items())
    return (
        f"# Measured on {info['device']}\n\n{info['cpu']}, {info['cores']} cores, "
        f"{info['ram_bytes'] / 2**30:.0f} GiB of memory, {info['file_system']}; {info['date']}, "
        f"commit {info['commit']}. Python {info['python']}, CUDA "
        f"{info['cuda']}, driver {info['driver']}, nvidia-fs {'loaded' if info['nvidia_fs'] else 'not loaded'}; "
        f"{packages}. Random weights. Medians.\n"
    )


def _probe(rows: Rows) -> str:
    lines = []
    for (label,), samples in _groups([row for row in rows if "seconds" in row], "what").items():
        speed = median(row.get("bytes_per_s") or row["flops_per_s"] for row in samples)
        speed_text = f"{speed / 1e9:.2f} GB/s" if "bytes_per_s" in samples[0] else f"{speed / 1e12:.0f} TFLOP/s"
        lines.append([label, speed_text, _ms(row["seconds"] for row in samples), str(len(samples))])
    return "## Probe\n\n" + table(["", "speed", "time", "n"], lines) if lines else ""


def _tests(rows: Rows) -> str:
    counts = next((row for row in rows if row["what"] == "tests/gpu"), None)
    if counts is None:
        return ""
    summary = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "error", "skipped") if name in counts)
    failed = "".join(f"- {row['test']}\n" for row in rows if row["what"] == "failed test")
    return f"## tests/gpu\n\n{summary or 'no test was run'}\n\n{failed}"


def _prefixes(rows: Rows, machine: Machine, assumed: str) -> str:
    lines = []
    for (shape, dtype, prefix), group_rows in sorted(_groups(rows, "shape", "dtype", "prefix").items()):
        model, rows_by_label = ModelShape.of(shape, _BYTES[dtype]), _groups(group_rows, "what")
        times = {label: [row["seconds"] for row in group] for (label,), group in rows_by_label.items()}
        for label, samples in sorted(times.items(), key=lambda item: -median(item[1])):
            bound = _least(model, machine, label, prefix, group_rows[0]["suffix"], dtype, times)
            lines.append([
                f"{shape}, {prefix}: {label}",
                _ms(samples),
                f"{1e3 * min(samples):.2f} – {1e3 * max(samples):.2f}",
                str(len(samples)),
                "–" if "computed" not in times else f"{median(times['computed']) / median(samples):.1f} ×",
                "–" if bound is None else f"{1e3 * bound:.2f} ms",
                "–" if bound is None else f"{bound / median(samples):.0%}",
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
    model: ModelShape, machine: Machine, label: str, prefix: int, suffix: int, dtype: str, times: dict[str, list[float]]
) -> float | None:
    """Return the roofline of one variant in seconds, or None."""
    if label == "DynamicCache":
        return None
    if label == "computed":
        has_peak = dtype != "float32" and machine.peak < float("inf")
        return compute_seconds(model, replace(machine, share=1.0), prefix + suffix) if has_peak else None
    tier = _TIERS.get(label, "disk")
    computing = median(times["DynamicCache"]) if "DynamicCache" in times else None
    return restored_seconds(model, machine, tier, prefix, suffix, computing)


def _decoding(rows: Rows) -> str:
    lines = []
    for (shape, prefix, attention), group_rows in _groups(rows, "shape", "prefix", "attention").items():
        tiered, dynamic = (_all(group_rows, label, "seconds") for label in ("ours", "DynamicCache"))
        turns = min(len(tiered), len(dynamic))
        if turns:
            relative = ratio(tiered[:turns], dynamic[:turns])
            lines.append([f"{shape}, {prefix}, {attention}", _ms(tiered), _ms(dynamic), f"{relative:.3f}", str(turns)])
    return (
        "## Time of a decoded token\n\n"
        + table(["shape, prefix, attention", "ours", "DynamicCache", "ratio", "n"], lines)
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
    recompute_times = [
        row["seconds"] for (label,), group_rows in groups.items() if label.startswith(slowest) for row in group_rows
    ]
    lines = [
        [
            label,
            _ms(row["seconds"] for row in group_rows),
            "–"
            if not recompute_times
            else f"{median(recompute_times) / median(row['seconds'] for row in group_rows):.2f} ×",
            str(len(group_rows)),
        ]
        for (label,), group_rows in groups.items()
    ]
    first_row = rows[0]
    settings = ", ".join(
        f"{name} {first_row[name]}" for name in ("shape", "dtype", "prefixes", "prefix", "tokens") if name in first_row
    )
    return f"## {heading}\n\n{settings}.\n\n" + table(["", "time to first token", "recompute ÷ it", "n"], lines)


def _is_skip(row: dict[str, Any]) -> bool:
    """Return whether a row says why something was not measured; a count of skipped tests is a number."""
    return isinstance(row.get("skipped"), str)


def _skipped(rows: Rows) -> str:
    finished_stages = {row["stage"] for row in rows if row["what"] == "done"}
    started_stages = {row["stage"] for row in rows} - {"run"}
    lines = [f"- {row['stage']}, {row['what']}: {row['skipped']}" for row in rows if _is_skip(row)]
    reported_stages = {row["stage"] for row in rows if _is_skip(row) and row["what"] in ("the rest", "all of it")}
    lines += [
        f"- {stage}: the run ended in this stage"
        for stage in sorted(started_stages - finished_stages - reported_stages)
    ]
    return "## Not measured\n\n" + "\n".join(dict.fromkeys(lines)) + "\n" if lines else ""
