"""Commands `ls`, `stat` and `config`: the contents of a store, and the settings of stores."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..store import EXACT
from ..store.catalogue import SegmentRow
from ..store.settings import FILE_NAME, FILE_VARIABLE, PREFIX, SETTINGS, Setting, read_settings, without_secrets
from ..units import format_bytes
from .contents import Contents, contents_of, head_of, unique_length
from .output import AsJson, StoreAddress, Table, ago, count, date, facts, print_json, printable

if TYPE_CHECKING:
    from ..store.geometry import BlockGroup, LayerKV
    from ..store.shape import SegmentShape


def ls(store: StoreAddress, as_json: AsJson = False) -> None:
    """List the segments of a store, model by model.

    The most recently used segment comes last. A segment is a range of tokens with KV in one file: a prompt, or the
    tokens that a prompt adds to another one (column "from": position of the first token). Ids are shortened to a unique
    length; `stat` and `rm` accept shortened ids.
    """
    contents = contents_of(store)
    if as_json:
        return print_json([contents.describe(row) for row in contents.rows])
    fingerprints = contents.fingerprints()
    print_length = unique_length(fingerprints)
    id_length = unique_length(row.id for row in contents.rows)
    for fingerprint in fingerprints:
        rows = [row for row in contents.rows if row.fingerprint == fingerprint]
        print(f"{_name(contents, fingerprint)}, fingerprint {fingerprint[:print_length]}")
        _show_rows(contents, rows, id_length)
        print()
    total = f"total: {_totals(contents.rows)}"
    print(total if len(fingerprints) < 2 else f"{total}, {count(len(fingerprints), 'model')}")


def _show_rows(contents: Contents, rows: list[SegmentRow], id_length: int) -> None:
    text_columns = {
        "label": [printable(row.label) for row in rows],
        "notes": [", ".join(_notes(contents.describe(row))) for row in rows],
    }
    text_columns = {heading: texts for heading, texts in text_columns.items() if any(texts)}
    number_columns = ("tokens", "from", "size", "last used", "uses")
    table = Table("segment", *number_columns, *text_columns, right=number_columns, fold=tuple(text_columns))
    for number, row in enumerate(rows):
        cells = (f"{row.tokens:,}", f"{row.position:,}", format_bytes(row.nbytes), ago(row.used), f"{row.uses:,}")
        table.add_row(row.id[:id_length], *cells, *(texts[number] for texts in text_columns.values()))
    table.show()
    if len(contents.fingerprints()) > 1:
        print(_totals(rows))


def _totals(rows: list[SegmentRow]) -> str:
    tokens = sum(row.tokens for row in rows)
    return f"{count(len(rows), 'segment')}, {tokens:,} tokens, {format_bytes(sum(row.nbytes for row in rows))}"


def _name(contents: Contents, fingerprint: str) -> str:
    model = contents.models.get(fingerprint, {})
    details = [printable(model[key]) for key in ("class", "dtype") if model.get(key)]
    name = printable(model.get("name") or "unnamed model")
    return f"{name} ({', '.join(details)})" if details else name


def _notes(description: dict[str, Any]) -> list[str]:
    notes = [note for note in ("pinned", "encrypted", "expired") if description[note]]
    if description["provenance"] != EXACT:
        notes.append(description["provenance"])
    if description["usable_tokens"] < description["tokens"]:
        notes.append(f"damaged: {description['usable_tokens']:,} tokens usable")
    return notes


def stat(
    store: StoreAddress,
    segment: Annotated[
        str, typer.Argument(help="Id of a segment, or its first characters. Default: the whole store.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show a summary of a store, or the details of one segment.

    The details of a segment are its model, its position in the prompt, its layout, its layers, and its file sections.
    """
    contents = contents_of(store)
    if segment:
        return _show_segment(store, contents, contents.row_of(segment), as_json)
    descriptions = [contents.describe(row) for row in contents.rows]
    summary = {
        "path": without_secrets(store),
        "segments": len(descriptions),
        "tokens": sum(description["tokens"] for description in descriptions),
        "disk_bytes": sum(description["bytes"] + sum(description["sidecars"].values()) for description in descriptions),
        "pinned": sum(description["pinned"] for description in descriptions),
        "encrypted": sum(description["encrypted"] for description in descriptions),
        "expired": sum(description["expired"] for description in descriptions),
        "damaged": sum(description["usable_tokens"] < description["tokens"] for description in descriptions),
        "last_used": max((description["used"] for description in descriptions), default=None),
    }
    if as_json:
        return print_json(
            summary | {"models": {name: contents.models.get(name, {}) for name in contents.fingerprints()}}
        )
    table = facts()
    for name, value in summary.items():
        if name == "disk_bytes":
            table.add_row("on disk", format_bytes(value))
        elif name == "last_used":
            table.add_row("last used", "never" if value is None else ago(value))
        else:
            table.add_row("store" if name == "path" else name, f"{value:,}" if isinstance(value, int) else value)
    for fingerprint in contents.fingerprints():
        rows = [row for row in contents.rows if row.fingerprint == fingerprint]
        table.add_row("model", f"{_name(contents, fingerprint)}: {_totals(rows)}")
    table.show()


