"""Train a reference model from scratch on the generated language.

    python -m eval.reference.train --size xs --text books.txt.gz --out runs/xs

A small Qwen2 (grouped-query attention, RoPE) learns the kinds of questions one after the other on short contexts, and
then longer ones; a length is left only when it is learned, which is what makes longer ones converge. The layers between
the second and the last share their weights (Dehghani et al. 2018, Liu et al. 2024), without which labels by example are
not learned; before two hops are asked for, the weights of the layer that looks facts up are copied to those behind it
but the last, and shared from then on: a layer that comes again can look up what the one before has found, and looks
where that one looked, as neighbouring layers of large models do. In the files each layer has weights of its own.
Interrupted, training goes on where the last checkpoint was.
"""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import torch
import typer
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from .language import KINDS, Language, train_tokenizer

matplotlib.use("Agg")
from matplotlib import pyplot


@dataclass(frozen=True)
class Stage:
    """A length of sequences and the kinds of questions in them."""

    length: int
    kinds: tuple[str, ...]
    density: tuple[float, float] = (0.3, 0.7)
    """Range of the share of tokens that statements take."""
    text_weight: float = 0.2
    """Of the loss on natural text, beside the loss on answers."""
    repeats: bool = False
    """Whether the same may be asked twice: looking up is learned on what was answered a few tokens before, or not at
    all. Two hops are not learned as long as answers can be looked up there."""
    least_steps: int = 100
    most_steps: int = 1500
    """After these the next length comes, learned or not: what is left is learned while the rates fall."""


