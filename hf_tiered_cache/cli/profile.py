"""Command `profile`: measures which heads of a model gain most from a larger window in device memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..units import parse_bytes
from .calibrate import load_model
from .output import AsJson, KeyFile, Refused, figures, plotting, print_json, read_text

if TYPE_CHECKING:
    import numpy as np

    from ..profiling import WindowFindings


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
    from ..store.cipher import read_key_file
    from ..tiers.window_sizes import uniform_sizes

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
