"""Commands `calibrate` and `profile`: what is worth restoring, and which heads gain from larger windows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import TieredCacheError
from ..units import parse_bytes
from .output import AsJson, KeyFile, Refused, figures, plotting, print_json, read_text

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from ..cache.calibrations import PrefixCosts, QualityFinding
    from ..operations.windows import WindowFindings


_ONLY = {
    **dict.fromkeys(("passages", "tokens", "warm"), ("",)),
    "repeats": ("", "--prefix"),
    **dict.fromkeys(("text", "methods", "length", "plot"), ("--quality",)),
}
"""Options that apply to some of the measurements only. The measurement of passages has no option of its own, so it is
""."""


def calibrate(
    context: typer.Context,
    store: Annotated[Path, typer.Argument(metavar="STORE", help="The store's folder; made if missing.")],
    model: Annotated[str, typer.Option(help="A causal LM: a name on the hub, or a folder.")],
    passages: Annotated[int, typer.Option(min=1, help="How many passages the measured prompt has.")] = 8,
    tokens: Annotated[int, typer.Option(min=16, help="How many tokens each passage has.")] = 512,
    prefix: Annotated[
        str,
        typer.Option(
            metavar="TOKENS", help="Measure prefixes of these lengths instead, by comma, such as 512,4096: see below."
        ),
    ] = "",
    quality: Annotated[
        float | None,
        typer.Option(
            metavar="NATS", min=0, help="Measure what budgets lose on --text instead, and show which keeps this."
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="With --quality: text such as the model is going to read. Several."),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="With --quality: the methods to measure, by comma.")
    ] = "contiguous_kv,contiguous_kv:codec=int8",
    length: Annotated[
        int, typer.Option(min=256, help="With --quality: texts are cut into prompts of so many tokens.")
    ] = 1024,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --quality: draw loss over bytes, as a .png or .svg.")
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="How often each time is measured; the median counts. More where others work.")
    ] = 3,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Host memory of the store.")] = "1GiB",
    warm: Annotated[bool, typer.Option("--warm", help="Let passages come from memory, not from the disk.")] = False,
    dtype: Annotated[
        str, typer.Option(help="Of the model, such as bfloat16; auto: as it was saved. Use the one you serve with.")
    ] = "auto",
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much of a passage to compute anew.

    The best share is the one with which the first token comes soonest. Computing costs arithmetic, loading costs the
    disk, so it depends on the model, the machine and the length of prompts. A prompt of random passages is asked at
    several shares, each a few times, on the GPU if there is one; the passages are removed afterwards.

    What is found is kept in the store for this model, device and length of prompt: CacheTune(recompute="auto") takes
    it. Measure several lengths (--passages, --tokens) if your prompts differ; between two lengths it takes what lies
    between.

    With --prefix it measures, for prefixes of these lengths, how long they take to compute, and to restore from disk
    and from memory. From then on Exact(), the default, computes the first tokens of a stored prompt while it loads the
    others, as many as make the answer come soonest: none where the disk is fast, all where it is very slow. What is
    computed beside loading is exact up to the kernel's rounding, and not bit for bit what loading all would give;
    Exact(recompute=0) computes all or nothing. Name two lengths or more, the longest you expect among them: they tell
    how computing grows with length.

    With --quality it measures what methods within a budget lose on your own text: how far predictions are from those
    with all KV (KL divergence in nats), at six budgets, beside the bytes that these bring. From then on
    ContiguousKV(quality=0.02) takes the least budget that lost no more than a quarter of 0.02 in the mean, and in 95 %
    of the questions no more than half of it, so that text of another kind keeps the target, too. Name any target.
    """
    parse_bytes(memory, "--memory")
    lengths = _lengths(prefix)
    asked = {"--prefix": bool(lengths), "--quality": quality is not None}
    _check_together(context, [name for name in asked if asked[name]])
    if quality is not None and not text:
        raise Refused("--quality measures on your own text: name it with --text FILE")
    plt = plotting() if plot is not None else None
    import torch

    from ..kvstore import KVStore
    from ..store.cipher import read_key_file

    key = read_key_file(key_file)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        loaded = load_model(model, dtype, device)
        with KVStore(store, host_memory=memory, key=key) as opened:
            if quality is not None:
                prompts = _prompts(model, text or [], length)
                findings = opened.calibrate_quality(loaded, prompts, methods=methods.split(","), progress=not as_json)
                if plot is not None:
                    _draw_losses(plt, plot, findings, quality)
                return _show_losses(findings, quality, as_json)
            if lengths:
                return _show_prefixes(
                    opened.calibrate_prefix(loaded, tokens=lengths, repeats=repeats, progress=not as_json), as_json
                )
            found = opened.calibrate(
                loaded, passages=passages, tokens=tokens, repeats=repeats, cold=not warm, progress=not as_json
            )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Refused(
            f"{model} and {passages} passages of {tokens} tokens do not fit into the memory of this {device}; "
            "ask for fewer with --passages or --tokens, or for a smaller --dtype"
        ) from error
    if as_json:
        return print_json(found.as_dict())
    table = figures("share computed", "time to first token", "", right=("share computed", "time to first token"))
    for ratio, seconds in sorted(found.seconds.items()):
        notes = {0.0: "full reuse", 1.0: "full recompute"}.get(ratio, "")
        table.add_row(f"{ratio:.3f}", f"{1e3 * seconds:.0f} ms", "taken" if ratio == found.ratio else notes)
    table.show()
    print(
        f"kept for this model and device, prompts of {found.tokens} tokens: {found.ratio:.3f} "
        f"(computing and loading balance at {found.balanced:.3f})"
    )


