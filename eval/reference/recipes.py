"""Architecture and training schedule of each reference model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .language import KINDS, LONG_KINDS, MAX_VALUES, MIN_VALUES


@dataclass(frozen=True)
class Stage:
    """Training stage with one sequence length and one set of question kinds."""

    length: int
    kinds: tuple[str, ...]
    density: tuple[float, float] = (0.3, 0.7)
    """Range of the share of tokens in statements."""
    text_weight: float = 0.2
    """Weight of the loss on natural text; the loss on answers has weight 1."""
    repeats: bool = False
    """True if a question may be repeated. Models only learn lookups from answers given a few tokens before, but they do
    not learn two hops while answers can be looked up there."""
    least_steps: int = 100
    most_steps: int = 1500
    """Steps after which the next stage begins in any case; the rest is learned while the learning rates fall."""
    questions: int = 32
    """Maximum number of questions after each context."""
    min_values: int = MIN_VALUES
    max_values: int = MAX_VALUES
    """Maximum number of values of a key and of copies in a chain; `least` is the minimum."""
    rates: tuple[float, float] = (1.0, 1.0)
    """Factors on the learning rates of the size, at the beginning of the stage and at `most_steps`.

    In the last stage the learning rates end at 0.
    """


@dataclass(frozen=True)
class Size:
    """Architecture and training schedule of one reference model.

    A model that `continues` starts with the weights of another model of the same width, and shares layers in the same
    way. It may have more heads and layers, and another base of RoPE.
    """

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    layers: int
    stages: tuple[Stage, ...]
    tokens_per_step: int = 4608
    matrix_rate: float = 0.01
    other_rate: float = 2e-3
    head_dim: int = 32
    rope_theta: float = 10000.0
    continues: bool = False
    own_layers: int = 2
    """Number of first layers that, like the last one, start with their own weights; the others share theirs."""
    shares_from: int = 5
    """Index of the first stage with two hops. From there on, the layer that looks up facts is shared instead."""
    learned: float = 0.97
    final_steps: int = 1600
    """Number of steps of the last stage, in which the learning rates fall to 0."""

    def rate(self, stage: int, step: int) -> float:
        """Return the factor on the learning rates at a step of a stage, both counted from 0."""
        current, last = self.stages[stage], stage == len(self.stages) - 1
        begin, end = (current.rates[0], 0.0) if last else current.rates
        progress = min(1.0, step / (self.final_steps if last else current.most_steps))
        return end + (begin - end) * 0.5 * (1 + math.cos(math.pi * progress))


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
_LONGER = (
    Stage(192, LONG_KINDS, (0.5, 1.0), 0.1, most_steps=400, questions=24),
    Stage(768, LONG_KINDS, (0.05, 0.7), most_steps=100, questions=64),
    Stage(2048, LONG_KINDS, (0.02, 0.6), most_steps=80, questions=64),
    Stage(4608, LONG_KINDS, (0.005, 0.6), questions=64),
)
_SETTLING = (
    Stage(1024, KINDS, (0.05, 0.7), most_steps=100, questions=64),
    Stage(4608, KINDS, (0.005, 0.6), questions=64),
)
_CHAINS = (
    # add one link per stage, without other kinds: with all kinds, even chains of two are not learned in 400 steps
    Stage(96, ("fact", "track"), (0.7, 1.0), 0.1, most_steps=320, questions=12, max_values=2),
    Stage(96, ("fact", "track"), (0.7, 1.0), 0.1, most_steps=290, questions=12, max_values=3),
    Stage(96, ("fact", "track"), (0.8, 1.0), 0.02, most_steps=490, questions=12),
    # values also need their own stage
    Stage(96, ("fact", "values"), (0.7, 1.0), 0.0, most_steps=140, questions=12),
    Stage(96, ("fact", "values", "track"), (0.7, 1.0), 0.02, most_steps=450, questions=12, rates=(1.0, 0.7)),
    Stage(192, LONG_KINDS, (0.5, 1.0), 0.03, most_steps=400, questions=24, rates=(1.0, 0.5)),
    Stage(384, LONG_KINDS, (0.3, 0.9), 0.03, most_steps=220, questions=28, rates=(0.8, 0.4)),
    Stage(1024, LONG_KINDS, (0.1, 0.7), 0.05, most_steps=270, questions=48, min_values=3, rates=(0.8, 0.4)),
    Stage(2048, LONG_KINDS, (0.05, 0.65), 0.05, most_steps=120, questions=64, rates=(0.6, 0.4)),
    Stage(4608, LONG_KINDS, (0.03, 0.65), 0.1, questions=72, min_values=3, rates=(0.65, 0.0)),
)
SIZES = {
    "xs": Size(128, 4, 2, 384, 8, (*_GROWING, Stage(640, KINDS))),
    "m": Size(160, 5, 1, 448, 12, (*_GROWING, Stage(768, KINDS), Stage(1536, KINDS), Stage(4352, KINDS)), 65536),
    # eval/reference/long is made by three consecutive runs; this one continues from "xs"
    "long": Size(128, 4, 4, 384, 8, _LONGER, 5120, 0.006, 1.2e-3, rope_theta=80000.0, continues=True, final_steps=200),
    # continues from "long", without the kinds that it did not learn
    "long-settled": Size(
        128, 4, 4, 384, 8, _SETTLING, 5120, 0.004, 8e-4, rope_theta=80000.0, continues=True, final_steps=70
    ),
    # continues from either (the shipped model from "long-settled"), with the kinds that they did not learn: each link
    # of a chain takes one or two layers; with this RoPE base, 8 of the 16 dimension pairs of a head, instead of 5,
    # rotate less than half a turn within 4,608 tokens
    "long-chains": Size(
        128, 4, 4, 384, 12, _CHAINS, 4608, 0.006, 1.8e-3, rope_theta=4e6, continues=True, final_steps=400
    ),
}
