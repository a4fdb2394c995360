"""Rows of the evaluation data sets, loaded by `datasets` from the hub or from a folder with the same schema."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_tiered_cache.integrations.hub import go_offline_without_hub

from .errors import EvalError

_SUFFIXES = (".jsonl.gz", ".jsonl", ".json.gz", ".json")


@dataclass(frozen=True)
class HubSource:
    """Location of a data set on the hub.

    Args:
        repository: Repository name.
        config: Configuration name of the data set, or None.
        files: Path of the data files, with `{split}`, if the repository cannot be loaded as a data set.
    """

    repository: str
    config: str | None = None
    files: str | None = None


HUB: dict[str, HubSource] = {
    "2wikimultihopqa": HubSource("framolfese/2WikiMultihopQA"),
    "copa": HubSource("aps/super_glue", "copa"),
    "hotpotqa": HubSource("hotpotqa/hotpot_qa", "distractor"),
    "longbench": HubSource("THUDM/LongBench", files="zip://data/{split}.jsonl::hf://datasets/THUDM/LongBench/data.zip"),
    "musique": HubSource("dgslibisey/MuSiQue"),
    "openbookqa": HubSource("allenai/openbookqa", "main"),
    "piqa": HubSource("ybisk/piqa"),
    "rte": HubSource("nyu-mll/glue", "rte"),
    "samsum": HubSource("knkarthick/samsum"),
    "squad_v2": HubSource("rajpurkar/squad_v2"),
    "sst2": HubSource("nyu-mll/glue", "sst2"),
    "subj": HubSource("SetFit/subj"),
    "trec": HubSource("CogComp/trec"),
}
"""Hub source of each data set, by folder name in `--data`. Other sets (sharegpt, ruler's words) are not on the hub."""


@dataclass(frozen=True)
class Data:
    """Source of rows: a local folder or the hub.

    Args:
        folder: Folder with `<set>/<split>.jsonl.gz` (or .jsonl, .json) files; None for the hub.
    """

    folder: Path | None = None
    _loaded: dict[tuple[str, str], Any] = field(default_factory=dict, repr=False, compare=False)

    def rows(self, name: str, split: str, columns: Iterable[str]) -> Any:
        """Return the rows of one split, indexable, each a dict with at least `columns`.

        Raises:
            EvalError: The set cannot be loaded, or a column is missing.
        """
        key = (name, split)
        if key not in self._loaded:
            self._loaded[key] = _load(name, split, self.folder)
        rows = self._loaded[key]
        missing_columns = sorted(set(columns) - set(rows.column_names))
        if missing_columns:
            names = ", ".join(map(repr, missing_columns))
            raise EvalError(f"{name}/{split} has no column {names}; it has {', '.join(rows.column_names)}")
        return rows

    def has(self, name: str, split: str) -> bool:
        """Return whether this split is available (on the hub: whether `HUB` has a source for the set)."""
        return name in HUB if self.folder is None else _local(self.folder, name, split) is not None


def _local(folder: Path, name: str, split: str) -> Path | None:
    paths = (folder / name / f"{split}{suffix}" for suffix in _SUFFIXES)
    return next((path for path in paths if path.is_file()), None)


def _load(name: str, split: str, folder: Path | None) -> Any:
    try:
        import datasets
    except ImportError:
        raise EvalError("evaluation needs `datasets`; pip install 'hf-tiered-cache[eval]'") from None
    datasets.disable_progress_bars()
    if folder is not None:
        path = _local(folder, name, split)
        if path is None:
            raise EvalError(f"{folder / name} has no {split}.jsonl.gz (or .jsonl, .json); leave --data out for the hub")
        try:
            return datasets.load_dataset("json", data_files=str(path), split="train")
        except Exception as error:
            raise EvalError(f"{path} does not parse: {_first_line(error)}") from error
    source = HUB.get(name)
    if source is None:
        raise EvalError(f"{name} has no home on the hub; give a folder that has {name}/{split}.jsonl.gz as --data")
    go_offline_without_hub()
    try:
        if source.files:
            return datasets.load_dataset("json", data_files=source.files.format(split=split), split="train")
        try:
            return datasets.load_dataset(source.repository, source.config, split=split)
        except RuntimeError:  # the data set is a script: load the converted copy on the hub
            return datasets.load_dataset(source.repository, source.config, split=split, revision="refs/convert/parquet")
    except Exception as error:
        raise EvalError(
            f"{source.repository} cannot be loaded ({_first_line(error)}); "
            "without a network, give local copies with --data DIR"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
