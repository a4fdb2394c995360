"""Train a reference model from scratch on the generated language.

    python -m eval.reference.train --size xs --text books.txt.gz --out runs/xs

A small Qwen2 (grouped-query attention, RoPE) learns the kinds of questions one after the other on short contexts, and
then longer ones; a length is left only when it is learned, which is what makes longer ones converge. Interrupted, it
goes on where the last checkpoint was.
"""

from __future__ import annotations

import gzip
import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from .language import KINDS, Language, train_tokenizer


@dataclass(frozen=True)
class Stage:
    """A length of sequences and the kinds of questions in them."""

    length: int
    kinds: tuple[str, ...]
    density: tuple[float, float] = (0.3, 0.7)
    """Range of the share of tokens that statements take."""
    text_weight: float = 0.2
    """Of the loss on natural text, beside the loss on answers."""
    least_steps: int = 100
    most_steps: int = 1500
    """After these the next length comes, learned or not: what is left is learned while the rates fall."""


@dataclass(frozen=True)
class Size:
    """One reference model and how it is trained."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    stages: tuple[Stage, ...]
    tokens_per_step: int = 4608
    matrix_rate: float = 0.01
    other_rate: float = 2e-3
    learned: float = 0.97
    final_steps: int = 2500
    """Steps of the last stage, while the rates fall to 0."""


_GROWING = (
    Stage(64, ("fact",), (0.9, 1.0), 0.0),
    Stage(96, ("fact",), (0.6, 1.0), 0.05),
    Stage(96, ("fact", "shot"), (0.6, 1.0), 0.05),
    Stage(96, ("fact", "shot", "alias", "back"), (0.6, 1.0), 0.05),
    Stage(96, KINDS, (0.5, 1.0), 0.1),
    Stage(192, KINDS),
    Stage(384, KINDS),
)
SIZES = {
    "xs": Size(128, 8, 4, 2, 384, (*_GROWING, Stage(640, KINDS))),
    "m": Size(256, 12, 8, 4, 768, (*_GROWING, Stage(768, KINDS), Stage(1536, KINDS), Stage(4352, KINDS)), 65536),
}


def build(size: Size, tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    """The model, untrained. Embeddings are not tied: keys are read and never said, and tying pushes them together."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            max_position_embeddings=2 * size.stages[-1].length,
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


@dataclass
class Batch:
    """Sequences to learn from; all int64 or float32 `[rows, length]`."""

    ids: torch.Tensor
    kind: torch.Tensor
    """-1: nothing to learn, -2: natural text, otherwise the number of a kind in `KINDS`, at the tokens of answers."""


