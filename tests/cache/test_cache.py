"""TieredCache as an object: forks, misuse, odd requests, and what it keeps and stores."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from families import build, build_class, prompt
from reference import GREEDY, plain
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_tiered_cache import (
    CacheMismatchError,
    ConfigError,
    Exact,
    KVStore,
    TieredCache,
    UnsupportedModelError,
    detach,
    reasons,
)
from hf_tiered_cache.layers import DenseSource, sources_for
from hf_tiered_cache.restore.rows import PlanContext


@pytest.fixture(scope="module", params=["llama", "qwen2_sliding", "gemma3"])
def model(request):
    return build(request.param)


# --- forks


def test_a_fork_goes_its_own_way_and_leaves_its_parent_alone(model, store):
    store.precompute(model, prompt(90), progress=False)
    parent = TieredCache(model, store)
    first = model.generate(prompt(90), past_key_values=parent, **GREEDY)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in parent.layers]
    memory = {layer._keys.data_ptr() for layer in parent.layers}
    forks = [parent.fork() for _ in range(2)]
    assert {layer._keys.data_ptr() for layer in forks[0].layers} == memory  # nothing copied yet
    questions = [torch.cat([first, prompt(7, seed=s)], dim=1) for s in (3, 4)]
    for fork, question in zip(forks, questions, strict=True):
        answer = model.generate(question, past_key_values=fork, **GREEDY)
        assert torch.equal(answer, plain(model, question))
    for layer, (keys, values) in zip(parent.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    assert parent.get_seq_length() == first.shape[1] - 1
    next_ids = torch.cat([first, prompt(5, seed=5)], dim=1)
    assert torch.equal(model.generate(next_ids, past_key_values=parent, **GREEDY), plain(model, next_ids))


def test_a_parent_that_goes_on_leaves_its_forks_alone(model, store):
    parent = TieredCache(model, store)
    first = model.generate(prompt(60), past_key_values=parent, **GREEDY)
    fork = parent.fork()
    more = torch.cat([first, prompt(9, seed=3)], dim=1)
    model.generate(more, past_key_values=parent, **GREEDY)
    other_prompt = torch.cat([first, prompt(9, seed=4)], dim=1)
    assert torch.equal(model.generate(other_prompt, past_key_values=fork, **GREEDY), plain(model, other_prompt))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_is_a_fork(model, store, copied):
    """The documentation of transformers recommends this for a cache of a prompt."""
    parent = TieredCache(model, store)
    with torch.no_grad():
        model(input_ids=prompt(50), past_key_values=parent)
    for seed in (3, 4):
        ids = torch.cat([prompt(50), prompt(6, seed=seed)], dim=1)
        assert torch.equal(model.generate(ids, past_key_values=copied(parent), **GREEDY), plain(model, ids))


def test_forks_record_what_they_compute(model, store):
    parent = TieredCache(model, store)
    with torch.no_grad():
        model(input_ids=prompt(70), past_key_values=parent, logits_to_keep=1)
    ids = torch.cat([prompt(70), prompt(60, seed=3)], dim=1)
    model.generate(ids, past_key_values=parent.fork(), **GREEDY)
    cache = TieredCache(model, store)
    model.generate(ids, past_key_values=cache, **GREEDY)
    assert cache.stats.tokens_restored == 128


# --- misuse


def test_another_prompt_in_a_used_strict_cache_is_refused(model, store):
    cache = TieredCache(model, store, strict=True)
    model.generate(prompt(50), past_key_values=cache, **GREEDY)
    for other_prompt in (prompt(80, seed=2), prompt(20, seed=2), prompt(50)):
        with pytest.raises(CacheMismatchError, match="create a new TieredCache"):
            model.generate(other_prompt, past_key_values=cache, **GREEDY)
    going_on = torch.cat([prompt(50), plain(model, prompt(50))[:, 50:], prompt(4, seed=3)], dim=1)
    assert torch.equal(model.generate(going_on, past_key_values=cache, **GREEDY), plain(model, going_on))


def test_a_cache_that_was_reset_serves_another_prompt(model, store):
    cache = TieredCache(model, store)
    model.generate(prompt(50), past_key_values=cache, **GREEDY)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(
        model.generate(prompt(80, seed=2), past_key_values=cache, **GREEDY), plain(model, prompt(80, seed=2))
    )


def test_unknown_methods_are_named_with_those_there_are(model, store):
    with pytest.raises(ConfigError, match=r"'quick'.*exact"):
        TieredCache(model, store, method="quick")
    assert TieredCache(model, store, method="exact").method == TieredCache(model, store).method == Exact()


# --- requests that are no plain prompts


def test_right_padding_reuses_nothing_and_is_right(model, store):
    ids = torch.cat([prompt(40), prompt(40, seed=2)])
    mask = torch.ones_like(ids)
    mask[1, 30:] = 0
    store.precompute(model, ids, progress=False)
    with torch.no_grad():
        cache = TieredCache(model, store)
        logits = model(input_ids=ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits
        assert cache.stats.tokens_restored == 0
        reference = DynamicCache(config=model.config)
        assert torch.equal(
            logits, model(input_ids=ids, attention_mask=mask, past_key_values=reference, logits_to_keep=1).logits
        )


class Viewing(LlamaForCausalLM):
    """Model that views its arguments as one row, as Kosmos-2.5 does."""

    def forward(self, input_ids=None, position_ids=None, logits_to_keep=0, **kwargs):
        ids, positions = (values.view(-1).view(values.shape) for values in (input_ids, position_ids))
        return super().forward(input_ids=ids, position_ids=positions, logits_to_keep=logits_to_keep, **kwargs)


def test_rows_of_a_restored_batch_can_be_viewed_as_one(store):
    model, ids = Viewing(build("llama").config).eval(), prompt(60, rows=2)
    arguments = {"position_ids": torch.arange(60).repeat(2, 1), "logits_to_keep": 1}
    for tokens_restored in (0, 96):
        cache = TieredCache(model, store)
        with torch.no_grad():
            logits = model(input_ids=ids, past_key_values=cache, **arguments).logits
            torch.testing.assert_close(logits, model(input_ids=ids, use_cache=False, **arguments).logits)
        assert cache.stats.tokens_restored == tokens_restored


class KeepingAll(LlamaForCausalLM):
    """Model that takes any keyword and returns the logits of all tokens, as TrOCR does."""

    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids=input_ids, **kwargs | {"logits_to_keep": 0})


def test_logits_of_all_tokens_are_returned_if_the_model_ignores_another_number(store):
    model = KeepingAll(build("llama").config).eval()
    for _ in range(2):
        cache = TieredCache(model, store)
        with torch.no_grad():
            logits = model(input_ids=prompt(40), past_key_values=cache, logits_to_keep=1).logits
        assert logits.shape[1] == 40
    assert cache.stats.reason == reasons.NO_LOGITS_TO_KEEP


def masks(model):
    """Return ready-made masks of 60 tokens: one, or one for each kind of layer."""
    full = torch.ones(60, 60).tril().bool()[None, None]
    windows = [layer.window for layer in sources_for(model, DenseSource) if layer.window]
    return {"full_attention": full, "sliding_attention": full & ~full.tril(-windows[0])} if windows else full


@pytest.mark.parametrize("feature", ["positions", "labels", "masks", "hidden states", "attentions"])
def test_requests_that_need_every_token_computed(model, store, feature):
    ids = prompt(60)
    store.precompute(model, ids, progress=False)
    arguments = {
        "positions": {"position_ids": torch.arange(5, 65).unsqueeze(0)},
        "labels": {"labels": ids},
        "masks": {"attention_mask": masks(model)},
        "hidden states": {"output_hidden_states": True, "logits_to_keep": 1},
        "attentions": {"output_attentions": True, "logits_to_keep": 1},
    }[feature]
    if feature == "attentions":
        model.set_attn_implementation("eager")
    cache = TieredCache(model, store)
    with torch.no_grad():
        outputs = model(input_ids=ids, past_key_values=cache, **arguments)
        expected = model(input_ids=ids, past_key_values=DynamicCache(config=model.config), **arguments)
    assert cache.stats.tokens_restored == 0
    assert torch.equal(outputs.logits, expected.logits)
    if feature == "hidden states":
        assert outputs.hidden_states[-1].shape[1] == 60
    if feature == "attentions":
        assert outputs.attentions[0].shape[2] == 60
        model.set_attn_implementation("sdpa")
    if feature == "labels":
        assert torch.equal(outputs.loss, expected.loss)


def test_odd_positions_are_not_recorded(model, store):
    with torch.no_grad():
        model(
            input_ids=prompt(60),
            position_ids=torch.arange(5, 65).unsqueeze(0),
            past_key_values=TieredCache(model, store),
        )
    store.flush()
    assert store.stats.segments == 0


def test_token_types_that_change_embeddings_are_not_recorded(store):
    """GPT-2 adds the embedding of a token's type, also of type 0. In vision models, types only mark images."""
    config = GPT2Config(vocab_size=160, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=1)
    model, ids = GPT2LMHeadModel(config).eval(), prompt(60)
    cache = TieredCache(model, store)
    model(ids, token_type_ids=torch.zeros_like(ids), past_key_values=cache)
    store.flush()
    assert store.stats.segments == 0
    assert "token_type_ids" in cache.stats.reason