def _check_together(context: typer.Context, asked: list[str]) -> None:
    """Raise Refused if two measurements are requested, or an option does not apply to the requested one."""
    if len(asked) > 1:
        raise Refused(f"{' and '.join(asked)} are two measurements: ask for one after the other")
    what = asked[0] if asked else ""
    for name, measurements in _ONLY.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT" and what not in measurements:
            when = f"without {what}" if "" in measurements else f"with {' or '.join(measurements)}"
            raise Refused(f"--{name} says something only {when}")


def _lengths(prefix: str) -> list[int]:
    try:
        return [int(length) for length in filter(None, prefix.split(","))]
    except ValueError:
        raise Refused(f"--prefix {prefix} is none; write lengths in tokens, such as 512,4096") from None


def _prompts(model: str, texts: list[Path], length: int) -> list[list[int]]:
    """Return texts as prompts of `length` tokens. Raises Refused if there is none."""
    from transformers import AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained(model), []
    for path in texts:
        ids = tokenizer(read_text(path), verbose=False)["input_ids"]
        found += [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
    if not found:
        raise Refused(f"no text has {length} tokens; name longer ones, or ask for fewer with --length")
    return found


def _show_losses(found: list[QualityFinding], quality: float, as_json: bool) -> None:
    if as_json:
        return print_json([one.as_dict() | {"keeps": one.keeps(quality)} for one in found])
    numbers = ("budget", "loss, nats", "same token", "brought", "index", "first token")
    table = figures("method", *numbers, f"within {quality:g}", right=numbers)
    for one in found:
        shown = [f"{one.agreement:.0%}", f"{one.brought:.1%}", f"{one.index:.1%}", f"{1e3 * one.seconds:.0f} ms"]
        table.add_row(one.method, f"{one.budget:.0%}", f"{one.loss:.2g}", *shown, "yes" if one.keeps(quality) else "")
    table.show()
    keeping = [one for one in found if one.keeps(quality)]
    if not keeping:
        print(
            f"kept for this model; none of these loses as little as {quality:g}: with quality={quality:g} all KV comes"
        )
        return
    best = min(keeping, key=lambda one: one.brought)
    print(f"kept for this model; {best.method} takes the fewest bytes: a budget of {best.budget:g}")


def _draw_losses(plt: Any, path: Path, found: list[QualityFinding], quality: float) -> None:
    """Draw the loss of each method over the bytes that it reads."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for method in dict.fromkeys(one.method for one in found):
        mine = [one for one in found if one.method == method]
        axes.plot([100 * one.brought for one in mine], [one.loss for one in mine], marker="o", label=method)
    axes.axhline(quality, color="grey", linestyle=":", label=f"target: {quality:g}")
    axes.set(xlabel="KV brought for the first token, %", ylabel="KL divergence, nats", yscale="log")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


def _show_prefixes(found: list[PrefixCosts], as_json: bool) -> None:
    if as_json:
        return print_json([one.as_dict() for one in found])
    tiers = sorted({tier for one in found for tier in one.restore})
    columns = ["computed", *(f"from {tier}" for tier in tiers)]
    table = figures("prefix", *columns, "", right=("prefix", *columns))
    for one in found:
        shares = {tier: one.loading(tier) / max(one.loading(tier) + one.compute, 1e-12) for tier in tiers}
        parts = [f"{share:.0%} computed, the rest from {tier}" for tier, share in shares.items() if share > 0.05]
        times = [one.compute, *(one.restore.get(tier) for tier in tiers)]
        shown = ["" if seconds is None else f"{1e3 * seconds * one.tokens:.0f} ms" for seconds in times]
        table.add_row(f"{one.tokens:,}", *shown, "about " + "; ".join(parts) if parts else "")
    table.show()
    print("kept for this model and device; Exact(recompute=0, decline=False) restores all the same")


def load_model(name: str, dtype: str, device: str) -> nn.Module:
    """Load a causal LM on a device, in evaluation mode. Raises Refused if it cannot be loaded."""
    import torch
    from transformers import AutoModelForCausalLM

    known = getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(known, torch.dtype) and known.is_floating_point):
        raise Refused(f"--dtype {dtype} is none; write auto, float32, bfloat16 or float16")
    try:
        loaded: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        return loaded.to(device).eval()
    except (torch.OutOfMemoryError, MemoryError, TieredCacheError):
        raise
    except Exception as error:  # errors of the hub, of files and of model code have no common base class
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise Refused(f"the model {name!r} cannot be loaded: {reason}") from error


def profile(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="The store's folder; made if missing.")],
    model: Annotated[str, typer.Option(help="A causal LM: a name on the hub, or a folder.")],
    text: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="Long text, such as the model will answer about. Several."),
    ],
    method: Annotated[
        str, typer.Option(help='A KVDrive and its settings, such as "kv_drive:budget=0.0625:window=3".')
    ] = "kv_drive",
    tokens: Annotated[int, typer.Option(min=16, help="At most so many tokens of a text are the context.")] = 32768,
    steps: Annotated[int, typer.Option(min=2, help="How many tokens behind it are decoded, one by one.")] = 256,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the sizes there, as a .png or .svg.")] = None,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Host memory of the store.")] = "1GiB",
    dtype: Annotated[
        str, typer.Option(help="Of the model, such as bfloat16; auto: as it was saved. Use the one you serve with.")
    ] = "auto",
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure which heads gain most by a larger window (KVDrive).

    With KVDrive each KV head attends to a few chunks of a long context, chosen anew at each token. Those it attended to
    lately stay in device memory, in a window of `window` times as many; the others are fetched. Some heads choose the
    same again and again, others wander: with a larger window for those that gain by it, and a smaller one for the
    others, less is fetched in the same memory.

    Of each text the first tokens are stored as a context, if they are not yet, and the model reads the next ones, one
    by one; from what its heads choose follows what windows of 1 to 4 times would have had.

    What is found is kept in the store for this model, and the method's index, budget, chunk size and eviction:
    KVDrive() takes it by itself, at any `window` from 1 to 4, and KVDrive(window_sizes="uniform") does not. Tokens are
    timed with windows of each size, too: KVDrive() has the memory of the quickest, unless you say `window`. What a
    model answers does not depend on it.
    """
    parse_bytes(memory, "--memory")
    plt = plotting() if plot is not None else None
    import torch
    from transformers import AutoTokenizer

    from ..kvstore import KVStore
    from ..methods import KVDrive, make_method
    from ..selection.window_sizes import uniform_sizes
    from ..store.cipher import read_key_file

    key, chooses = read_key_file(key_file), make_method(method)
    if not isinstance(chooses, KVDrive):
        raise Refused(f"--method {method} has no windows; write kv_drive, and what differs from its defaults")
    written = [read_text(path) for path in text]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        loaded = load_model(model, dtype, device)
        tokenizer = AutoTokenizer.from_pretrained(model)
        ids = [tokenizer(one, verbose=False)["input_ids"][: tokens + steps] for one in written]
        with KVStore(store, host_memory=memory, key=key, policy=chooses.policy) as opened:
            found = opened.profile_windows(loaded, ids, method=chooses, steps=steps, progress=not as_json)
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Refused(
            f"{model} and contexts of {tokens} tokens do not fit into the memory of this {device}; ask for fewer with "
            "--tokens, or for a smaller --dtype"
        ) from error
    window = found.quickest if chooses.window == "auto" else chooses.window_multiple
    assert window is not None
    sizes, uniform = found.chosen(window), found.chosen(window, uniform_sizes)
    shares = found.hit_rate(sizes), found.hit_rate(uniform)
    if plot is not None:
        _draw(plt, plot, found, sizes)
    if as_json:
        own = {"method": chooses.profile_name, "window": window, "window_sizes": sizes.tolist()}
        return print_json(own | {"hit_rate": shares[0], "uniform_hit_rate": shares[1]} | found.as_dict())
    heads = [f"head {head}" for head in range(sizes.shape[1])]
    table = figures("layer", *heads, right=("layer", *heads))
    for layer, of_heads in zip(found.layers, sizes.tolist(), strict=True):
        table.add_row(str(layer), *(f"×{size}" for size in of_heads))
    table.show()
    print(
        f"kept for this model and {chooses.index}, budget {chooses.budget:g}, chunks of {chooses.chunk_tokens} tokens: "
        f"in the memory of windows ×{window:g} these had {shares[0]:.1%} of what was attended to, one size for "
        f"all (×{uniform.flat[0]}) {shares[1]:.1%}; a token took "
        + ", ".join(f"{took * 1e3:.1f} ms at ×{size}" for size, took in zip(found.sizes, found.seconds, strict=True))
    )


def _draw(plt: Any, path: Path, found: WindowFindings, sizes: np.ndarray) -> None:
    layers, heads = sizes.shape
    figure, axes = plt.subplots(figsize=(2.5 + 0.35 * heads, 1.5 + 0.25 * layers), layout="constrained")
    image = axes.imshow(sizes, vmin=found.sizes[0], vmax=found.sizes[-1], aspect="auto", cmap="viridis")
    axes.set(xlabel="KV head", ylabel="layer", xticks=range(heads), yticks=range(layers), title="window")
    axes.set_yticklabels(map(str, found.layers))
    figure.colorbar(image, ticks=found.sizes, format="×%d")
    figure.savefig(path, dpi=150)
    plt.close(figure)
