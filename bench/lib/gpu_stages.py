"""Stages of `on_gpu.py` after its probe: one function per stage, one row per measurement."""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import rag
import reprefill
import torch
from lib import serving
from lib.common import build, first_token, forget_page_cache, interleaved, seconds
from lib.gpu_probe import device_of
from lib.gpu_run import TESTS, TRACE, Run, die_with_parent
from lib.workload import RandomTokens
from transformers import DynamicCache, PreTrainedModel

import hf_tiered_cache
from eval.baselines import Recompute
from hf_tiered_cache import EngineUnavailableError, KVStore, TieredCache
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import ContiguousKV, Exact, Method
from hf_tiered_cache.store.engines import Engine, PosixEngine, open_engine

SUFFIX = 64
TRACE_BYTES = 8 << 20
ROOT = Path(__file__).parents[2]
_PACKAGE = Path(hf_tiered_cache.__file__).parent


# --- tests/gpu


def gpu_tests(run: Run) -> None:
    """Run tests/gpu: bits, tiers, streams, engines."""
    if importlib.util.find_spec("pytest") is None:
        return run.skip("tests/gpu", "pytest is not installed")
    if device_of(run).type != "cuda":
        return run.skip("tests/gpu", "no GPU")
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", str(ROOT / "tests/gpu")]
    if importlib.util.find_spec("hypothesis") is None:  # what tests/gpu itself does not need
        command.append("--noconftest")
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", "8"]
    path = run.out / TESTS
    with open(path, "w") as file:
        try:
            subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=file, timeout=max(1.0, run.left()), preexec_fn=die_with_parent
            )
        except subprocess.TimeoutExpired:
            run.skip("tests that were left", "their time was over")
    text = path.read_text()
    lines = re.findall(r"^(?:\[gw\d+\] \[ *\d+%\] ([A-Z]+) \S+::|\S+::.* ([A-Z]+) +\[)", text, re.M)
    counts = Counter(before or after for before, after in lines)
    run.row("tests/gpu", **{name.lower(): count for name, count in counts.items()})
    for name in re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M):
        run.row("failed test", test=name)
    if len(text) > TRACE_BYTES // 8:
        path.write_text(text[: TRACE_BYTES // 16] + "\n[...]\n" + text[-TRACE_BYTES // 16 :])


# --- prefixes


class Prefix:
    """Model and prefix, stored on disk and available as a DynamicCache."""

    def __init__(self, run: Run, model: PreTrainedModel, tokens: int, method: Method | None = None) -> None:
        self.run, self.model, self.tokens, self.method = run, model, tokens, method or Exact()
        random = torch.Generator().manual_seed(tokens)
        ids = torch.randint(1, model.config.vocab_size, (1, tokens + SUFFIX), generator=random).to(model.device)
        self.document, self.ids = ids[:, :tokens], ids
        self.path = run.folder / f"{type(self.method).__name__}-{tokens}"
        with KVStore(self.path, host_memory=0, disk_quota=run.disk_bytes) as store:
            store.precompute(model, self.document, method=self.method, progress=False)
            rows = store.segments()
        self.segments, self.kv_bytes = [row.id for row in rows], sum(row.nbytes for row in rows)

    def dynamic(self) -> DynamicCache:
        """Return a DynamicCache with the prefix."""
        cache = DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(input_ids=self.document, past_key_values=cache, logits_to_keep=1)
        return cache

    def cropped(self, cache: DynamicCache) -> DynamicCache:
        """Crop a DynamicCache to the prefix, and return it."""
        cache.crop(min(0, self.tokens - cache.get_seq_length()))
        return cache

    def store(self, *, device: bool = False, host: bool = False, engine: str | Engine = "posix") -> KVStore:
        """Open the store with memory for the whole prefix in the given tiers."""
        memory = 2 * self.kv_bytes + (64 << 20)
        sizes = {"device_memory": memory * device, "host_memory": memory * host}
        return KVStore(self.path, engine=engine, policy=self.method.policy, **sizes)

    def cache(self, store: KVStore) -> TieredCache:
        return TieredCache(self.model, store, method=self.method, record=False)

    def restored(self, store: KVStore) -> dict[str, Any]:
        """Restore the prefix, and return the time to the first token with its counters."""
        caches: list[TieredCache] = []
        took = first_token(self.model, self.ids, lambda: caches.append(self.cache(store)) or caches[0])
        stats = caches[0].stats
        if stats.tokens_restored < self.tokens // 16 * 16:
            raise RuntimeError(f"{stats.tokens_restored} of {self.tokens} tokens were restored: {stats.reason}")
        return {"seconds": took, "tier": stats.tier, "bytes_read": stats.bytes_read, "stall_s": stats.stall_seconds}

    def cold(self, store: KVStore, page_cache: bool = False) -> dict[str, Any]:
        """Restore from files, with tiers that keep their memory but no blocks of the prefix."""
        storage_of(store).residency.forget(self.segments)
        forget_page_cache(self.path)
        if page_cache:
            for file in self.path.rglob("*"):
                if file.is_file():
                    file.read_bytes()
        return self.restored(store)


def prefixes(run: Run, shape: str) -> None:
    """Measure TTFT after a prefix: computed, with a DynamicCache, and restored from each tier."""
    _each_prefix(run, shape, _ways)


def kvikio(run: Run) -> None:
    """Measure TTFT from a cold disk with kvikio and posix, separately, since kvikio can hang when it opens files."""
    try:
        open_engine("kvikio").close()
    except EngineUnavailableError as error:
        return run.skip("kvikio", str(error))
    _each_prefix(run, run.shapes[0], _ways_of_kvikio)


def _each_prefix(run: Run, shape: str, ways: Callable[..., dict[str, Callable[[], dict[str, Any]]]]) -> None:
    model = build(shape, getattr(torch, run.dtype), device_of(run))
    token_bytes = _token_bytes(model)
    for tokens in run.prefixes:
        run.check()
        settings = {"shape": shape, "dtype": run.dtype, "prefix": tokens, "suffix": SUFFIX}
        if not run.fits("prefix", int(1.2 * tokens * token_bytes), **settings):
            continue
        prefix = Prefix(run, model, tokens)
        settings["kv_bytes"] = prefix.kv_bytes
        with ExitStack() as stack:

            def note(label: str, figures: dict[str, Any], settings: dict[str, Any] = settings) -> None:
                run.row(label, **settings, **figures)

            actions = {label: _until(run, action) for label, action in ways(prefix, stack, settings).items()}
            interleaved(actions, run.turns, note=note)
        forget_page_cache(prefix.path)


def _ways(prefix: Prefix, stack: ExitStack, settings: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the actions by label. Report those that this machine does not support as skipped."""
    dynamic = prefix.dynamic()

    def timed(make: Callable[[], Any]) -> dict[str, Any]:
        return {"seconds": first_token(prefix.model, prefix.ids, make)}

    def opened_for_it() -> dict[str, Any]:
        forget_page_cache(prefix.path)
        with prefix.store(host=True) as store:
            return prefix.restored(store)

    host = stack.enter_context(prefix.store(host=True))
    disk = stack.enter_context(prefix.store(host=True))
    pages = stack.enter_context(prefix.store(host=True, engine=PosixEngine(direct=False)))
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "computed": lambda: timed(lambda: DynamicCache(config=prefix.model.config)),
        "DynamicCache": lambda: timed(lambda: prefix.cropped(dynamic)),
        "host": lambda: prefix.restored(host),
        "page cache": lambda: prefix.cold(pages, page_cache=True),
        "disk": lambda: prefix.cold(disk),
        "disk, store opened for it": opened_for_it,
    }
    if prefix.model.device.type == "cuda":
        device = stack.enter_context(prefix.store(device=True))
        ways["device"] = lambda: prefix.restored(device)
    else:
        prefix.run.skip("device", "no GPU", **settings)
    return ways


def _ways_of_kvikio(
    prefix: Prefix, stack: ExitStack, settings: dict[str, Any]
) -> dict[str, Callable[[], dict[str, Any]]]:
    kvikio_store = stack.enter_context(prefix.store(device=True, host=True, engine="kvikio"))
    posix_store = stack.enter_context(prefix.store(device=True, host=True))
    engine = kvikio_store._storage.disk.backend.reads_with
    return {
        f"disk, {engine}": lambda: prefix.cold(kvikio_store),
        "disk, posix beside it": lambda: prefix.cold(posix_store),
    }


def _until(run: Run, action: Callable[[], Any]) -> Callable[[], Any]:
    def checked() -> Any:
        run.check()
        return action()

    return checked


def _token_bytes(model: PreTrainedModel) -> int:
    config = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads
    return numbers * config.hidden_size // config.num_attention_heads * model.dtype.itemsize


# --- decoding


def decoding(run: Run) -> None:
    """Measure decoding after the same prefix, with TieredCache and DynamicCache in turns.

    cuDNN's attention, which PyTorch prefers on some GPUs, builds a plan for each number of keys. So it is measured with
    and without it.
    """
    for shape in run.shapes:
        model = build(shape, getattr(torch, run.dtype), device_of(run))
        for attention in ("default", "without cuDNN")[: 1 + (model.device.type == "cuda")]:
            torch.backends.cuda.enable_cudnn_sdp(attention == "default")
            _decode(run, model, shape, attention)


def _decode(run: Run, model: PreTrainedModel, shape: str, attention: str) -> None:
    prefix = Prefix(run, model, min(run.prefixes))
    with prefix.store(host=True) as store, torch.no_grad():
        tiered, dynamic = prefix.cache(store), prefix.dynamic()
        model(input_ids=prefix.ids, past_key_values=tiered, logits_to_keep=1)
        model(input_ids=prefix.ids[:, prefix.tokens :], past_key_values=dynamic, logits_to_keep=1)
        settings = {"shape": shape, "dtype": run.dtype, "prefix": prefix.tokens, "attention": attention}

        def step(cache: Any) -> float:
            return seconds(lambda: model(input_ids=prefix.ids[:, :1], past_key_values=cache), model.device)

        def note(label: str, duration: float) -> None:
            run.row(label, seconds=duration, **settings)

        ways = {"ours": partial(step, tiered), "DynamicCache": partial(step, dynamic)}
        interleaved({label: _until(run, way) for label, way in ways.items()}, 8 * run.turns, 4, note)


# --- what waits, and what runs


@contextmanager
def _sync_sites() -> Iterator[Counter]:
    """Count the operations that wait for the GPU, by the call site in this library or in transformers."""
    sites: Counter = Counter()

    def note(message: Warning | str, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA" in str(message):
            sites[_site()] += 1

    debug_mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield sites
        finally:
            torch.cuda.set_sync_debug_mode(debug_mode)


def _site() -> str:
    frames = [frame for frame in traceback.extract_stack() if frame.filename not in (__file__, warnings.__file__)]
    package_folders = (str(_PACKAGE), str(ROOT / "patches"))
    inner_frames = [frame for frame in frames if frame.filename.startswith(package_folders)] or frames[-2:]
    later_frames = frames[frames.index(inner_frames[-1]) + 1 :]
    if any("/transformers/" in frame.filename for frame in later_frames):  # the model's own, which we only called
        inner_frames = [frame for frame in later_frames if "/transformers/" in frame.filename]
    return f"{'/'.join(Path(inner_frames[-1].filename).parts[-2:])}:{inner_frames[-1].lineno} {inner_frames[-1].name}"


@contextmanager
def _cpu_sites() -> Iterator[Counter]:
    """Count operations that would wait on a GPU, as in tests/restore/test_waits.py."""
    sys.path += [str(ROOT / "tests" / folder) for folder in ("lib", "restore")]
    from test_waits import Waits

    sites: Counter = Counter()
    with Waits() as waits:
        yield sites
    sites.update({f"{module} {function} {name}": count for (module, function, name), count in waits.found.items()})
    if waits.read_down:
        sites["transfers.py to_host"] = waits.read_down


def syncs(run: Run) -> None:
    """Count waits for the GPU in a warm prompt and in decoded tokens, by call site."""
    device, shape, steps = device_of(run), run.shapes[-1], 4
    model = build(shape, getattr(torch, run.dtype), device)
    counting = _sync_sites if device.type == "cuda" else _cpu_sites
    for method in (Exact(), ContiguousKV(0.25)):
        prefix = Prefix(run, model, min(run.prefixes), method)
        with prefix.store(host=True) as store, torch.no_grad():
            for _ in range(2):  # the second time it comes from memory
                run.check()
                cache = prefix.cache(store)
                with counting() as prompt:
                    model(input_ids=prefix.ids, past_key_values=cache, logits_to_keep=1)
                with counting() as decoded:
                    for _ in range(steps):
                        model(input_ids=prefix.ids[:, :1], past_key_values=cache)
        for part, sites in (("prompt", prompt), (f"{steps} tokens", decoded)):
            label, layers = f"{type(method).__name__}, {part}", model.config.num_hidden_layers
            run.row(label, count=sum(sites.values()), shape=shape, layers=layers, kind=counting.__name__)
            for site, count in sites.most_common(20):
                run.row(f"{label}, site", site=site, count=count)


def trace(run: Run) -> None:
    """Count operations and kernels of a warm pass and of DynamicCache, and write a trace for chrome://tracing."""
    from torch.profiler import ProfilerActivity, profile

    device, shape = device_of(run), run.shapes[-1]
    model = build(shape, getattr(torch, run.dtype), device)
    prefix = Prefix(run, model, min(run.prefixes))
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
    dynamic = prefix.dynamic()
    with prefix.store(device=device.type == "cuda", host=True) as store, torch.no_grad():

        def warm(cache: Any, ids: torch.Tensor) -> None:
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)

        suffix = prefix.ids[:, prefix.tokens :]
        ways = {
            "DynamicCache": lambda: warm(prefix.cropped(dynamic), suffix),
            "ours": lambda: warm(prefix.cache(store), prefix.ids),
        }
        for label, way in ways.items():
            run.check()
            seconds(way, device)
            seconds(way, device)
            with profile(activities=activities) as profiled:
                seconds(way, device)
            events = profiled.events()
            operations = [event for event in events if event.name.startswith("aten::") and event.cpu_parent is None]
            kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
            copied = sum(event.name.startswith("Memcpy") for event in kernels)
            figures = {"kernels": len(kernels) - copied, "copies": copied, "operations": len(operations)}
            run.row(label, **figures, layers=model.config.num_hidden_layers, shape=shape, prefix=prefix.tokens)
    path = run.out / TRACE
    profiled.export_chrome_trace(str(path))  # ours, the last one
    if path.stat().st_size > TRACE_BYTES:
        run.skip("trace", f"it is {path.stat().st_size >> 20} MiB, more than the results may take")
        path.unlink()


# --- within a budget, and passages


def selective(run: Run) -> None:
    """Measure a budget of 5 % with memory for half of the prefixes: ours, IMPRESS, H2O, all KV, and recompute.

    Without cuDNN's attention, see `decoding`: it would build a plan for each number of selected tokens. With random
    weights, IMPRESS's probes never agree, so their agreement is emulated with the share of its paper.
    """
    shape, tiny = run.shapes[0], run.shapes[0] == "tiny"
    device = device_of(run)
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = build(shape, getattr(torch, run.dtype), device)
    count, tokens, requests = (2, 128, 2) if tiny else (4, min(4096, max(run.prefixes)), 8)
    if not run.fits("selective", int(6 * count * tokens * _token_bytes(model))):  # a copy for each geometry
        return
    parser = argparse.ArgumentParser()
    serving.add_arguments(parser)
    options = ["--device", str(device), "--memory-share", "0.5", "--bandwidth", "0", "--suffix", str(SUFFIX)]
    arguments = parser.parse_args([*options, "--requests", str(requests), "--warm-up", str(4 * count)])
    prompts = RandomTokens(model.config.vocab_size, count, tokens, SUFFIX)
    bench = serving.Bench(arguments, model, prompts, run.folder)
    settings = {"shape": shape, "dtype": run.dtype, "prefix": tokens, "prefixes": count, "budget": 0.05}
    selected_systems = [
        system
        for system in reprefill.systems(0.05, min(8, model.config.num_hidden_layers), reprefill.PAPER_AGREEING)
        if system.name in (reprefill.OURS, f"{reprefill.IMPRESS}, without reordering", reprefill.H2O_LFU,
                           reprefill.ATTENTION_STORE, "recompute")
    ]  # fmt: skip
    rows: serving.Rows = {system.name: [] for system in selected_systems}
    with ExitStack() as stack:
        stores = {system.name: stack.enter_context(bench.store_for(system)) for system in selected_systems}
        for _ in bench.turns(selected_systems, stores, rows):
            for name, new_rows in rows.items():
                for row in (row for row in new_rows if row["measured"]):
                    figures = {key: row[key] for key in ("bytes_read", "stall_seconds", "read_amplification")}
                    run.row(name, seconds=row["ttft_s"], **figures, **settings)
                new_rows.clear()
            run.check()


def passages(run: Run) -> None:
    """Measure prompts of passages from memory and a cold disk: recompute, full reuse, and 15 % recomputed.

    Without cuDNN's attention, see `decoding`.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    shape, tiny = run.shapes[0], run.shapes[0] == "tiny"
    arguments = argparse.Namespace(
        shape=shape, dtype=run.dtype, device=str(device_of(run)), ratio=0.15, suffix=32, device_memory="0",
        layers=None, load_requests=0,
        **({"pool": 3, "passages": 2, "tokens": 64, "instruction": 4, "requests": 1} if tiny else
           {"pool": 12, "passages": 8, "tokens": 512, "instruction": 24, "requests": 4}),
    )  # fmt: skip
    bench = rag.Bench(arguments, run.folder)
    selected_systems = [rag.System(rag.FULL, Recompute(), passages=False), *rag.systems(0.15)[2:-1]]
    settings = {"shape": shape, "dtype": run.dtype, "tokens": bench.prompts[0].shape[1], "kv_bytes": bench.kv_bytes}
    for medium in ("host", "disk"):
        with bench.store(True, medium, 0.0) as store, bench.store(False, medium, 0.0) as prefix_store:
            run.check()
            if medium == "host":
                bench.warm(store, prefix_store)
            for system, row in bench.turns(selected_systems, store, prefix_store, medium):
                run.row(f"{system.name}, {medium}", seconds=row["ttft_s"], computed=row["tokens_computed"], **settings)
                run.check()
