"""Whatever changes what a model computes, between any two passes, is noticed: its KV is never taken for another's."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from functools import lru_cache

import pytest
import torch
from families import build, prompt
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import pairs
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_tiered_cache import ConfigError, KVStore, TieredCache, reasons
from hf_tiered_cache.identity import Fingerprinter, Identity, fingerprint
from hf_tiered_cache.identity import weights as weights_module

TOKENS = 100
GREEDY = {"do_sample": False, "max_new_tokens": 3, "output_logits": True, "return_dict_in_generate": True}


# --- changes, each a context that undoes it


@contextmanager
def written(model, place, way):
    """Change one element of any tensor except the head's, which computes no KV."""
    tensors = [t for n, t in (*model.named_parameters(), *model.named_buffers()) if not n.startswith("lm_head")]
    tensor = tensors[place % len(tensors)]
    index = place % tensor.numel()
    before = tensor.detach().clone()
    with torch.no_grad():
        if way == "in place":
            tensor.view(-1)[index] += 1.0
        elif way == "data":
            tensor.data.view(-1)[index] += 1.0
        elif way == "numpy":
            tensor.detach().numpy().reshape(-1)[index] += 1.0
        else:
            changed = before.clone()
            changed.view(-1)[index] += 1.0
            if way == "copy_":
                tensor.copy_(changed)
            elif way == "other data":
                tensor.data = changed
            elif way == "set_":
                tensor.set_(changed)
            elif isinstance(tensor, nn.Parameter):
                torch.utils.swap_tensors(tensor, nn.Parameter(changed))
            else:
                torch.utils.swap_tensors(tensor, changed)
    try:
        yield
    finally:
        with torch.no_grad():
            tensor.copy_(before)


@contextmanager
def attribute(owner, name, value):
    before = owner.__dict__.get(name, None)
    existed = name in owner.__dict__
    setattr(owner, name, value)
    try:
        yield
    finally:
        if existed:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def hooked(register, hook, **arguments):
    handle = register(hook, **arguments)
    try:
        yield
    finally:
        handle.remove()


def steer(module, args, output):
    first = output[0] if isinstance(output, tuple) else output
    return (first + 0.3, *output[1:]) if isinstance(output, tuple) else first + 0.3


@contextmanager
def implementation(model):
    def sharp(module, query, key, value, mask, scaling=None, **kwargs):
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling * 20, **kwargs)

    AttentionInterface.register("sharp", sharp)
    AttentionMaskInterface.register("sharp", sdpa_mask)
    model.set_attn_implementation("sharp")
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


@contextmanager
def rope(model):
    table = model.model.rotary_emb
    before = table.inv_freq.clone()
    table.inv_freq.mul_(0.5)
    try:
        yield
    finally:
        table.inv_freq.copy_(before)


def replaced(layer):
    inner = layer.forward

    def forward(hidden_states, *args, **kwargs):
        return inner(hidden_states * 1.5, *args, **kwargs)

    return attribute(layer, "forward", forward)


