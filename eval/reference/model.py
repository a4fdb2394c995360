"""Reference models as PyTorch modules: built from a recipe, grown from another model, or prepared for saving."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from .language import Language
from .recipes import Size


def build(size: Size, tokenizer: PreTrainedTokenizerBase, shared: Sequence[int]) -> Qwen2ForCausalLM:
    """Build an untrained model.

    Embeddings are not tied: keys are input tokens and never predicted, and tying would push their embeddings together.

    Args:
        size: Architecture of the model.
        tokenizer: Tokenizer of the model.
        shared: For each layer, the index of the first layer with the same weights.
    """
    extra_fields: dict[str, Any] = {"head_dim": size.head_dim}  # read by the model, but not a field of the class
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            max_position_embeddings=2 * size.stages[-1].length,
            rope_parameters={"rope_type": "default", "rope_theta": size.rope_theta},
            tie_word_embeddings=False,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **extra_fields,
        )
    )
    layers = model.model.layers
    for number, first in enumerate(shared):
        layers[number] = layers[first]
    return model


def unshared(model: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """Copy a model to bfloat16 with separate weights in each layer, for saving."""
    alone: Any = Qwen2ForCausalLM(model.config)
    alone.load_state_dict(model.state_dict())
    return alone.to(torch.bfloat16)


def sharing(model: Qwen2ForCausalLM, depth: int | None = None) -> list[int]:
    """Return, for each layer, the index of the first layer with the same weights: the inverse of `unshared`.

    Args:
        model: Model with equal or shared layers.
        depth: Number of layers of a model that is `grown` from `model` and shares layers in the same way; None for
            `model` itself.
    """
    layers = [layer.state_dict() for layer in model.model.layers]
    first_layers = [
        next(
            first
            for first in range(number + 1)
            if all(torch.equal(layers[first][name], layer_state[name]) for name in layer_state)
        )
        for number, layer_state in enumerate(layers)
    ]
    if depth is None or depth == len(first_layers):
        return first_layers
    return [*(first_layers[layer] for layer in _deepened(len(first_layers), depth)[:-1]), depth - 1]


def _deepened(layers: int, depth: int) -> list[int]:
    """Return, for each layer of a deeper model, its source layer. The layer before the last is repeated."""
    return [*(min(layer, layers - 2) for layer in range(depth - 1)), layers - 1]


def grown(base: Qwen2ForCausalLM, size: Size) -> dict[str, torch.Tensor]:
    """Return weights for a model with more heads or layers that computes the same function as `base`.

    With more layers, the function is nearly the same if `base` shares the layer before the last, which is repeated: it
    looks up again what was already found. Each KV head is duplicated, and the query heads of its group are distributed
    over the duplicates. If there is room for more, query heads are duplicated too, in other combinations, and the
    output weights of the duplicates are 0.

    Args:
        base: Model to grow.
        size: Size of the new model.

    Raises:
        ValueError: The models differ in width or head size, or the new heads or layers cannot be made from `base`.
    """
    config, head_dim = base.config, base.model.layers[0].self_attn.head_dim
    base_heads, base_kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    group, times, room = base_heads // base_kv_heads, size.kv_heads // base_kv_heads, size.heads // size.kv_heads
    widths, layers = (size.hidden, size.intermediate, size.head_dim), config.num_hidden_layers
    if widths != (config.hidden_size, config.intermediate_size, head_dim) or size.layers < layers:
        raise ValueError("a model goes on with the width and head size that it has, and no fewer layers")
    if size.kv_heads % base_kv_heads or size.heads % size.kv_heads or times + room <= group:
        raise ValueError(
            f"{size.heads} heads on {size.kv_heads} KV heads cannot be made from {base_heads} on {base_kv_heads}"
        )
    heads, first = torch.empty(size.kv_heads, room, dtype=torch.long), torch.zeros(size.kv_heads, room)
    used_heads = set[int]()
    for place in range(room):
        for kv_head in range(size.kv_heads):
            head = kv_head // times * group + (kv_head % times + place) % group
            heads[kv_head, place] = head
            first[kv_head, place] = head not in used_heads
            used_heads.add(head)
    base_state = base.state_dict()
    state = {name: weight for name, weight in base_state.items() if ".layers." not in name}
    for layer, base_layer in enumerate(_deepened(layers, size.layers)):
        begin = f"model.layers.{base_layer}."
        for name in base_state:
            if name.startswith(begin):
                state[f"model.layers.{layer}.{name.removeprefix(begin)}"] = base_state[name]
    for name, weight in state.items():
        part = name.split(".")[-2]
        if part in ("k_proj", "v_proj"):
            state[name] = weight.unflatten(0, (-1, head_dim)).repeat_interleave(times, 0).flatten(0, 1)
        elif part == "q_proj":
            state[name] = weight.unflatten(0, (-1, head_dim))[heads.flatten()].flatten(0, 1)
        elif part == "o_proj":
            columns = weight.unflatten(1, (-1, head_dim))[:, heads.flatten()]  # [hidden, heads, head_dim]
            state[name] = (columns * first.view(1, -1, 1)).flatten(1)
    return state


def lookup_layer(model: Qwen2ForCausalLM, language: Language, contexts: int = 24) -> int:
    """Return the layer, except the last, in which questions about facts attend most to the position of the answer."""
    attention = torch.zeros(len(model.model.layers) - 1)
    model.set_attn_implementation("eager")  # this implementation returns attention weights
    for number in range(contexts):
        context = language.context(np.random.default_rng([0, number]), 64, 4, {"fact": 1.0}, (0.8, 1.0))
        flat = [token for document in context.documents for token in document]
        for question in context.questions:
            ids = torch.tensor([[*flat, *question.prompt]], device=model.device)
            with torch.no_grad():
                weights = model(input_ids=ids, use_cache=False, output_attentions=True).attentions
            answer_position = flat.index(question.answer[0])
            attention += torch.tensor([float(layer[0, :, -1, answer_position].mean()) for layer in weights[:-1]])
    model.set_attn_implementation("sdpa")
    return int(attention.argmax())
