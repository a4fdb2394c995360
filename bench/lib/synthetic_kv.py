"""Synthetic keys, values and queries of a long context, with the locality of a trained model.

    PYTHONPATH=.:bench python -m lib.synthetic_kv --model eval/reference/long    # compares both

With random weights, keys have no structure and queries are unrelated to them, so each token would select other chunks.
Keys are therefore synthesized in rotated form. Each head has one topic per `TOKENS_OF_TOPIC` tokens. A context consists
of runs of tokens (geometric lengths, mean `RUN`), each with a random topic. A key is the direction of its topic plus
noise of the same size. The queries of a KV head's group share half of their energy. The share `SLOW` of each query is
an autoregressive process over tokens (coefficient `STAYS`), so that the overlap of selections decays with distance. The
rest is new at each token, so that the overlap already drops between neighboring tokens. `SHARPNESS` is the standard
deviation of logits.

The constants were fitted by hand to eval/reference/long when it had 8 layers (commit 942a71a): 64 tokens of its
language after 4,096, index "clusters", means over layers and heads. The table compares it with synthetic KV of the same
size, and with the model of 12 layers, whose selections change less, so synthetic KV is the harder case:

    budget                                               1.56 %                   6.25 %
                                                 8 l.   made   12 l.      8 l.   made   12 l.
    a chosen chunk is chosen again 1 token on    .470   .433   .607       .609   .566   .708
                                   4 tokens on   .364   .343   .490       .515   .478   .604
                                  16 tokens on   .142   .160   .245       .314   .295   .431
    found in a window ×2, least recently chosen  .620   .616   .726       .746   .778   .811
    ... or lookahead                             .620   .618   .727       .747   .780   .813
    attention to the selected chunks             .531   .386   .669       .811   .711   .872
    variance of chunk means between clusters     .888   .920   .916       the same
    tokens a query attends to, exp(entropy)       8.9    8.7   12.9       the same
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lib.pages import table
from transformers import PretrainedConfig, PreTrainedModel

from hf_tiered_cache.selection.clusters import ClusterIndex
from hf_tiered_cache.selection.decode_index import mean_keys, rank
from hf_tiered_cache.selection.held import Window

TOKENS_OF_TOPIC, RUN = 64, 16
NOISE = 1.0
SLOW, STAYS = 0.88, 0.97
SHARPNESS = 6.5
LAGS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Shape:
    """Dimensions of one layer."""

    heads: int
    kv_heads: int
    dim: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Shape:
        """Return the dimensions of a model's layers."""
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(config.num_attention_heads, config.num_key_value_heads, dim)