def draw(language: Language, rng: np.random.Generator, stage: Stage, rows: int) -> Batch:
    """Contexts with as many questions as fill the sequence."""
    kinds = dict.fromkeys(stage.kinds, 1.0)
    ids = np.zeros((rows, stage.length), np.int64)
    kind = np.full((rows, stage.length), -1, np.int64)
    for row in range(rows):
        questions = min(32, stage.length // 8)
        context = language.context(rng, stage.length - 4 * questions, questions, kinds, stage.density)
        flat = [token for document in context.documents for token in document]
        labels = np.where(context.is_text, -2, -1).tolist()
        for question in context.questions:
            flat += [*question.prompt, *question.answer]
            labels += [-1] * len(question.prompt) + [KINDS.index(question.kind)] * len(question.answer)
        count = min(len(flat), stage.length)
        ids[row, :count], kind[row, :count] = flat[:count], labels[:count]
    return Batch(torch.from_numpy(ids), torch.from_numpy(kind))


def losses(model: Qwen2ForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Mean loss on answers, mean loss on text, and the share of right answer tokens of each kind."""
    device = model.device
    ids, kind = batch.ids.to(device), batch.kind.to(device)[:, 1:]
    with torch.autocast(device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = kind != -1
        logits = model.lm_head(hidden[wanted])
    targets, kinds = ids[:, 1:][wanted], kind[wanted]
    each = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    right = logits.argmax(-1) == targets
    shares = {name: float(right[kinds == i].float().mean()) for i, name in enumerate(KINDS) if (kinds == i).any()}
    return each[kinds >= 0].mean(), each[kinds == -2].mean(), shares


@dataclass
class Progress:
    """Where training stands; saved with every checkpoint."""

    stage: int = 0
    step: int = 0
    in_stage: int = 0
    seconds: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    """Moving averages of right answer tokens, by kind."""
    curve: list[dict[str, Any]] = field(default_factory=list)


class Training:
    """One run: model, optimizers, data and what is known of its progress."""

    def __init__(
        self, size: Size, language: Language, tokenizer: PreTrainedTokenizerBase, out: Path, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.size, self.language, self.out, self.seed = size, language, out, seed
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = build(size, tokenizer).to(device)
        inner = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
        known = {id(p) for p in inner}
        rest = [p for p in self.model.parameters() if id(p) not in known]
        self.optimizers = [
            torch.optim.Muon(inner, lr=size.matrix_rate, weight_decay=0.0),
            torch.optim.AdamW(rest, lr=size.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._rates = [size.matrix_rate, size.other_rate]
        self.progress = Progress()
        self._checkpoint = out / "checkpoint.pt"
        if self._checkpoint.exists():
            self._load()

    def run(self, minutes: float) -> bool:
        """Train for at most so long. Returns whether all stages are done."""
        self.model.train()
        began = time.monotonic()
        with tqdm(unit="step", initial=self.progress.step) as bar:
            while self.progress.stage < len(self.size.stages):
                self._step(bar)
                if self.progress.step % 200 == 0 or time.monotonic() - began > 60 * minutes:
                    self._save()
                if time.monotonic() - began > 60 * minutes:
                    return False
        self._save()
        return True

    def _step(self, bar: tqdm) -> None:
        now, size = self.progress, self.size
        stage, started = size.stages[now.stage], time.monotonic()
        last = now.stage == len(size.stages) - 1
        scale = 1.0
        if last:
            scale = 0.5 * (1 + math.cos(math.pi * min(1.0, now.in_stage / size.final_steps)))
        for optimizer, rate in zip(self.optimizers, self._rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale * min(1.0, (now.step + 1) / 100)
        rng = np.random.default_rng([self.seed, now.step])  # the same data after an interruption
        batch = draw(self.language, rng, stage, max(1, size.tokens_per_step // stage.length))
        answers, text, shares = losses(self.model, batch)
        (answers + stage.text_weight * text if stage.text_weight else answers).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for kind, share in shares.items():
            now.shares[kind] = 0.95 * now.shares.get(kind, share) + 0.05 * share
        now.step, now.in_stage = now.step + 1, now.in_stage + 1
        now.seconds += time.monotonic() - started
        if now.step % 50 == 0:
            now.curve.append(
                {"step": now.step, "length": stage.length, "answers": float(answers), "text": float(text)}
                | {"seconds": round(now.seconds), "right": {k: round(v, 3) for k, v in now.shares.items()}}
            )
            bar.set_postfix(
                length=stage.length, text=f"{float(text):.2f}", **{k: f"{v:.2f}" for k, v in now.shares.items()}
            )
        bar.update()
        learned = all(now.shares.get(kind, 0) >= size.learned for kind in stage.kinds)
        done = (learned and now.in_stage >= stage.least_steps) or now.in_stage >= stage.most_steps
        if now.in_stage >= size.final_steps if last else done:
            now.stage, now.in_stage, now.shares = now.stage + 1, 0, {}

    def _save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": asdict(self.progress),
        }
        partial = self._checkpoint.with_suffix(".part")
        torch.save(state, partial)
        partial.replace(self._checkpoint)
        (self.out / "curve.json").write_text(json.dumps(self.progress.curve, indent=1) + "\n")

    def _load(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True, map_location=self.model.device)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])


def read_text(path: Path) -> str:
    """A text file, gzipped or not."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return file.read()


def prepare(text_path: Path, out: Path, megabytes: int) -> tuple[PreTrainedTokenizerBase, np.ndarray]:
    """The tokenizer, and the text as ids; made once for each output folder."""
    folder, encoded = out / "tokenizer", out / "text.npy"
    if not encoded.exists():
        out.mkdir(parents=True, exist_ok=True)
        text = read_text(text_path)
        step = max(1, len(text) // (megabytes << 20))  # slices from everywhere in the collection
        pieces = [text[i : i + 4096] for i in range(0, len(text) - 4096, 4096 * step)]
        tokenizer = train_tokenizer(pieces)
        tokenizer.save_pretrained(folder)
        rows = tokenizer(pieces, add_special_tokens=False)["input_ids"]
        np.save(encoded, np.concatenate([np.array(row, np.uint16) for row in rows]))
    return PreTrainedTokenizerFast.from_pretrained(folder), np.load(encoded).astype(np.int64)


def main(
    text: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="Natural text, .txt or .txt.gz.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and, at the end, the model.")],
    size: Annotated[str, typer.Option(help=f"One of: {', '.join(SIZES)}.")] = "xs",
    minutes: Annotated[float, typer.Option(help="Stop after this long; run again to go on.")] = 600,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves it to PyTorch.")] = 0,
    seed: int = 0,
    megabytes: Annotated[int, typer.Option(min=1, help="How much of the text is used.")] = 8,
) -> None:
    """Train a reference model."""
    if threads:
        torch.set_num_threads(threads)
    tokenizer, ids = prepare(text, out, megabytes)
    training = Training(SIZES[size], Language(tokenizer, ids), tokenizer, out, seed)
    if training.run(minutes):
        model = training.model.to(torch.bfloat16)
        model.save_pretrained(out / "model")
        tokenizer.save_pretrained(out / "model")
        typer.echo(f"trained: {out / 'model'}")


if __name__ == "__main__":
    typer.run(main)