@contextmanager
def replacing(owner, name, value):
    """Replace a setting, or a module that is registered in another."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def layer(model, n=0):
    return model.model.layers[n]


@contextmanager
def of_the_class(kind):
    before = kind.forward
    kind.forward = lambda self, *args, **kwargs: before(self, *args, **kwargs) * 1.5
    try:
        yield
    finally:
        kind.forward = before


CHANGES = {
    "the class's forward": lambda model: of_the_class(type(layer(model).mlp)),
    "nothing": lambda model: nullcontext(),
    "hook": lambda model: hooked(layer(model).register_forward_hook, steer),
    "pre-hook": lambda model: hooked(
        layer(model).self_attn.o_proj.register_forward_pre_hook, lambda module, args: (args[0] * 0.5,)
    ),
    "global hook": lambda model: hooked(
        nn.modules.module.register_module_forward_hook,
        lambda module, args, output: output * 1.1 if isinstance(module, nn.Linear) else None,
    ),
    "forward": lambda model: replaced(layer(model)),
    "activation": lambda model: replacing(layer(model).mlp, "act_fn", nn.ReLU()),
    "scaling": lambda model: attribute(layer(model).self_attn, "scaling", 1.0),
    "epsilon": lambda model: attribute(layer(model).input_layernorm, "variance_epsilon", 0.5),
    "module": lambda model: replacing(layer(model).mlp, "up_proj", nn.Linear(64, 96, bias=False)),
    "layers swapped": lambda model: attribute(
        model.model.layers, "_modules", dict(zip("01", [*model.model.layers][::-1], strict=True))
    ),
    "attention function": implementation,
    "frequencies": rope,
    "autocast": lambda model: torch.autocast("cpu", torch.bfloat16),
    "dropout": lambda model: attribute(layer(model).self_attn, "attention_dropout", 0.5),
}
WAYS = ("in place", "data", "copy_", "numpy", "other data", "set_", "swapped")
any_change = st.one_of(
    st.sampled_from(sorted(CHANGES)).map(lambda name: (name, CHANGES[name])),
    st.tuples(st.integers(0, 1 << 30), st.sampled_from(WAYS)).map(
        lambda drawn: (f"weight {drawn}", lambda model: written(model, *drawn))
    ),
)


@lru_cache
def models():
    return build("llama"), build("llama")


def first_logits(model, ids, cache=None):
    output = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **GREEDY)
    return output.logits[0]


def asks_right(model, store, ids):
    cache = TieredCache(model, store, record=False)
    logits, plain = first_logits(model, ids, cache), first_logits(model, ids)
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-4 if logits.dtype == torch.float32 else 5e-2)
    return cache.stats


def decode(model, cache, ids):
    """Run a pass for each token of `ids`, int `[1, n]`."""
    for token in ids.split(1, dim=1):
        if token.shape[1]:
            model(input_ids=token, past_key_values=cache)


property_settings = settings(max_examples=settings.default.max_examples // 2)


@property_settings
@given(change=any_change)
def test_a_change_between_two_requests(tmp_path_factory, change):
    (model, _), ids, (_, changed) = models(), prompt(TOKENS), change
    with KVStore(tmp_path_factory.mktemp("kv")) as store:
        store.precompute(model, ids, progress=False)
        with changed(model):
            asks_right(model, store, ids)
        assert asks_right(model, store, ids).tokens_restored == 96


@property_settings
@given(change=any_change)
def test_a_change_while_it_was_stored(tmp_path_factory, change):
    """Another process with the original model does not restore KV that was computed under the change."""
    (model, reference), ids, (_, changed) = models(), prompt(TOKENS), change
    with KVStore(tmp_path_factory.mktemp("kv")) as store:
        with changed(model):
            store.precompute(model, ids, progress=False)
        asks_right(reference, store, ids)


@property_settings
@given(
    change=any_change.filter(lambda drawn: "'data'" not in drawn[0] and "'numpy'" not in drawn[0]),
    at=st.integers(1, 30),
    back=st.booleans(),
)
def test_a_change_between_two_tokens(tmp_path_factory, change, at, back):
    """Edits that leave no trace are found at the next request."""
    (model, reference), ids, (_, changed) = models(), prompt(TOKENS), change
    with KVStore(tmp_path_factory.mktemp("kv")) as store:
        cache = TieredCache(model, store)
        with torch.no_grad():
            model(input_ids=ids[:, :40], past_key_values=cache, logits_to_keep=1)
            decode(model, cache, ids[:, 40 : 40 + at])
            with changed(model):
                decode(model, cache, ids[:, 40 + at : 41 + at if back else TOKENS])
            decode(model, cache, ids[:, cache.get_seq_length() :])
        del cache
        store.flush()
        asks_right(reference, store, ids)


# --- passes that are not plain


def hole(n):
    mask = torch.ones(1, n + 1, dtype=torch.int64)
    mask[:, 8:30] = 0
    return {"attention_mask": mask}


ODD = {
    "a mask with a hole": hole,
    "a 4-D mask": lambda n: {"attention_mask": torch.zeros(1, 1, 1, n + 1).index_fill(3, torch.arange(8, 30), -1e9)},
    "shifted positions": lambda n: {"position_ids": torch.tensor([[n + 500]])},
    "a short mask": lambda n: {"attention_mask": torch.ones(1, n, dtype=torch.int64)},
}


@pytest.mark.parametrize(("odd", "passes"), pairs(ODD, [range(40, 100), range(55, 56), range(99, 100)]))
def test_odd_passes_of_one_token_are_not_stored(tmp_path, odd, passes):
    (model, reference), ids = models(), prompt(TOKENS)
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        with torch.no_grad():
            model(input_ids=ids[:, :40], past_key_values=cache, logits_to_keep=1)
            for n in range(40, TOKENS):
                arguments = ODD[odd](n) if n in passes else {}
                if odd == "a short mask" and arguments:
                    continue
                model(input_ids=ids[:, n : n + 1], past_key_values=cache, **arguments)
        del cache
        store.flush()
        asks_right(reference, store, ids)


def test_plain_masks_and_positions_while_decoding_are_stored(tmp_path):
    model, ids = models()[0], prompt(TOKENS)
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        with torch.no_grad():
            model(input_ids=ids[:, :40], past_key_values=cache, logits_to_keep=1)
            for n in range(40, TOKENS):
                mask, positions = torch.ones(1, n + 1, dtype=torch.int64), torch.tensor([[n]])
                model(input_ids=ids[:, n : n + 1], past_key_values=cache, attention_mask=mask, position_ids=positions)
        del cache
        store.flush()
        assert asks_right(model, store, ids).tokens_restored == 96


def test_going_on_with_a_mask_that_hides_the_middle(tmp_path):
    (model, reference), ids = models(), prompt(TOKENS)
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        output = model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=6)
        mask = torch.ones_like(output)
        mask[:, 5:90] = 0
        output = model.generate(output, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=60)
        del cache
        store.flush()
        asks_right(reference, store, output)


# --- names


def test_what_has_no_name_runs_plain_and_says_so_until_it_is_named(tmp_path):
    model, ids = build("llama"), prompt(TOKENS)
    with KVStore(tmp_path) as store, hooked(layer(model).register_forward_hook, steer):
        store.precompute(model, ids, progress=False)
        assert "a hook on model.layers.0" in asks_right(model, store, ids).reason
        assert store.stats.segments == 0
        store.precompute(model, ids, tag="steered", progress=False)
        cache = TieredCache(model, store, tag="steered", record=False)
        torch.testing.assert_close(first_logits(model, ids, cache), first_logits(model, ids), rtol=0, atol=1e-4)
        assert cache.stats.tokens_restored == 96
        other_cache = TieredCache(model, store, tag="steered otherwise", record=False)
        first_logits(model, ids, other_cache)
        assert other_cache.stats.tokens_restored == 0


def test_a_users_function_for_experts_has_no_name(tmp_path):
    model, ids = build("qwen3_moe"), prompt(TOKENS)
    with KVStore(tmp_path) as store:
        model(ids, past_key_values=TieredCache(model, store))
        store.flush()
        ExpertsInterface.register("halved", lambda experts, hidden_states, *arguments: hidden_states / 2)
        try:
            model.set_experts_implementation("halved")
            for tag in ("", "halved"):
                cache = TieredCache(model, store, tag=tag)
                logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
                assert cache.stats.tokens_restored == 0
                assert torch.equal(logits, model(ids, logits_to_keep=1).logits)
                assert ("halved" in cache.stats.reason) == (not tag)
        finally:
            del ExpertsInterface._global_mapping["halved"]


def test_experts_that_generate_exchanges_have_one_name():
    """On a GPU it computes a prompt with one function, and the tokens after it with another."""
    model, names = build("qwen3_moe"), set()
    for implementation in ("grouped_mm", "batched_mm", "eager"):
        model.set_experts_implementation(implementation)
        names.add(fingerprint(model))
    assert len(names) == 2


def test_tokens_that_look_ahead_are_not_reused(tmp_path):
    model, ids = build("gemma3"), prompt(TOKENS)
    with KVStore(tmp_path) as store:
        with replacing(model.config, "use_bidirectional_attention", True):
            for _ in range(2):
                assert asks_right(model, store, ids).reason == reasons.LOOKS_AHEAD
        with attribute(model.model.layers[1].self_attn, "is_causal", False):  # found causal, and not looked at again
            assert asks_right(model, store, ids).reason == reasons.LOOKS_AHEAD
        with pytest.raises(ConfigError, match="attend to later tokens"):
            TieredCache(build("gemma3", use_bidirectional_attention=True), store)


@pytest.mark.parametrize("memory", [weights_module.HostMemory, weights_module.DeviceMemory])
def test_an_edit_that_leaves_no_trace_is_found_in_turn_and_by_refresh(monkeypatch, memory):
    """A model larger than what one look reads again: found within size / REREAD_BYTES looks, or at once."""
    for name in ("REREAD_BYTES", "REREAD_BYTES_ON_DEVICE", "ROW_BYTES"):
        monkeypatch.setattr(weights_module, name, 4096)
    monkeypatch.setattr(weights_module, "memory_of", lambda device: memory)
    model = build("llama")
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    name = Fingerprinter(model)
    before = name()
    weight = model.model.layers[-1].mlp.down_proj.weight
    value = float(weight.data.view(-1)[1500])
    weight.data.view(-1)[1500] = 7
    looks = 0
    while name() == before:
        looks += 1
        assert looks <= 2 * size // 4096
    weight.data.view(-1)[1500] = value
    name.refresh()
    assert name() == before
    weight.data.view(-1)[1500] = 7
    name.refresh()
    assert name() != before


@pytest.mark.parametrize("memory", [weights_module.HostMemory, weights_module.DeviceMemory])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.thin(2)
def test_every_element_counts_wherever_its_tensor_begins_and_ends(monkeypatch, memory, dtype):
    monkeypatch.setattr(weights_module, "ROW_BYTES", 64)
    monkeypatch.setattr(weights_module, "REREAD_BYTES_ON_DEVICE", 256)
    monkeypatch.setattr(weights_module, "memory_of", lambda device: memory)
    model, flat = nn.Module(), torch.randn(1001).to(dtype)
    model.parts = nn.ParameterList([flat[1:400], flat[400:403], flat[403:], torch.empty(0)])
    pass
    digests = weights_module.WeightDigests(model.named_parameters())
    digest_set = {digests.digest}
    for at in range(1, 1001):
        flat[at] += 1
        assert digests.refresh()
        digest_set.add(digests.digest)
    assert len(digest_set) == 1001
    assert not digests.refresh()


def test_an_attribute_that_was_replaced_twice_may_lie_where_the_first_one_lay():
    model = build("llama")
    name, attention = Fingerprinter(model), model.model.layers[1].self_attn
    fingerprints = {name()}
    for number in range(10):
        attention.scaling = float(2 * number)
        attention.scaling = float(2 * number + 1)
        fingerprints.add(name())
    assert len(fingerprints) == 11


def test_int8_layers_are_told_apart():
    def quantized(seed):
        return torch.ao.quantization.quantize_dynamic(build("llama", seed=seed), {nn.Linear}, dtype=torch.qint8)

    assert fingerprint(quantized(0)) == fingerprint(quantized(0))
    assert fingerprint(quantized(0)) != fingerprint(build("llama"))
    first, second = quantized(0), quantized(0)
    second.model.layers[0].mlp.up_proj = quantized(1).model.layers[0].mlp.up_proj
    assert fingerprint(first) != fingerprint(second)


def test_transposed_weights_are_watched():
    model = build("llama")
    linear = model.model.layers[1].self_attn.q_proj
    linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
    name = Fingerprinter(model)
    before = name()
    with torch.no_grad():
        linear.weight[3, 5] += 1
    assert name() != before


def test_looking_changes_nothing():
    model = build("llama")
    name = Fingerprinter(model)
    assert isinstance(name.look(), Identity)
    fingerprints = {
        name.look(begins_request=begins_request).fingerprint for begins_request in (True, False) for _ in range(20)
    }
    assert fingerprints == {fingerprint(build("llama"))}


def test_the_weights_are_read_once(tmp_path, monkeypatch):
    read_calls = []

    def reading(self, tensors, real=weights_module.HostMemory.read):
        read_calls.append(self)
        real(self, tensors)

    monkeypatch.setattr(weights_module.HostMemory, "read", reading)
    model = build("llama")
    with KVStore(tmp_path) as store:
        for _ in range(3):
            asks_right(model, store, prompt(40))
    assert len(read_calls) == 1
