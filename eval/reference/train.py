"""Train a reference model on the generated language: from scratch, or from another model for longer contexts.

    python -m eval.reference.train --size xs --text books.txt.gz --out runs/xs
    python -m eval.reference.train --size long --continue-from eval/reference/xs --text books.txt.gz --out runs/long

A small Qwen2 (grouped-query attention, RoPE) learns the kinds of questions one after the other on short contexts, then
on longer ones. The next length begins when the current one is learned (or at `Stage.most_steps`), so that longer ones
converge. The layers between the second and the last share their weights (Dehghani et al. 2018, Liu et al. 2024);
without sharing, labels by example are not learned. Before the first stage with two hops, the weights of the layer that
looks up facts are copied to all later layers except the last, and shared from then on. A repeated layer can look up
what the previous one has found, and attends to similar positions, as neighbouring layers of large models do. Saved
models have separate weights in each layer.

A model that continues from another keeps its tokenizer and its layer sharing. Heads are added so that the outputs do
not change at first (`grown`), and layers so that lookups are repeated more often. RoPE gets a larger base, so that long
distances rotate keys no further than short distances did. Interrupted training resumes from the last checkpoint.
"""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2ForCausalLM

from hf_tiered_cache.cli.output import replacing

from ..errors import EvalError
from ..files import check_file, check_folder, write
from .batches import draw, losses
from .curve import draw_curve
from .language import Language, train_tokenizer
from .model import build, grown, lookup_layer, sharing, unshared
from .recipes import SIZES, Size

_CURVE = "curve.json"
"""File with the course of the training, the first one in the folder of a run."""


@dataclass
class Progress:
    """State of the training run, saved with every checkpoint."""

    stage: int = 0
    in_stage: int = 0
    """Steps of this stage."""
    shares: dict[str, float] = field(default_factory=dict)
    """Moving averages of the share of right answer tokens in this stage, by kind."""
    curve: list[dict[str, Any]] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    """Index of the first layer with the same weights, for each layer."""
    step: int = 0
    seconds: float = 0.0