def keys_and_values(shape: Shape, tokens: int, seed: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotated keys, and values of the row and layer in `seed`, float32 `[kv_heads, tokens, dim]` each."""
    random = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    count = max(2, tokens // TOKENS_OF_TOPIC)
    topics = torch.randn(shape.kv_heads, count, shape.dim, generator=random)
    is_start = torch.rand(shape.kv_heads, tokens, generator=random) < 1 / RUN
    start = (is_start * torch.arange(tokens)).cummax(1).values  # of each token's run
    topic = torch.randint(count, (shape.kv_heads, tokens), generator=random).gather(1, start)
    keys = torch.randn(shape.kv_heads, tokens, shape.dim, generator=random).mul_(NOISE)
    for head, topic_of_tokens in zip(keys, zip(topics, topic, strict=True), strict=True):
        head += topic_of_tokens[0].index_select(0, topic_of_tokens[1])
    values = torch.randn(shape.kv_heads, tokens, shape.dim, generator=random)
    return keys.div_((1 + NOISE**2) ** 0.5), values


def queries(shape: Shape, tokens: int, seed: tuple[int, ...]) -> torch.Tensor:
    """Return rotated queries of the tokens after the context of the same seed, float32 `[heads, tokens, dim]`."""
    random = torch.Generator().manual_seed(int(np.random.SeedSequence((*seed, 1)).generate_state(1)[0]))

    def random_walk(heads: int) -> torch.Tensor:
        fresh = torch.randn(heads, tokens, shape.dim, generator=random)
        state, slow = fresh[:, 0], torch.empty_like(fresh)
        for token in range(tokens):
            slow[:, token] = state
            state = STAYS * state + (1 - STAYS**2) ** 0.5 * torch.randn(heads, shape.dim, generator=random)
        return SLOW**0.5 * slow + (1 - SLOW) ** 0.5 * torch.randn(heads, tokens, shape.dim, generator=random)

    common = random_walk(shape.kv_heads).repeat_interleave(shape.heads // shape.kv_heads, 0)
    return (common + random_walk(shape.heads)) * (SHARPNESS * 0.5**0.5)


def rotate(tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """Rotate `[..., n, dim]` to the positions of cos and sin, `[n, dim]` each, or back."""
    half = tensor.shape[-1] // 2
    crosswise = torch.cat([-tensor[..., half:], tensor[..., :half]], -1)
    return tensor * cos + crosswise * (-sin if inverse else sin)


# --- locality


def locality(keys: torch.Tensor, query_states: torch.Tensor, budget: float) -> dict[str, float]:
    """Measure how selections by queries `[heads, tokens, dim]` change over keys `[kv_heads, n, dim]`.

    Results are means over KV heads.
    """
    index = ClusterIndex.build(keys, 8)
    heads, chunks, steps = len(keys), index.chunks, query_states.shape[1]
    count = max(1, int(budget * chunks))
    pool = min(chunks, int(1.25 * count))
    ranked = np.stack([rank([index], query_states[:, step : step + 1], None, pool).numpy() for step in range(steps)])
    mask = np.zeros((steps, heads, chunks), bool)
    np.put_along_axis(mask, ranked[..., :count], True, 2)
    figures = {
        f"selected again after {lag}": float((mask[lag:] & mask[:-lag]).sum() / mask[lag:].sum()) for lag in LAGS
    }
    for policy, times in (("lru", 1), ("lru", 2), ("lookahead", 2), ("lru", 4), ("lookahead", 4)):
        window, fetched = Window(count, heads, times * count, chunks, policy), 0
        for step in range(steps):
            moves = window.plan(ranked[step, :, :count], ranked[step])
            window.commit(moves)
            fetched += len(moves.fetched.chunks) if step else 0
        figures[f"hits, {policy} ×{times}"] = 1 - fetched / ((steps - 1) * heads * count)
    weights = (query_states.unflatten(0, (heads, -1)).flatten(1, 2) @ keys.transpose(1, 2)).mul_(keys.shape[2] ** -0.5)
    weights = weights.softmax(-1).unflatten(1, (-1, steps))  # [kv_heads, group, steps, n]
    figures["tokens attended to"] = float((-(weights * weights.clamp_min(1e-30).log()).sum(-1)).exp().mean())
    by_chunk = weights.mean(1).unflatten(-1, (chunks, 8)).sum(-1).transpose(0, 1).numpy()  # [steps, kv_heads, chunks]
    figures["attention to selected chunks"] = float((by_chunk * mask).sum() / (steps * heads))
    return figures | {"variance explained by clusters": explained(index, mean_keys(keys, 8))}


def explained(index: ClusterIndex, means: torch.Tensor) -> float:
    """Return the share of the variance of chunk means, `[kv_heads, chunks, dim]`, that is between clusters."""
    centroids = index.centroids.float().take_along_dim(index.cluster_of[..., None], 1)
    return 1 - float((means - centroids).square().sum() / (means - means.mean(1, keepdim=True)).square().sum())


def of_model(model: PreTrainedModel, ids: torch.Tensor, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the rotated keys of the first `tokens` of int64 `[n]`, and rotated queries of the rest, by layer."""
    from transformers import DynamicCache

    projected: dict[int, torch.Tensor] = {}
    shape, cache = Shape.of(model.config), DynamicCache(config=model.config)
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(
            lambda _, inputs, out, number=number: projected.update({number: out[0]})
        )
        for number, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(input_ids=ids[None], past_key_values=cache, logits_to_keep=1)
        cos, sin = model.model.rotary_emb(projected[0], torch.arange(len(ids))[None])
    for number, hook in enumerate(hooks):
        hook.remove()
        query_states = rotate(projected[number].unflatten(-1, (shape.heads, shape.dim)).transpose(0, 1), cos[0], sin[0])
        yield cache.layers[number].keys[0, :, :tokens], query_states[:, tokens:]


def mean_of(figures: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each figure."""
    return {name: float(np.mean([row[name] for row in figures])) for name in figures[0]}


def main() -> None:
    """Compare the locality of a model with that of synthetic KV."""
    from eval.reference.check import contexts
    from eval.reference.language import KINDS
    from eval.reference.queries import language_of, load

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("eval/reference/long"))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--decoded", type=int, default=64)
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.0156, 0.0312, 0.0625])
    arguments = parser.parse_args()
    model, tokens = load(arguments.model), arguments.tokens
    language, length = language_of(arguments.model), tokens + arguments.decoded
    context, _ = next(iter(contexts(language, length + 64, 1, 1, KINDS)))
    ids = torch.tensor([token for document in context.documents for token in document][:length])
    shape, layers = Shape.of(model.config), model.config.num_hidden_layers
    model_layers = list(of_model(model, ids, tokens))
    synthetic_layers = [
        (keys_and_values(shape, tokens, (0, layer))[0], queries(shape, arguments.decoded, (0, layer)))
        for layer in range(layers)
    ]
    for budget in arguments.budgets:
        means = [
            mean_of([locality(*layer, budget) for layer in kind_layers])
            for kind_layers in (model_layers, synthetic_layers)
        ]
        rows = [[name, *(f"{kind_means[name]:.3f}" for kind_means in means)] for name in means[0]]
        print(f"\nbudget {budget}\n\n" + table(["", arguments.model.name, "synthetic"], rows))


if __name__ == "__main__":
    main()
