"""`calibrate`: how much of a passage to compute on this machine, and which prefixes are worth restoring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import TieredCacheError
from ..units import parse_bytes
from .output import AsJson, KeyFile, Refused, figures, print_json

if TYPE_CHECKING:
    from torch import nn

    from ..calibrations import PrefixCosts


def calibrate(
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
    """
    parse_bytes(memory, "--memory")
    lengths = _lengths(prefix)
    import torch

    from ..kvstore import KVStore
    from ..store.cipher import read_key_file

    key = read_key_file(key_file)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        loaded = load_model(model, dtype, device)
        with KVStore(store, host_memory=memory, key=key) as opened:
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


def _lengths(prefix: str) -> list[int]:
    try:
        return [int(length) for length in filter(None, prefix.split(","))]
    except ValueError:
        raise Refused(f"--prefix {prefix} is none; write lengths in tokens, such as 512,4096") from None


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
    """A causal LM, ready to compute on a device. Raises Refused where there is none."""
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
    except Exception as error:  # what hub, files and other people's code may raise has no common base
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise Refused(f"the model {name!r} cannot be loaded: {reason}") from error