def test_a_model_in_training_mode_reuses_and_records_nothing(model, store):
    store.precompute(model, prompt(60), progress=False)
    model.train()
    try:
        cache = TieredCache(model, store)
        model(input_ids=prompt(60), past_key_values=cache, logits_to_keep=1)
        model(input_ids=prompt(60, seed=2), past_key_values=TieredCache(model, store))
    finally:
        model.eval()
    assert cache.stats.tokens_restored == 0
    store.flush()
    assert store.stats.segments == 1


def test_gradients_do_not_flow_and_do_not_pile_up(model, store):
    cache = TieredCache(model, store)
    out = model(input_ids=prompt(30), past_key_values=cache)
    assert not out.logits.requires_grad
    assert not cache.layers[0].keys.requires_grad


def test_a_prompt_of_one_token_and_one_shorter_than_a_chunk(model, store):
    for ids in (prompt(1), prompt(9), prompt(16), prompt(17)):
        for _ in range(2):
            cache = TieredCache(model, store)
            assert torch.equal(model.generate(ids, past_key_values=cache, **GREEDY), plain(model, ids))


def test_a_prompt_without_tokens_is_refused_in_one_sentence(model, store):
    cache = TieredCache(model, store)
    with pytest.raises(ConfigError, match="the prompt has no tokens"):
        model.generate(prompt(0), past_key_values=cache, **GREEDY)


