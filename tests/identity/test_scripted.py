"""A model with a scripted module runs plain with a reason; with a tag, its weights are watched."""

from __future__ import annotations

import pytest
import torch
from families import build, prompt
from torch import nn

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.identity import Fingerprinter

GREEDY = {"do_sample": False, "max_new_tokens": 2}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(96))

    def forward(self, x):
        return nn.functional.silu(x) * self.weight


def scripted():
    return torch.jit.script(Scaled())


def traced():
    return torch.jit.trace(Scaled(), torch.zeros(96))


@pytest.mark.parametrize("make", [scripted, traced])
def test_a_scripted_module_runs_plain_and_its_weights_count_with_a_tag(tmp_path, make):
    model = build("llama", num_hidden_layers=2)
    activation = model.model.layers[0].mlp.act_fn = make()
    ids = prompt(40)
    expected = model.generate(ids, **GREEDY)
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), expected)
        assert "act_fn, a scripted module" in cache.stats.reason
    name = Fingerprinter(model)
    before = name.look("tag")
    with torch.no_grad():
        activation.weight.mul_(3)
    after = name.look("tag")
    assert not before.problem and before.fingerprint != after.fingerprint
