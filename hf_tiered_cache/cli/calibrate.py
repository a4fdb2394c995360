"""Command `calibrate`: what is worth restoring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..units import parse_bytes
from .output import AsJson, KeyFile, Refused, Table, picture, plotting, print_json, read_text, replacing

if TYPE_CHECKING:
    from torch import nn

    from ..cache.calibrations import PrefixCosts, QualityFinding
    from ..kvstore import KVStore


_NewStore = Annotated[str, typer.Argument(metavar="STORE", help="Folder, created if missing, or address of the store.")]
_Model = Annotated[str, typer.Option(help="Causal LM: a name on the Hub, or a folder.")]
_Memory = Annotated[str, typer.Option(metavar="SIZE", help="Host memory of the store.")]
_DType = Annotated[
    str,
    typer.Option(help="Data type of the model, such as bfloat16; auto: as saved. Use the type that you serve with."),
]
_MEASUREMENTS_OF_OPTION = {
    **dict.fromkeys(("passages", "tokens", "warm"), ("",)),
    "repeats": ("", "--prefix"),
    **dict.fromkeys(("text", "methods", "length", "prompts", "plot"), ("--quality",)),
}
"""Options that apply to some measurements only, with the options that request these measurements. The measurement of
passages is the default: no option requests it, which is written as ""."""


def calibrate(
    context: typer.Context,
    store: _NewStore,
    model: _Model,
    passages: Annotated[int, typer.Option(min=1, help="Number of passages in the measured prompt.")] = 8,
    tokens: Annotated[int, typer.Option(min=16, help="Number of tokens in each passage.")] = 512,
    prefix: Annotated[
        str,
        typer.Option(
            metavar="TOKENS", help="Measure prefixes of these lengths instead, separated by commas, such as 512,4096."
        ),
    ] = "",
    quality: Annotated[
        float | None,
        typer.Option(
            metavar="NATS",
            min=0,
            help="Measure the loss of budgets on --text instead, and show which budgets keep this target.",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="With --quality: text similar to what the model will read. Can be repeated."),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="With --quality: methods to measure, separated by commas.")
    ] = "contiguous_kv,contiguous_kv:codec=int8",
    length: Annotated[
        int, typer.Option(min=256, help="With --quality: number of tokens of the prompts that texts are cut into.")
    ] = 1024,
    prompts: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --quality: maximum number of prompts, evenly from all texts. More are surer, but take longer.",
        ),
    ] = 8,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --quality: plot loss over bytes, as .png, .svg or .pdf.")
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            min=1, help="Repetitions of each measurement, of which the median is used. Use more on a busy machine."
        ),
    ] = 3,
    memory: _Memory = "1GiB",
    warm: Annotated[bool, typer.Option("--warm", help="Load passages from memory instead of from disk.")] = False,
    dtype: _DType = "auto",
    key_file: KeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure what to load and what to compute.

    The command measures passages, prefixes (--prefix), or what a budget loses (--quality). The results are saved in the
    store for this model and device. Programs that use the store find them there.

    Without --prefix and --quality, the command measures how much of a passage to recompute. The best share is the one
    with the shortest time to first token. Recomputing costs arithmetic and loading costs disk bandwidth, so the best
    share depends on the model, the machine and the prompt length. A prompt of random passages is run several times with
    each of several shares, on the GPU if there is one. The passages are removed afterwards. CacheTune(recompute="auto")
    uses the result. If your prompts differ in length, measure several lengths (--passages, --tokens); shares for
    lengths in between are interpolated.

    With --prefix, the command measures how long prefixes of these lengths take to compute, and to restore from disk and
    from memory. Exact(), the default method, then computes the first tokens of a stored prompt while it loads the
    others. It computes as many as give the shortest time to first token: none if the disk is fast, all if it is very
    slow. The KV computed during loading is exact up to the rounding of kernels, but not bit-for-bit equal to loaded KV.
    Exact(recompute=0) computes all or nothing. Pass several lengths, if possible up to the longest one that you
    expect. For longer prefixes, costs are extrapolated.

    With --quality, the command measures the loss of budgeted methods on your own text: the KL divergence (in nats) of
    predictions from those with all KV, at six budgets, together with the bytes that are loaded. Afterwards,
    ContiguousKV(quality=0.02) uses the smallest budget with a mean loss of at most a quarter of 0.02, and a loss of at
    most half of it in 95 % of the questions, so that other kinds of text keep the target, too. Any target can be used.
    """
    lengths = _lengths(prefix)
    measurements = {"--prefix": bool(lengths), "--quality": quality is not None}
    _check_together(context, [name for name in measurements if measurements[name]])
    if quality is not None and not text:
        raise Refused("--quality measures the loss on your own text: pass it with --text FILE")
    if plot is not None:
        plt, plot = plotting(), picture(plot)
    texts = [read_text(path) for path in text or []]
    amount = f"{passages} passages of {tokens} tokens"
    with _measuring(store, model, dtype, memory, key_file, amount) as (kv_store, torch_model):
        if quality is not None:
            ids = _prompts(model, texts, length, prompts)
            findings = kv_store.calibrate_quality(torch_model, ids, methods=methods.split(","), progress=not as_json)
            _show_losses(findings, quality, as_json)
            if plot is not None:
                _draw_losses(plt, plot, findings, quality)
            return
        if lengths:
            costs = kv_store.calibrate_prefix(torch_model, tokens=lengths, repeats=repeats, progress=not as_json)
            return _show_prefixes(costs, as_json)
        calibration = kv_store.calibrate(
            torch_model, passages=passages, tokens=tokens, repeats=repeats, cold=not warm, progress=not as_json
        )
    if as_json:
        return print_json(calibration.as_dict())
    table = Table("share recomputed", "time to first token", "", right=("share recomputed", "time to first token"))
    for ratio, seconds in sorted(calibration.seconds.items()):
        notes = {0.0: "full reuse", 1.0: "full recompute"}.get(ratio, "")
        table.add_row(f"{ratio:.3f}", f"{1e3 * seconds:.0f} ms", "selected" if ratio == calibration.ratio else notes)
    table.show()
    print(
        f"saved for this model and device, with prompts of {calibration.tokens} tokens: {calibration.ratio:.3f} "
        f"(computing and loading take equally long at {calibration.balanced:.3f})"
    )


