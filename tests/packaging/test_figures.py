"""The figures of the README are those of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import mean, median, median_high

ROOT = Path(__file__).parents[2]


def bench(name: str) -> dict:
    return json.loads((ROOT / f"bench/results/{name}.json").read_text())


def evaluated(*folders: str, variant: str) -> list[dict]:
    """Return the results of one variant, one for each task."""
    pages = [json.loads((ROOT / f"eval/results/{folder}/metrics.json").read_text()) for folder in folders]
    return [row for rows in pages for row in rows if row["variant"] == variant]


def at_4096(results: list[dict]) -> dict:
    return next(row for row in results if row["prefix"] == 4096)


def seconds(figure: float) -> str:
    return f"{figure:.2f} s" if figure < 10 else f"{figure:.1f} s"


def mean_of(rows: list[dict], figure: str) -> float:
    return mean(row[figure]["mean"] for row in rows)


def prefix() -> str:
    def figures(name: str) -> tuple[str, str, str, str]:
        disk, recompute, memory = (
            median(at_4096(bench(name)["results"])[key]) for key in ("disk_s", "recompute_s", "dynamic_s")
        )
        ratio = bench(name)["headline"]["recompute / disk at 4k"]
        return seconds(disk), seconds(recompute), f"{ratio:.0f} ×", seconds(memory)

    disk, recompute, ratio, memory = figures("prefix-smollm2-135m-float32-cpu")
    text = f"{disk}, recomputed {recompute} ({ratio}), `DynamicCache` in memory {memory}. "
    disk, recompute, ratio, memory = figures("prefix-qwen2.5-0.5b-float32-cpu")
    return text + f"Shape of Qwen2.5-0.5B: {disk}, {recompute} ({ratio}), {memory}"


def on_a_gpu() -> str:
    rows = map(json.loads, (ROOT / "bench/results/on-gpu-h100.jsonl").read_text().splitlines())
    times: dict[str, list[float]] = {}
    for row in rows:
        if row["stage"] == "prefix qwen2.5-7b" and row.get("prefix") == 16384 and "seconds" in row:
            times.setdefault(row["what"], []).append(row["seconds"])
    host, compute, disk, memory = (median(times[name]) for name in ("host", "computed", "disk", "DynamicCache"))
    return (
        f"{seconds(host)} from host memory, recomputed {seconds(compute)} ({compute / host:.0f} ×), {seconds(disk)} "
        f"from a disk of 1.8 GB/s, `DynamicCache` in memory {seconds(memory)}"
    )


def budget(folder: str, text: str) -> str:
    contiguous, peers = evaluated(folder, variant="contiguous_kv@0.1"), evaluated(folder, variant="h2o@0.1")
    figures = [(f"{mean_of(rows, 'top1'):.0f} %", f"{mean_of(rows, 'kl'):.2f}") for rows in (contiguous, peers)]
    assert f"{mean_of(contiguous, 'brought'):.0f} %" == "10 %"
    return text.format(*figures[0], f"{mean_of(peers, 'brought'):.0f} %", *figures[1])


def passages() -> str:
    folders = [f"real-passages-{task}-smollm2-135m" for task in ("hotpotqa", "musique")]
    tune, blend, epic = (evaluated(*folders, variant=f"{name}@0.3") for name in ("cache_tune", "cache_blend", "epic"))
    return (
        f"`CacheTune` {mean_of(tune, 'kl'):.2f} nats from full recompute, CacheBlend {mean_of(blend, 'kl'):.2f}, "
        f"EPIC {mean_of(epic, 'kl'):.2f}"
    )


def batching() -> str:
    runs = bench("batching-qwen2.5-0.5b-4l-float32-cpu")["runs"]

    def first_token(name: str) -> str:
        return seconds(median_high(figure for run in runs[name] for figure in run["first_token"]))

    def speed(name: str) -> str:
        return f"{median(run['tokens'] / run['seconds'] for run in runs[name]):.0f}"

    return (
        f"first token (median) {first_token('store, warm disk')}, engine alone {first_token('engine alone')}; "
        f"nothing shared: {speed('store, nothing shared')} and {speed('engine alone, nothing shared')} tokens/s"
    )


def remote() -> str:
    requests = at_4096(bench("remote-qwen2.5-0.5b-4l-float32-cpu")["results"])["requests"]
    redis, mooncake, s3, recompute = (
        seconds(median(request["ttft_s"] for request in requests[name]))
        for name in ("redis", "mooncake", "s3", "recompute")
    )
    return f"first token {redis} from Redis, {mooncake} from Mooncake, {s3} from S3; recomputed {recompute}"


def resumed() -> str:
    rates = bench("conversation-smollm2-135m-30l-float32-cpu-host-10")["rates"]

    def first_token(rate: str, system: str) -> float:
        turns = [row["ttft_s"] for row in rates[rate]["rows"] if row["system"] == system and row["history"]]
        return mean(turns)

    systems = ("Krul, int8", "full load, int8", "full load", "full recompute")
    slow, real = ([f"{first_token(rate, system):.2f}" for system in systems] for rate in ("5 MB/s", "the disk"))
    return (
        f"first token {slow[0]} s with `Krul`, {slow[1]} s with int8, {slow[2]} s with all KV loaded, {slow[3]} s "
        f"recomputed; on the real disk {', '.join(real[:3])} and {real[3]} s"
    )


def conversation() -> str:
    kinds = bench("conversation-answers-smollm2-135m-float32")["found"].values()

    def figure(way: str, name: str) -> float:
        return mean(number for kind in kinds for number in kind[way][name])

    int8, front = "int8", "front 0.4 int8"
    return (
        f"{figure(int8, 'storage'):.0f} % of the bytes, {figure(int8, 'KL'):.4f} nats per token; "
        f"{figure(front, 'storage'):.0f} % with a recomputed prefix"
    )


def test_each_measured_figure_is_a_committed_one():
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Measured\n")[1].split("\n## ")[0]
    _, _, *rows = [line for line in table.splitlines() if line.startswith("|")]
    figures = [re.fullmatch(r"\|.*?\|.*?\| (.*?) \(\[all\].*\|", row) for row in rows]
    assert [match and match[1] for match in figures] == [
        prefix(),
        on_a_gpu(),
        budget("real-smollm2-135m", "`ContiguousKV` same first token {}, KL {} nats; H2O, which reads {}, {} and {}"),
        budget("real-qwen2.5-coder-0.5b", "`ContiguousKV` {}, {} nats; H2O, which reads {}, {} and {}"),
        passages(),
        batching(),
        remote(),
        resumed(),
        conversation(),
    ]
