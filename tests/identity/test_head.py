"""The output head makes no KV, unless code other than that of transformers computes with it."""

from __future__ import annotations

import pytest
import torch
from families import build
from torch.nn import functional
from transformers.models.llama import modeling_llama

from hf_tiered_cache.identity import Fingerprinter


class ScaledByHead(modeling_llama.LlamaMLP):
    def forward(self, x):
        return super().forward(x) * self.heads[0].weight[0, 0]


class Tied(modeling_llama.LlamaForCausalLM):
    """A model that computes logits with its embeddings, and has no other output head."""

    def get_output_embeddings(self):
        return self.model.embed_tokens

    def lm_head(self, hidden):
        return functional.linear(hidden, self.model.embed_tokens.weight)


def plain():
    model = build("llama", num_hidden_layers=2)
    return model, model.lm_head


def read_by_a_layer():
    model = build("llama", num_hidden_layers=2)
    model.model.layers[0].mlp.__class__ = ScaledByHead
    model.model.layers[0].mlp.heads = [model.lm_head]
    return model, model.lm_head


def tied():
    model = build("llama", num_hidden_layers=2)
    del model._modules["lm_head"]
    model.__class__ = Tied
    return model, model.model.embed_tokens


@pytest.mark.parametrize(("make", "counts"), [(plain, False), (read_by_a_layer, True), (tied, True)])
def test_an_edit_of_the_head_counts_if_kv_may_be_computed_with_it(make, counts):
    model, head = make()
    name = Fingerprinter(model)
    before = name.look()
    with torch.no_grad():
        head.weight.mul_(3)
    assert not before.problem
    assert (name.look().fingerprint != before.fingerprint) == counts