def _check_together(context: typer.Context, requested: list[str]) -> None:
    """Raise Refused if two measurements are requested, or an option does not apply to the requested one."""
    if len(requested) > 1:
        raise Refused(f"{' and '.join(requested)} cannot be combined; run one measurement after the other")
    measurement = requested[0] if requested else ""
    for name, measurements in _MEASUREMENTS_OF_OPTION.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT" and measurement not in measurements:
            condition = f"without {measurement}" if "" in measurements else f"with {' or '.join(measurements)}"
            raise Refused(f"--{name} can only be used {condition}")


def _lengths(prefix: str) -> list[int]:
    try:
        return [int(length) for length in prefix.split(",")] if prefix else []
    except ValueError:
        raise Refused(f"--prefix {prefix} is invalid; pass lengths in tokens, such as 512,4096") from None


def _prompts(model: str, texts: list[str], length: int, count: int) -> list[list[int]]:
    """Return up to `count` prompts of `length` tokens, evenly from all texts. Raises Refused if there is none."""
    from transformers import AutoTokenizer

    tokenizer, prompts = AutoTokenizer.from_pretrained(model), []
    for text in texts:
        ids = tokenizer(text, verbose=False)["input_ids"]
        prompts += [ids[begin : begin + length] for begin in range(0, len(ids) - length + 1, length)]
    if not prompts:
        raise Refused(f"no text has {length} tokens; pass longer texts, or a smaller --length")
    count = min(count, len(prompts))
    return [prompts[number * len(prompts) // count] for number in range(count)]


def _show_losses(findings: list[QualityFinding], quality: float, as_json: bool) -> None:
    from ..cache.calibrations import TRANSFER

    if as_json:
        return print_json([finding.as_dict() | {"keeps": finding.keeps(quality)} for finding in findings])
    numbers = ("budget", "loss, nats", "same token", "KV loaded", "index", "first token")
    table = Table("method", *numbers, f"within {quality:g}", right=numbers)
    for finding in findings:
        shares = f"{finding.agreement:.0%}", f"{finding.brought:.1%}", f"{finding.index:.1%}"
        cells = f"{finding.budget:.0%}", f"{finding.loss:.2g}", *shares, f"{1e3 * finding.seconds:.0f} ms"
        table.add_row(finding.method, *cells, "yes" if finding.keeps(quality) else "")
    table.show()
    within_target = [finding for finding in findings if finding.keeps(quality)]
    if not within_target:
        most = quality / TRANSFER
        print(
            f"saved for this model; no budget lost at most {most:g} on average and {2 * most:g} in 95 % of the "
            f"questions, which leaves a margin for other text, so quality={quality:g} loads all KV"
        )
        return
    best = min(within_target, key=lambda finding: finding.brought)
    print(f"saved for this model; {best.method} loads the fewest bytes, with a budget of {best.budget:g}")


def _draw_losses(plt: Any, path: Path, findings: list[QualityFinding], quality: float) -> None:
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for method in dict.fromkeys(finding.method for finding in findings):
        findings_of_method = [finding for finding in findings if finding.method == method]
        axes.plot(
            [100 * finding.brought for finding in findings_of_method],
            [finding.loss for finding in findings_of_method],
            marker="o",
            label=method,
        )
    axes.axhline(quality, color="grey", linestyle=":", label=f"target: {quality:g}")
    axes.set(xlabel="KV loaded for the first token, %", ylabel="KL divergence, nats", yscale="log")
    axes.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary)
    plt.close(figure)


def _show_prefixes(costs_by_length: list[PrefixCosts], as_json: bool) -> None:
    if as_json:
        return print_json([costs.as_dict() for costs in costs_by_length])
    tiers = sorted({tier for costs in costs_by_length for tier in costs.restore})
    columns = ["computed", *(f"from {tier}" for tier in tiers)]
    table = Table("prefix", *columns, "", right=("prefix", *columns))
    for costs in costs_by_length:
        shares = {tier: costs.loading(tier) / max(costs.loading(tier) + costs.compute, 1e-12) for tier in tiers}
        parts = [f"{share:.0%} computed, the rest from {tier}" for tier, share in shares.items() if share > 0.05]
        times = [costs.compute, *(costs.restore.get(tier) for tier in tiers)]
        cells = ["" if seconds is None else f"{1e3 * seconds * costs.tokens:.0f} ms" for seconds in times]
        table.add_row(f"{costs.tokens:,}", *cells, "about " + "; ".join(parts) if parts else "")
    table.show()
    print("saved for this model and device; use Exact(recompute=0, decline=False) to restore all tokens anyway")


@contextmanager
def _measuring(
    store: str, model: str, dtype: str, memory: str, key_file: Path | None, amount: str
) -> Iterator[tuple[KVStore, nn.Module]]:
    """Open a store and load a model. Raises Refused if the measured `amount` of KV does not fit into memory."""
    parse_bytes(memory, "--memory")
    import torch

    from ..kvstore import KVStore
    from ..store.cipher import read_key_file

    key = read_key_file(key_file)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch_model = _load_model(model, dtype, device)
        with KVStore(store, host_memory=memory, key=key) as kv_store:
            yield kv_store, torch_model
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise Refused(
            f"{model} and {amount} do not fit into the memory of this {device}; use fewer --passages, fewer --tokens, "
            "or a smaller --dtype"
        ) from error


def _load_model(name: str, dtype: str, device: str) -> nn.Module:
    """Load a causal LM on a device, in evaluation mode. Raises ConfigError if it cannot be loaded."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..integrations.hub import loading

    torch_dtype = getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(torch_dtype, torch.dtype) and torch_dtype.is_floating_point):
        raise Refused(f"--dtype {dtype} is invalid; use auto, float32, bfloat16 or float16")
    with loading(name, Exception):  # errors of the hub, of files and of model code have no common base class
        model: nn.Module = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
        return model.to(device).eval()