def test_restore_and_record_can_be_switched_off(model, store):
    store.precompute(model, prompt(60), progress=False)
    cache = TieredCache(model, store, restore=False)
    model.generate(prompt(60), past_key_values=cache, **GREEDY)
    assert cache.stats.tokens_restored == 0
    model.generate(prompt(60, seed=2), past_key_values=TieredCache(model, store, record=False), **GREEDY)
    store.flush()
    cache = TieredCache(model, store)
    model.generate(prompt(60, seed=2), past_key_values=cache, **GREEDY)
    assert cache.stats.tokens_restored == 0


def test_the_batch_may_change_between_passes(model, store):
    """A user's own search loop repeats, drops and swaps rows."""
    ids = torch.cat([prompt(70), prompt(70, seed=2)])
    tiered_cache, reference = TieredCache(model, store), DynamicCache(config=model.config)
    for cache in (tiered_cache, reference):
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([3, 0, 1, 0]))
            cache.batch_select_indices(torch.tensor([0, 2]))
            more = torch.cat([prompt(70, seed=4), prompt(70, seed=5)])
            cache.logits = model(input_ids=more, past_key_values=cache, logits_to_keep=1).logits
    assert torch.equal(tiered_cache.logits, reference.logits)
    store.flush()
    more_ids = torch.cat([torch.cat([ids[1], more[0]])[None], torch.cat([ids[0], more[1]])[None]])  # rows 3, 1 of four
    cache = TieredCache(model, store)
    with torch.no_grad():
        model(input_ids=more_ids, past_key_values=cache, logits_to_keep=1)
    assert cache.stats.tokens_restored == 2 * 128


def test_rows_that_share_a_beginning_store_it_once(model, store):
    ids = torch.cat([prompt(100), torch.cat([prompt(100)[:, :64], prompt(36, seed=2)], dim=1), prompt(100)])
    with torch.no_grad():
        model(input_ids=ids, past_key_values=TieredCache(model, store), logits_to_keep=1)
    store.flush()
    assert sorted((row.position, row.tokens) for row in store.segments()) == [(0, 96), (64, 32)]
    for row in ids:
        cache = TieredCache(model, store, record=False)
        output = model.generate(row.unsqueeze(0), past_key_values=cache, **GREEDY)
        assert cache.stats.tokens_restored == 96
        assert torch.equal(output, plain(model, row.unsqueeze(0)))


