"""Reference models as PyTorch modules: made anew, made from another one, and as files hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from .language import Language
from .recipes import Size


def build(size: Size, tokenizer: PreTrainedTokenizerBase, shared: Sequence[int]) -> Qwen2ForCausalLM:
    """The model, untrained. Embeddings are not tied: keys are read and never said, and tying pushes them together.

    Args:
        shared: for each layer, which is the first of the same weights.
    """
    rest: dict[str, Any] = {"head_dim": size.head_dim}  # read by the model, and no field of the class
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
            **rest,
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


def sharing(model: Qwen2ForCausalLM, depth: int | None = None) -> list[int]:
    """For each layer, which is the first that has the same weights: the opposite of `unshared`.

    Args:
        depth: layers of a model that is `grown` from this one, and shares as it does; as many as it has, if None.
    """
    layers = [layer.state_dict() for layer in model.model.layers]
    shared = [
        next(first for first in range(number + 1) if all(torch.equal(layers[first][name], own[name]) for name in own))
        for number, own in enumerate(layers)
    ]
    if depth is None or depth == len(shared):
        return shared
    return [*(shared[layer] for layer in _deepened(len(shared), depth)[:-1]), depth - 1]


def _deepened(layers: int, depth: int) -> list[int]:
    """For each layer of a deeper model, which layer of the other it is: the last but one comes again."""
    return [*(min(layer, layers - 2) for layer in range(depth - 1)), layers - 1]


def grown(base: Qwen2ForCausalLM, size: Size) -> dict[str, torch.Tensor]:
    """Weights for a model of this size that computes what `base` does, with as many heads and layers or more.

    With more layers it computes that nearly, if it shares the layer before the last, which comes again: what has been
    found is looked up again. Each KV head is copied, and the query heads of its group are dealt out to the copies.
    Where there is room for more, query heads are copied too, beside others than before, and the copies' outputs begin
    with weights of 0.

    Raises:
        ValueError: the models differ in more than their heads, or these cannot be made from the others.
    """
    config, head_dim = base.config, base.model.layers[0].self_attn.head_dim
    base_heads, base_kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    group, times, room = base_heads // base_kv_heads, size.kv_heads // base_kv_heads, size.heads // size.kv_heads
    wanted, layers = (size.hidden, size.intermediate, size.head_dim), config.num_hidden_layers
    if wanted != (config.hidden_size, config.intermediate_size, head_dim) or size.layers < layers:
        raise ValueError("a model goes on with the width and head size that it has, and no fewer layers")
    if size.kv_heads % base_kv_heads or size.heads % size.kv_heads or times + room <= group:
        raise ValueError(
            f"{size.heads} heads on {size.kv_heads} KV heads cannot be made from {base_heads} on {base_kv_heads}"
        )
    heads, first = torch.empty(size.kv_heads, room, dtype=torch.long), torch.zeros(size.kv_heads, room)
    seen = set[int]()
    for place in range(room):
        for kv_head in range(size.kv_heads):
            head = kv_head // times * group + (kv_head % times + place) % group
            heads[kv_head, place] = head
            first[kv_head, place] = head not in seen
            seen.add(head)
    before = base.state_dict()
    state = {name: weight for name, weight in before.items() if ".layers." not in name}
    for layer, same in enumerate(_deepened(layers, size.layers)):
        begin = f"model.layers.{same}."
        for name in before:
            if name.startswith(begin):
                state[f"model.layers.{layer}.{name.removeprefix(begin)}"] = before[name]
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