@dataclass(frozen=True)
class Size:
    """One reference model and how it is trained."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    layers: int
    stages: tuple[Stage, ...]
    tokens_per_step: int = 4608
    matrix_rate: float = 0.01
    other_rate: float = 2e-3
    own_layers: int = 2
    """The first layers, which with the last one have weights of their own from the start; the others share theirs."""
    shares_from: int = 5
    """The stage from which on they share those of the layer that looks facts up: the first that asks for two hops."""
    learned: float = 0.97
    final_steps: int = 1600
    """Steps of the last stage, while the rates fall to 0."""


_GROWING = (
    Stage(32, ("fact",), (0.9, 1.0), 0.0, repeats=True),
    Stage(64, ("fact",), (0.9, 1.0), 0.0, repeats=True),
    Stage(96, ("fact",), (0.6, 1.0), 0.05, repeats=True),
    Stage(96, ("fact", "shot"), (0.6, 1.0), 0.05, repeats=True),
    Stage(96, ("fact", "shot", "alias", "back"), (0.6, 1.0), 0.05, repeats=True),
    Stage(96, ("fact", "hop"), (0.8, 1.0), 0.05),
    Stage(96, KINDS, (0.5, 1.0), 0.1),
    Stage(192, KINDS),
    Stage(384, KINDS),
)
SIZES = {
    "xs": Size(128, 4, 2, 384, 8, (*_GROWING, Stage(640, KINDS))),
    "m": Size(160, 5, 1, 448, 12, (*_GROWING, Stage(768, KINDS), Stage(1536, KINDS), Stage(4352, KINDS)), 65536),
}


def build(size: Size, tokenizer: PreTrainedTokenizerBase, shared: Sequence[int]) -> Qwen2ForCausalLM:
    """The model, untrained. Embeddings are not tied: keys are read and never said, and tying pushes them together.

    Args:
        shared: for each layer, which is the first of the same weights.
    """
    model = Qwen2ForCausalLM(
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
    layers = model.model.layers
    for number, first in enumerate(shared):
        layers[number] = layers[first]
    return model


def unshared(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """The same model in bfloat16 with weights of its own in each layer, as files hold it."""
    alone: Any = Qwen2ForCausalLM(model.config)
    alone.load_state_dict(model.state_dict())
    return alone.to(torch.bfloat16)


def lookup_layer(model: Qwen2ForCausalLM, language: Language, contexts: int = 24) -> int:
    """The layer, the last one apart, in which a question about a fact attends most to where its answer stands."""
    found = torch.zeros(len(model.model.layers) - 1)
    model.set_attn_implementation("eager")  # the one that gives weights
    for number in range(contexts):
        context = language.context(np.random.default_rng([0, number]), 64, 4, {"fact": 1.0}, (0.8, 1.0))
        flat = [token for document in context.documents for token in document]
        for question in context.questions:
            ids = torch.tensor([[*flat, *question.prompt]], device=model.device)
            with torch.no_grad():
                weights = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
            at = flat.index(question.answer[0])
            found += torch.tensor([float(layer[0, :, -1, at].mean()) for layer in weights[:-1]])
    model.set_attn_implementation("sdpa")
    return int(found.argmax())


@dataclass
class Batch:
    """Sequences to learn from; all int64 `[rows, length]`."""

    ids: torch.Tensor
    targets: torch.Tensor
    """What to predict in each token's place: itself, but behind a copy what it stands for. Two hops that are asked for
    by the answer alone are not learned; with the first one asked for too, they are."""
    kind: torch.Tensor
    """Of targets: -1 is nothing to learn, -2 natural text, -3 what a copy stands for, else they are of an answer to
    the kind of question of that number in `KINDS`."""


def draw(language: Language, rng: np.random.Generator, stage: Stage, rows: int) -> Batch:
    """Contexts with as many questions as fill the sequence."""
    kinds = dict.fromkeys(stage.kinds, 1.0)
    ids = np.zeros((rows, stage.length), np.int64)
    targets, kind = ids.copy(), np.full((rows, stage.length), -1, np.int64)
    for row in range(rows):
        questions = min(32, stage.length // 8)
        context = language.context(rng, stage.length - 4 * questions, questions, kinds, stage.density, stage.repeats)
        flat = [token for document in context.documents for token in document]
        labels = np.where(context.is_text, -2, -1).tolist()
        for question in context.questions:
            flat += [*question.prompt, *question.answer]
            labels += [-1] * len(question.prompt) + [KINDS.index(question.kind)] * len(question.answer)
        count = min(len(flat), stage.length)
        ids[row, :count], kind[row, :count] = flat[:count], labels[:count]
        targets[row] = ids[row]
        copies = np.flatnonzero(context.meant >= 0)
        targets[row, copies + 1], kind[row, copies + 1] = context.meant[copies], -3
    return Batch(*map(torch.from_numpy, (ids, targets, kind)))


def losses(model: Qwen2ForCausalLM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Mean loss on answers, mean loss on text, and the share of right answer tokens of each kind."""
    device = model.device
    ids, kind = batch.ids.to(device), batch.kind.to(device)[:, 1:]
    with torch.autocast(device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = kind != -1
        logits = model.lm_head(hidden[wanted])
    targets, kinds = batch.targets.to(device)[:, 1:][wanted], kind[wanted]
    each = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    right = logits.argmax(-1) == targets
    shares = {name: float(right[kinds == i].float().mean()) for i, name in enumerate(KINDS) if (kinds == i).any()}
    return each[(kinds >= 0) | (kinds == -3)].mean(), each[kinds == -2].mean(), shares


@dataclass
class Progress:
    """Where training stands; saved with every checkpoint."""

    stage: int = 0
    step: int = 0
    in_stage: int = 0
    seconds: float = 0.0
    shared: list[int] = field(default_factory=list)
    """For each layer, which is the first of the same weights."""
    shares: dict[str, float] = field(default_factory=dict)
    """Moving averages of right answer tokens, by kind."""
    curve: list[dict[str, Any]] = field(default_factory=list)


class Training:
    """One run: model, optimizers, data and what is known of its progress."""

    def __init__(
        self, size: Size, language: Language, tokenizer: PreTrainedTokenizerBase, out: Path, seed: int
    ) -> None:
        torch.manual_seed(seed)
        self.size, self.language, self.tokenizer, self.out, self.seed = size, language, tokenizer, out, seed
        middle = range(size.layers - 1)
        self.progress = Progress(shared=[*(min(layer, size.own_layers) for layer in middle), size.layers - 1])
        self._checkpoint = out / "checkpoint.pt"
        saved = torch.load(self._checkpoint, weights_only=True) if self._checkpoint.exists() else None
        if saved is not None:
            self.progress = Progress(**saved["progress"])
        self._begin()
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)

    def _begin(self) -> None:
        """Make model and optimizers, with the layers shared that are."""
        model: Any = build(self.size, self.tokenizer, self.progress.shared)
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").train()
        inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
        known = {id(p) for p in inner}
        rest = [p for p in model.parameters() if id(p) not in known]
        self.optimizers = [
            torch.optim.Muon(inner, lr=self.size.matrix_rate, weight_decay=0.0),
            torch.optim.AdamW(rest, lr=self.size.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._rates = [self.size.matrix_rate, self.size.other_rate]

    def _share(self) -> None:
        """Copy the layer that looks facts up to those behind it but the last, and let them share its weights."""
        first, last = lookup_layer(self.model, self.language), self.size.layers - 1
        before = self.model.state_dict()
        self.progress.shared = [min(layer, first) if layer < last else last for layer in range(last + 1)]
        self._begin()
        state = self.model.state_dict()
        for name in state:
            part = name.split(".")
            if "layers" in part:
                part[2] = str(self.progress.shared[int(part[2])])
            state[name] = before[".".join(part)]
        self.model.load_state_dict(state)

    def run(self, minutes: float) -> bool:
        """Train for at most so long. Returns whether all stages are done."""
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
            if now.stage == size.shares_from:
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
        (self.out / "curve.json").write_text(json.dumps(self.progress.curve, indent=1) + "\n")


def draw_curve(curve: list[dict[str, Any]], path: Path) -> None:
    """Plot losses and right answers over the steps of a run."""
    figure, (losses_axes, right_axes) = pyplot.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    steps = [point["step"] for point in curve]
    for name in ("answers", "text"):
        losses_axes.plot(steps, [point[name] for point in curve], label=name)
    losses_axes.set(xlabel="step", ylabel="loss, nats", yscale="log")
    for kind in KINDS:
        known = [(point["step"], point["right"][kind]) for point in curve if kind in point["right"]]
        right_axes.plot(*zip(*known, strict=True), label=kind)
    right_axes.set(xlabel="step", ylabel="share of answer tokens that are right")
    before = None
    for point in curve:
        if point["length"] != before:
            before = point["length"]
            right_axes.axvline(point["step"], color="0.85", zorder=0)
            right_axes.text(point["step"], 0.02, f" {before}", color="0.4", fontsize=8)
    losses_axes.legend()
    right_axes.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


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
        unshared(training.model).save_pretrained(out / "model")
        tokenizer.save_pretrained(out / "model")
        (out / "model" / "curve.json").write_text(json.dumps(training.progress.curve) + "\n")
        draw_curve(training.progress.curve, out / "model" / "curve.png")
        typer.echo(f"trained: {out / 'model'}")


if __name__ == "__main__":
    typer.run(main)