@pytest.mark.parametrize("beams", [2, 4])
@pytest.mark.thin(2)
def test_what_beams_have_generated_is_stored_by_row(model, store, beams):
    """Each beam's tokens are stored with its own KV after all reorderings."""
    arguments = {"do_sample": False, "max_new_tokens": 60, "num_beams": beams, "num_return_sequences": beams}
    ids = prompt(40)
    mask = torch.ones_like(ids)
    cache = TieredCache(model, store)
    model.generate(ids, attention_mask=mask, past_key_values=cache, **arguments)
    row_ids = cache._executor.sequence.history.ids()
    store.flush()
    for row in torch.from_numpy(row_ids[:, :97]):
        row_cache = TieredCache(model, store, record=False)
        row = row.unsqueeze(0)
        with torch.no_grad():
            logits = model(input_ids=row, past_key_values=row_cache, logits_to_keep=1).logits
            expected = model(input_ids=row, use_cache=False, logits_to_keep=1).logits
        assert row_cache.stats.tokens_restored == 96
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


# --- memory


def test_buffers_double_and_decoding_copies_nothing_in_between(store):
    model = build("llama")
    cache = TieredCache(model, store)
    ids = prompt(100)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        capacities, moves, address = [], 0, None
        for _ in range(400):
            model(input_ids=ids[:, :1], past_key_values=cache)
            buffer = cache.layers[0]._keys
            moves += buffer.data_ptr() != address and buffer.shape[2] not in capacities
            address = buffer.data_ptr()
            if buffer.shape[2] not in capacities:
                capacities.append(buffer.shape[2])
    assert cache.get_seq_length() == 500
    assert moves <= 4
    assert all(b >= 2 * a for a, b in itertools.pairwise(capacities))


def test_a_sliding_layer_holds_its_window_and_not_the_prompt(store):
    model = build("mistral")
    cache = TieredCache(model, store)
    with torch.no_grad():
        model(input_ids=prompt(800), past_key_values=cache, logits_to_keep=1)
        assert all(layer._keys.shape[2] < 3 * 40 + 200 for layer in cache.layers)
        for _ in range(300):
            model(input_ids=prompt(1), past_key_values=cache)
    assert all(layer._keys.shape[2] < 3 * 40 + 200 for layer in cache.layers)
    assert cache.get_seq_length() == 1100


def test_of_a_sliding_layer_only_the_window_is_read(tmp_path):
    model = build("gemma3")  # four sliding layers of six, windows of 40
    with KVStore(tmp_path) as store:
        store.precompute(model, prompt(1000), progress=False)
    with KVStore(tmp_path) as store:
        cache = TieredCache(model, store)
        output = model.generate(prompt(1000), past_key_values=cache, **GREEDY)
        assert torch.equal(output, plain(model, prompt(1000)))
        assert cache.stats.tokens_restored == 992
        segment = store._storage.disk.reader(store.segments()[0].id)
        full = sum(block_group.block_bytes for block_group in segment.shape.block_groups if not block_group.window) * 62
        sliding = sum(block_group.block_bytes for block_group in segment.shape.block_groups if block_group.window) * 4
        assert full <= cache.stats.bytes_read <= full + sliding


def test_a_cache_that_is_gone_leaves_no_memory_but_stores_its_tokens(model, store):
    cache = TieredCache(model, store)
    model.generate(prompt(50), past_key_values=cache, **GREEDY)
    recorder = cache._executor.sequence.recorder
    assert recorder.num_unsealed
    del cache
    gc.collect()
    store.flush()  # the writer's thread stores what was left
    assert recorder.num_unsealed < 16
    assert sum(row.tokens for row in store.segments()) == 48