def _show_segment(store: str, contents: Contents, row: SegmentRow, as_json: bool) -> None:
    from ..store.container import CIPHER
    from ..store.format import sections

    header = head_of(store, row.id).header
    shape, description = header.shape, contents.describe(row)
    if as_json:
        block_groups = [
            {
                "layers": list(block_group.layers),
                "index": block_group.identifies,
                "merged": block_group.merged,
                "blocks": shape.chunks_in(block_group),
                "tokens": shape.tokens_in(block_group),
                "block_bytes": block_group.block_bytes,
            }
            for block_group in shape.block_groups
        ]
        section_ranges = {
            name: {"offset": section_range.offset, "bytes": section_range.nbytes}
            for name, section_range in sections(header).items()
        }
        return print_json(
            description
            | {"parent": header.parent.hex(), "geometry": asdict(shape.geometry), "layout": shape.layout.to_json()}
            | {"block_groups": block_groups, "sections": section_ranges}
        )
    table = facts()
    table.add_row("segment", row.id)
    if row.label:
        table.add_row("label", printable(row.label))
    table.add_row("model", _name(contents, row.fingerprint))
    for name, value in sorted(header.model.items()):
        if name not in ("name", "class", "dtype"):
            table.add_row(f"  {printable(name)}", printable(value))
    table.add_row("fingerprint", row.fingerprint)
    table.add_row("provenance", row.provenance)
    table.add_row("tokens", f"{row.tokens:,}, starting at token {row.position:,}")
    table.add_row("parent hash", header.parent.hex())
    table.add_row("on disk", f"{format_bytes(row.nbytes)} ({row.nbytes:,} bytes)")
    for kind, nbytes in description["sidecars"].items():
        table.add_row("sidecar", f"{printable(kind)}, {format_bytes(nbytes)} ({nbytes:,} bytes)")
    table.add_row("created", date(row.created))
    table.add_row("last used", f"{ago(row.used)}, {count(row.uses, 'use')}")
    table.add_row("expires", "never" if row.expires is None else date(row.expires))
    if header.seal is not None:
        table.add_row("encrypted", f"{CIPHER}, key {header.seal.key_id}")
    table.add_row("notes", ", ".join(_notes(description)) or "none")
    table.add_row("layout", _geometry(shape))
    table.add_row("layers", "; ".join(_layers(shape)))
    table.show()
    print()
    groups_table = Table("group", "layers", "contents", "blocks", "block size", right=("group", "blocks", "block size"))
    for block_group in shape.block_groups:
        blocks = str(shape.chunks_in(block_group)), format_bytes(block_group.block_bytes)
        group = str(block_group.index), _ranges(block_group.layers), _contents_of_group(block_group)
        groups_table.add_row(*group, *blocks)
    groups_table.show()
    print()
    sections_table = Table("section", "offset", "size", right=("offset", "size"))
    for name, section in sections(header).items():
        sections_table.add_row(name, f"{section.offset:,}", format_bytes(section.nbytes))
    sections_table.show()