class Training:
    """Training run with model, optimizers, data and progress."""

    def __init__(
        self,
        size: Size,
        language: Language,
        tokenizer: PreTrainedTokenizerBase,
        out: Path,
        seed: int,
        base: Qwen2ForCausalLM | None = None,
    ) -> None:
        """Start a run, or resume it from the checkpoint in `out`.

        Args:
            size: Architecture and schedule.
            language: Source of contexts.
            tokenizer: Tokenizer of the model.
            out: Folder of checkpoints.
            seed: Random seed.
            base: Model to continue from, for a size that `continues`.
        """
        torch.manual_seed(seed)
        self.size, self.language, self.tokenizer, self.out, self.seed = size, language, tokenizer, out, seed
        middle = range(size.layers - 1)
        shared_layers = (
            [*(min(layer, size.own_layers) for layer in middle), size.layers - 1]
            if base is None
            else sharing(base, size.layers)
        )
        self.progress = Progress(shared=shared_layers)
        self._checkpoint = out / "checkpoint.pt"
        checkpoint = torch.load(self._checkpoint, weights_only=True) if self._checkpoint.exists() else None
        if checkpoint is not None:
            self.progress = Progress(**checkpoint["progress"])
        self._begin()
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint["model"])
            for optimizer, state in zip(self.optimizers, checkpoint["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        elif base is not None:
            self.model.load_state_dict(grown(base, size))

    def _begin(self) -> None:
        """Create model and optimizers, with layers shared as in `progress.shared`."""
        model: Any = build(self.size, self.tokenizer, self.progress.shared)
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").train()
        inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
        matrix_ids = {id(p) for p in inner}
        other_parameters = [p for p in model.parameters() if id(p) not in matrix_ids]
        self.optimizers = [
            torch.optim.Muon(inner, lr=self.size.matrix_rate, weight_decay=0.0),
            torch.optim.AdamW(other_parameters, lr=self.size.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._rates = [self.size.matrix_rate, self.size.other_rate]

    def _share(self) -> None:
        """Copy the layer that looks up facts to all later layers except the last, and share its weights among them."""
        first, last = lookup_layer(self.model, self.language), self.size.layers - 1
        previous_state = self.model.state_dict()
        self.progress.shared = [min(layer, first) if layer < last else last for layer in range(last + 1)]
        self._begin()
        state = self.model.state_dict()
        for name in state:
            part = name.split(".")
            if "layers" in part:
                part[2] = str(self.progress.shared[int(part[2])])
            state[name] = previous_state[".".join(part)]
        self.model.load_state_dict(state)

    def run(self, minutes: float) -> bool:
        """Train until all stages are done or `minutes` are over. Return whether all stages are done."""
        start_time = time.monotonic()
        with tqdm(unit="step", initial=self.progress.step) as bar:
            while self.progress.stage < len(self.size.stages):
                self._step(bar)
                if self.progress.step % 200 == 0 or time.monotonic() - start_time > 60 * minutes:
                    self._save()
                if time.monotonic() - start_time > 60 * minutes:
                    return False
        self._save()
        return True

    def _step(self, bar: tqdm) -> None:
        progress, size = self.progress, self.size
        stage, started = size.stages[progress.stage], time.monotonic()
        last = progress.stage == len(size.stages) - 1
        scale = size.rate(progress.stage, progress.in_stage)
        for optimizer, rate in zip(self.optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale * min(1.0, (progress.step + 1) / 100)
        rng = np.random.default_rng([self.seed, progress.step])  # the same data after a restart
        batch = draw(self.language, rng, stage, max(1, size.tokens_per_step // stage.length))
        answers, text, shares = losses(self.model, batch)
        (answers + stage.text_weight * text if stage.text_weight else answers).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for kind, share in shares.items():
            progress.shares[kind] = 0.95 * progress.shares.get(kind, share) + 0.05 * share
        progress.step, progress.in_stage = progress.step + 1, progress.in_stage + 1
        progress.seconds += time.monotonic() - started
        if progress.step % 50 == 0:
            progress.curve.append(
                {"step": progress.step, "length": stage.length, "answers": float(answers), "text": float(text)}
                | {"seconds": round(progress.seconds), "right": {k: round(v, 3) for k, v in progress.shares.items()}}
            )
            bar.set_postfix(
                length=stage.length, text=f"{float(text):.2f}", **{k: f"{v:.2f}" for k, v in progress.shares.items()}
            )
        bar.update()
        learned = all(progress.shares.get(kind, 0) >= size.learned for kind in stage.kinds)
        is_finished = (learned and progress.in_stage >= stage.least_steps) or progress.in_stage >= stage.most_steps
        if progress.in_stage >= size.final_steps if last else is_finished:
            progress.stage, progress.in_stage, progress.shares = progress.stage + 1, 0, {}
            if progress.stage == size.shares_from and not size.continues:
                self._share()

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        partial = self._checkpoint.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(self._checkpoint)
        write(self.out / _CURVE, json.dumps(self.progress.curve, indent=1) + "\n")


def read_text(path: Path) -> str:
    """Read a text file, gzipped or not."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return file.read()


def prepare(
    text_path: Path, out: Path, megabytes: int, base: Path | None
) -> tuple[PreTrainedTokenizerBase, np.ndarray]:
    """Return the tokenizer (that of `base`, if given) and the text as ids. Both are made once per output folder.

    Raises:
        EvalError: The folder has files, but is not that of a run.
    """
    check_folder(out, _CURVE)
    check_file(out / _CURVE, r'\[(\]|\s*\{\s*"step":)')
    folder, encoded = out / "tokenizer", out / "text.npy"
    if not encoded.exists():
        out.mkdir(parents=True, exist_ok=True)
        if not (out / _CURVE).exists():
            write(out / _CURVE, "[]\n")
        text = read_text(text_path)
        step = max(1, len(text) // (megabytes << 20))  # take slices from the whole text
        pieces = [text[i : i + 4096] for i in range(0, len(text) - 4096, 4096 * step)]
        tokenizer = train_tokenizer(pieces) if base is None else PreTrainedTokenizerFast.from_pretrained(base)
        tokenizer.save_pretrained(folder)
        rows = tokenizer(pieces, add_special_tokens=False)["input_ids"]
        with replacing(encoded) as temporary:
            np.save(temporary, np.concatenate([np.array(row, np.uint16) for row in rows]))
    return PreTrainedTokenizerFast.from_pretrained(folder), np.load(encoded).astype(np.int64)


def main(
    text: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Natural text, .txt or .txt.gz.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and, at the end, the model with its curve.")],
    size: Annotated[str, typer.Option(help=f"One of: {', '.join(SIZES)}.")] = "xs",
    continue_from: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Folder of the model to continue from; required by the long sizes."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Time limit; run the same command again to continue.")] = 600,
    threads: Annotated[int, typer.Option(help="Number of CPU threads; 0: PyTorch's choice.")] = 0,
    seed: Annotated[int, typer.Option(help="Random seed of weights, contexts and questions.")] = 0,
    megabytes: Annotated[int, typer.Option(min=1, help="Maximum size of the text that is used, in MB.")] = 8,
) -> None:
    """Train a reference model on the generated language.

    From scratch, in about 40 minutes of one CPU core:

        python -m eval.reference.train --size xs --text books.txt.gz --out runs/xs

    From another model, for longer contexts:

        python -m eval.reference.train --size long --continue-from eval/reference/xs --text books.txt.gz --out runs/long

    Then train with --size long-settled --continue-from runs/long/model, without the kinds that were not learned.
    Continue from that model with --size long-chains, which trains those kinds: chains of copies, and several values of
    one key. eval/reference/long was made in this way.

    The folder of --out contains checkpoint.pt and curve.json during training, and model/ when it is done. After
    an interruption, or when --minutes are over, the same command resumes training. Sizes are defined in recipes.py.
    """
    if size not in SIZES:
        raise typer.BadParameter(f"{size} is not one of {', '.join(SIZES)}", param_hint="--size")
    recipe = SIZES[size]
    if recipe.continues != (continue_from is not None):
        needs = (
            "continues from another model; pass the folder of that model"
            if recipe.continues
            else "is trained from scratch"
        )
        raise typer.BadParameter(f"{size} {needs}", param_hint="--continue-from")
    if threads:
        torch.set_num_threads(threads)
    try:
        tokenizer, ids = prepare(text, out, megabytes, continue_from)
    except EvalError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from None
    base = None
    if continue_from is not None:
        base = Qwen2ForCausalLM.from_pretrained(continue_from, dtype=torch.float32)
    training = Training(recipe, Language(tokenizer, ids), tokenizer, out, seed, base)
    if training.run(minutes):
        unshared(training.model).save_pretrained(out / "model")
        tokenizer.save_pretrained(out / "model")
        (out / "model" / "curve.json").write_text(json.dumps(training.progress.curve) + "\n")
        draw_curve(training.progress.curve, out / "model" / "curve.png")
        typer.echo(f"trained: {out / 'model'}")


if __name__ == "__main__":
    typer.run(main)