def test_recording_keeps_no_more_than_the_ragged_end(model, store):
    """The writer takes the prompt's tensors and releases them."""
    cache = TieredCache(model, store)
    with torch.no_grad():
        model(input_ids=prompt(900), past_key_values=cache, logits_to_keep=1)
        model(input_ids=prompt(1), past_key_values=cache)  # now the prompt is whole
    bytes_by_storage = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for ts in cache._executor.sequence.recorder.captured._tensors()
        for t in ts
    }
    assert sum(bytes_by_storage.values()) <= 2 * len(model.model.layers) * 2 * 16 * 16 * 4
    store.flush()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_inference_mode_may_come_and_go(tmp_path, family):
    """Memory that is allocated in inference mode is written to outside of it, by the writer and by later turns."""
    model, ids = build(family), prompt(100)
    full_prompt = torch.cat([ids, prompt(30, seed=4)], dim=1)
    expected = model.generate(full_prompt, **GREEDY)
    for first, second in ((True, False), (False, True), (True, True)):
        with KVStore(tmp_path / f"{first}{second}") as store:
            store.precompute(model, ids[:, :50], progress=False)
        with KVStore(tmp_path / f"{first}{second}") as store:
            cache = TieredCache(model, store)
            with torch.inference_mode(first), torch.no_grad():
                model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            with torch.inference_mode(second), torch.no_grad():
                model(input_ids=full_prompt[:, 100:-1], past_key_values=cache, logits_to_keep=1)
                assert torch.equal(model.generate(full_prompt, past_key_values=cache, **GREEDY), expected)
            store.flush()
            assert store.stats.dropped_writes == 0
            second_cache = TieredCache(model, store, record=False)
            assert torch.equal(model.generate(full_prompt, past_key_values=second_cache, **GREEDY), expected)
            assert second_cache.stats.tokens_restored == 128