def _contents_of_group(block_group: BlockGroup) -> str:
    """Return the tensors and heads of a KV cache group, such as "keys and values, heads 0-1"."""
    tensors = " and ".join(
        f"{name}s" for name in ("key", "value") if any(part.tensor == name for part in block_group.parts)
    )
    heads = {part.first_head + number for part in block_group.parts for number in range(part.heads)}
    kind = "index of " if block_group.identifies else "merged " if block_group.merged else ""
    return f"{kind}{tensors}, heads {_ranges(sorted(heads))}"


def _geometry(shape: SegmentShape) -> str:
    from ..store.codecs import RAW

    geometry = shape.geometry
    heads = "all heads" if geometry.heads_per_block is None else count(geometry.heads_per_block, "head")
    parts = [
        f"blocks of {count(geometry.chunk_tokens, 'token')} × {count(geometry.layers_per_block, 'layer')} × {heads}",
        "keys and values in separate blocks" if geometry.split_kv else "keys and values in the same block",
    ]
    if geometry.solo_layers:
        parts.append(f"the first {count(geometry.solo_layers, 'layer')} in separate blocks")
    if geometry.index is not None:
        heads = "all heads" if geometry.index.heads is None else count(geometry.index.heads, "head")
        parts.append(f"key index for every {count(geometry.index.every, 'layer')}, {heads}")
    if geometry.pairs:
        parts.append(f"merged layers: {', '.join(f'{first} with {second}' for first, second in geometry.pairs)}")
    if geometry.codec != RAW:
        parts.append(f"codec {geometry.codec}")
    if shape.tables is not None and not geometry.pairs:
        parts.append("reordered tokens")
    if not shape.whole:
        parts.append("some groups hold only a part of the tokens")
    return ", ".join(parts)


def _layers(shape: SegmentShape) -> list[str]:
    """Return the layers of each kind, such as "0-11: keys 2 × 64, values 2 × 64", followed by the dtype."""
    kinds: dict[LayerKV | None, list[int]] = {}
    for number, kind in enumerate(shape.layout.layers):
        kinds.setdefault(kind, []).append(number)
    descriptions = [f"{_ranges(numbers)}: {_kind(kind)}" for kind, numbers in kinds.items()]
    return [*descriptions, str(shape.layout.dtype).removeprefix("torch.")]


def _kind(layer: LayerKV | None) -> str:
    if layer is None:
        return "no KV"
    description = f"keys {layer.key_heads} × {layer.key_dim}, values {layer.value_heads} × {layer.value_dim}"
    if layer.window:
        description += f", sliding window of {layer.window:,} tokens"
    if layer.rotated:
        description += f", {layer.rotated}s stored before rotation"
    return description if layer.position_independent else f"{description}, usable at their original positions only"


def _ranges(numbers: tuple[int, ...] | list[int]) -> str:
    """Return ascending numbers as ranges, such as "0-3, 7"."""
    by_gap = groupby(enumerate(numbers), lambda place: place[1] - place[0])
    runs = [[number for _, number in run] for _, run in by_gap]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def config(as_json: AsJson = False) -> None:
    """Show the settings of stores, and where they come from.

    Each setting is an argument of KVStore. It can be set by an environment variable, or by a line of the file that
    HF_TIERED_CACHE_CONFIG names, by default hf_tiered_cache.toml in the working directory:

    \b
      export HF_TIERED_CACHE_HOST_MEMORY=8GiB
      echo 'disk_quota = "100GiB"' >> hf_tiered_cache.toml

    Arguments in the code count before variables, and variables before the file.
    """  # noqa: D301
    from ..kvstore import KVStore

    parameters = inspect.signature(KVStore).parameters
    defaults = {name: Setting(parameters[name].default, "default") for name in SETTINGS}
    settings = {
        name: Setting(without_secrets(value) if isinstance(value, str) else value, source)  # that of a remote has some
        for name, (value, source) in (defaults | read_settings()).items()
    }
    if as_json:
        return print_json({name: setting._asdict() for name, setting in settings.items()})
    table = Table("setting", "value", "from", "variable")
    for name, (value, source) in settings.items():
        text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        table.add_row(name, text, source, PREFIX + name.upper())
    table.show()
    print(f"\nfile: {FILE_NAME} in the working directory, or the one that {FILE_VARIABLE} names")