@pytest.mark.parametrize("empty", [TieredCache.reset, TieredCache.suspend])
def test_a_cache_that_is_emptied_within_generate_ends_it_with_an_error(store, empty):
    """Its next token would be computed without all tokens before it."""
    model = build("llama")
    cache = TieredCache(model, store)

    def emptying(ids, scores):
        if ids.shape[1] == 73:
            empty(cache)
        return scores

    with pytest.raises(CacheMismatchError, match="emptied while generate"):
        model.generate(prompt(70), past_key_values=cache, logits_processor=[emptying], **GREEDY)
    assert torch.equal(model.generate(prompt(70), past_key_values=cache, **GREEDY), plain(model, prompt(70)))
    with pytest.raises(ZeroDivisionError):
        model.generate(prompt(70), past_key_values=cache, logits_processor=[lambda *_: 1 // 0], **GREEDY)
    empty(cache)
    logits = model(input_ids=prompt(70), past_key_values=cache).logits[:, -1]
    assert torch.allclose(logits, model(prompt(70)).logits[:, -1], atol=1e-5)


def test_a_cache_is_used_by_one_thread_at_a_time(store):
    """Two threads would append their tokens to one sequence."""
    model, errors = build("llama"), []
    cache = TieredCache(model, store)

    def intrude():
        for use in (partial(model.generate, **GREEDY), model):
            try:
                use(prompt(80, seed=1), past_key_values=cache)
            except CacheMismatchError as error:
                errors.append(str(error))

    def processor(ids, scores):
        if ids.shape[1] == 72:
            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()
        return scores

    answer = model.generate(prompt(70), past_key_values=cache, logits_processor=[processor], **GREEDY)
    assert torch.equal(answer, plain(model, prompt(70)))
    assert len(errors) == 2 and "another thread" in errors[0]
    intrude()
    assert len(errors) == 2


def test_a_cache_that_is_reset_keeps_nothing_of_what_was(model, store):
    cache, recorders = TieredCache(model, store), []
    for seed in range(3):
        model.generate(prompt(70, seed=seed), past_key_values=cache, **GREEDY)
        recorders.append(weakref.ref(cache._executor.sequence.recorder))
        cache.reset()
    store.flush()
    gc.collect()
    assert [recorder() for recorder in recorders] == [None] * 3
    assert len(store.segments()) == 3


def test_a_large_buffer_grows_by_a_bounded_step(model, store):
    cache = TieredCache(model, store, record=False)
    layer = cache.layers[0]
    layer.update(torch.zeros(1, 1, 20_000, 1), torch.zeros(1, 1, 20_000, 1))
    layer.update(torch.zeros(1, 1, 100, 1), torch.zeros(1, 1, 100, 1))
    assert layer._keys.shape[2] < 20_000 + 100 + 4096 + 100


def test_a_little_of_a_long_prompt_is_computed_rather_than_masked():
    exact, layers = Exact(), 2
    for columns, restorable, first in (
        (1_000, 16, 16),  # a small mask
        (60_000, 2_000, 0),  # 3.5 GB of mask to spare 3 % of the work
        (60_000, 30_000, 30_000),
    ):
        assert exact.positions_to_compute(PlanContext(0, columns, restorable, 1, layers))[0][0] == first
    assert (
        exact.positions_to_compute(PlanContext(100, 60_000, 2_000, 1, layers))[0][0] == 2_000
    )  # a mask is needed anyway


# --- stats


@contextmanager
def reopened(folder, tokens):
    """Store a prompt of `tokens` tokens, and open its store again. Yield the model, the store and a new cache."""
    model = build("llama")
    with KVStore(folder) as store:
        store.precompute(model, prompt(tokens), progress=False)
    with KVStore(folder) as store:
        yield model, store, TieredCache(model, store)


def test_stats_count_and_print(tmp_path):
    with reopened(tmp_path, 100) as (model, store, cache):
        ids = torch.cat([prompt(100)[:, :90], prompt(30, seed=3)], dim=1)
        model.generate(ids, past_key_values=cache, **GREEDY)
        stats = cache.stats
        segment = store._storage.disk.reader(store.segments()[0].id)
        blocks = 5 * len(segment.shape.block_groups)
        nbytes = 5 * sum(block_group.block_bytes for block_group in segment.shape.block_groups)
        assert (stats.tokens_restored, stats.tokens_computed) == (80, 40 + 5)
        assert (stats.disk.blocks, stats.disk.hits, stats.disk.misses, stats.disk.bytes) == (blocks, blocks, 0, nbytes)
        assert (stats.host.hits, stats.host.misses) == (0, blocks)
        assert (stats.bytes_read, stats.details.bytes_used) == (nbytes, 80 * segment.shape.layout.bytes_per_token)
        assert stats.read_amplification == 1.0
        assert stats.tier == "disk"
        assert stats.details.io_seconds > 0
        assert 0 <= stats.stall_seconds <= stats.details.assemble_seconds
        text = str(stats)
        assert "80 / 45" in text
        assert "disk" in text
        assert stats.as_dict()["disk"]["blocks"] == blocks
        warm = TieredCache(model, store)
        model.generate(ids, past_key_values=warm, **GREEDY)
        assert warm.stats.tier == "host"
        assert warm.stats.bytes_read == 0
        assert warm.stats.tokens_restored == 96 + 16  # the first request's tokens too


def test_a_part_of_a_chunk_is_read_whole_and_counted(tmp_path):
    """A full hit leaves one token to compute, so of the last chunk 15 of 16 tokens are used."""
    with reopened(tmp_path, 96) as (model, store, cache):
        model.generate(prompt(96), past_key_values=cache, **GREEDY)
        per_token = store._storage.disk.reader(store.segments()[0].id).shape.layout.bytes_per_token
        assert cache.stats.bytes_read == 96 * per_token
        assert cache.stats.details.bytes_used == 95 * per_token
        assert cache.stats.read_amplification == pytest.approx(96 / 95)


def test_repr_says_what_it_is(model, store):
    assert "exact" in repr(TieredCache(model, store)).lower()


# --- models that cannot be served


def test_models_with_recurrent_state_are_refused_by_layer(tmp_path):
    config = Qwen3NextConfig(
        vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_key_heads=1, linear_num_value_heads=1,
        linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=r"layer 0 of Qwen3Next.*linear_attention.*DynamicCache"):
        TieredCache(Qwen3NextForCausalLM(config), tmp_path)


def test_state_space_models_are_refused(tmp_path):
    model = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2))
    with pytest.raises(UnsupportedModelError, match=r"layer 0 of MambaForCausalLM.*DynamicCache"):
        TieredCache(model, tmp_path)


def test_encoder_decoders_are_refused(tmp_path):
    model = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModelError, match=r"encoder-decoder.*generate"):
        TieredCache(model, tmp_path)


def test_refused_models_are_left_unattached(tmp_path):
    model = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(UnsupportedModelError):
        TieredCache(model, tmp_path)
    assert "forward" not in vars(model)


def test_other_causal_models_work_too(tmp_path):
    """This model has no rotation and other names, and no other test."""
    model = build_class("BertLMHeadModel", "BertConfig", is_decoder=True)
    with KVStore(tmp_path) as store:
        for _ in range(2):
            cache = TieredCache(model, store)
            output = model.generate(prompt(60), past_key_values=cache, **GREEDY)
            assert torch.equal(output, model.generate(prompt(60), **GREEDY))
    detach(model)
