"""Layers share KV only if a replay of the conversation's last tokens shows that it is harmless."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import processes
import pytest
import torch
from extras import need_eval
from families import build_deep as build
from families import prompt, with_key_biases
from reference import kv_of, prefilled
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache import suspend
from hf_tiered_cache.cache.suspend import CacheReplay
from hf_tiered_cache.conversations.sharing import MARGIN, REPLAYED_TOKENS, accepted_pairs
from hf_tiered_cache.kvstore import storage_of
from hf_tiered_cache.methods import Krul, krul
from hf_tiered_cache.patches.tap import RotaryTap
from hf_tiered_cache.store.conversations import ConversationRecord, conversation_name

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
XS = Path(__file__).parents[2] / "eval" / "reference" / "xs"
LIB = os.path.dirname(processes.__file__)
TOKENS = 208
ANY = {"change": 1.0, "recompute": 0.0}
"""Proposes pairs of layers at any distance."""


def loud(model):
    """Scale a model so that its answers are confident and depend on its attention."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(30)
            layer.self_attn.v_proj.weight.mul_(30)
        model.lm_head.weight.mul_(6)
    return model


def alike(model, equal=True):
    """Change a model's layers to small residuals and the same KV projections, or (not `equal`) different ones."""
    first = model.model.layers[0].self_attn
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("k_proj", "v_proj") if equal else ():
                getattr(layer.self_attn, name).weight.copy_(getattr(first, name).weight)
            layer.self_attn.o_proj.weight.mul_(0.1)
            layer.mlp.down_proj.weight.mul_(0.1)
        model.lm_head.weight.mul_(200)
    return model


@torch.no_grad()
def said(model, cache, ids, keep=1):
    return model(input_ids=ids, past_key_values=cache, logits_to_keep=keep).logits[0]


def suspended(model, store, method, ids):
    cache = TieredCache(model, store, conversation="alice", method=method)
    said(model, cache, ids)
    return cache.suspend()


def pairs_in(store):
    return {pair for row in store.segments() for pair in storage_of(store).disk.reader(row.id).shape.geometry.pairs}


def divergence(expected, actual):
    expected, actual = expected.log_softmax(-1), actual.log_softmax(-1)
    return float((expected.exp() * (expected - actual)).sum(-1).mean())


def replay_of(model, ids, store):
    cache = TieredCache(model, store)
    expected = said(model, cache, ids, REPLAYED_TOKENS)
    return suspend._replay(cache._executor, cache), expected, cache


# --- the replay


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen2_sliding", "gemma3", "opt"])
def test_a_replay_over_unchanged_kv_gives_the_same_predictions(family, store):
    """Windows lack the tokens before them, so they are slightly shorter."""
    model, ids = build(family), prompt(TOKENS)
    replay, expected, cache = replay_of(model, ids, store)
    log_probs = replay._log_probs({})
    sliding = "sliding" in family or family == "gemma3"
    assert divergence(expected, log_probs) < (0.1 if sliding else 1e-6)
    assert replay.loss({}) == 0 == replay.loss({1: replay.kv(1)})
    assert replay.loss({0: tuple(tensor + 3 for tensor in replay.kv(0))}) > 0
    after = prompt(3, seed=9)
    assert torch.equal(said(model, cache, after), said(model, prefilled(model, [kv_of(model, ids)], TOKENS), after))


@pytest.mark.parametrize(("family", "codec"), [("llama", "raw"), ("llama", "int8"), ("qwen2", "int8")])
def test_the_loss_of_a_replay_is_that_of_the_resumed_conversation(store, family, codec):
    """The keys of `qwen2` are merged without their biases, as they are stored."""
    model, ids, tokens_restored = loud(build(family)), prompt(TOKENS), TOKENS - REPLAYED_TOKENS
    model = with_key_biases(model, 30.0) if family == "qwen2" else model
    method = Krul(0.5, quality=1e9, retained=0.0, codec=codec, **ANY)
    suspension = suspended(model, store, method, ids)
    assert len(pairs_in(store)) == 2 and "2 of 2 pairs" in suspension.merging
    cache = TieredCache(model, store, conversation="alice", method=method, record=False)
    log_probs = said(model, cache, ids, REPLAYED_TOKENS)
    assert cache.stats.tokens_restored == tokens_restored
    full_cache = prefilled(model, [kv_of(model, ids)], tokens_restored)
    loss = divergence(said(model, full_cache, ids[:, tokens_restored:], REPLAYED_TOKENS), log_probs)
    stated = float(suspension.merging.partition("loss of ")[2].split()[0])
    assert loss > 0.01 and stated == pytest.approx(loss, rel=0.05)  # two digits are stated


def test_padding_and_foreign_caches_are_not_replayed(store):
    model, ids = build("llama"), prompt(TOKENS)
    cache = TieredCache(model, store)
    assert suspend._replay(cache._executor, cache) is None  # empty
    padded = torch.cat([torch.zeros(1, 8, dtype=torch.int64), ids], dim=1)
    mask = (padded != 0).long()
    model.generate(padded, attention_mask=mask, past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert suspend._replay(cache._executor, cache) is None
    with pytest.raises(ValueError, match="only the last"):
        CacheReplay(lambda ids, *_: ids, replay_of(model, ids, store)[2].layers, ids, RotaryTap(), TOKENS)


# --- what it accepts


class Harm:
    """Replay in which each layer costs as much as its keys were changed, or a stated loss."""

    def __init__(self, harm):
        self.harm, self.replays = harm, 0

    def kv(self, layer):
        return torch.full((1, 1, 4, 2), float(layer + 1)), torch.ones(1, 1, 4, 2)

    def loss(self, changed):
        self.replays += 1
        return sum(self.harm.get(layer, 0.0) for layer in changed)


def moved(first, second):
    """Merge in favor of the first layer: farther layers change more."""
    return first, first


PAIRS = ((0, 7), (1, 2), (3, 5), (4, 6))
RANKED = ((4, 6), (1, 2), (3, 5), (0, 7))
"""By how much the second layer changes."""
ALL = range(8)


@pytest.mark.parametrize(
    ("harm", "accepted", "replays"),
    [
        ({}, RANKED, 1),
        ({0: 1.0}, RANKED[:2], 2),
        ({2: 1.0}, RANKED[:1], 3),
        ({4: 1.0}, (), 3),
        (dict.fromkeys(ALL, 0.01), RANKED, 1),
        (dict.fromkeys(ALL, 0.02), RANKED[:2], 2),
        ({0: float("nan")}, RANKED[:2], 2),
        (dict.fromkeys(ALL, float("nan")), (), 3),
    ],
)
def test_pairs_that_change_most_are_dropped_first(harm, accepted, replays):
    replay = Harm(harm)
    result = accepted_pairs(replay, PAIRS, moved, 0.1, 1.0)
    assert (result.pairs, replay.replays) == (accepted, replays)
    assert result.loss == pytest.approx(sum(harm.get(layer, 0.0) for pair in accepted for layer in pair))
    assert (result.refused_loss == 0) == (len(accepted) == len(PAIRS))


def test_pairs_whose_kv_moves_far_are_not_replayed(store, monkeypatch):
    replay = Harm({})
    result = accepted_pairs(replay, PAIRS, moved, 0.1, 0.25)
    assert (result.pairs, replay.replays) == (RANKED[:3], 1) and 0.4 < result.refused_change < 0.5
    assert accepted_pairs(replay, PAIRS, moved, 0.1, 0.01).pairs == () and replay.replays == 1
    losses = counting(monkeypatch)
    suspension = suspended(loud(build("llama")), store, Krul(**ANY | {"change": 0.2}), prompt(TOKENS))
    assert not losses and suspension.merging.startswith("no layers share KV: a merge moves that of any two by 0.7")
    by_attention = Krul(gamma=0.0, pairs_by="attention", **ANY | {"change": 0.2})
    suspension = suspended(loud(build("llama")), store, by_attention, prompt(2 * TOKENS))
    assert not losses and suspension.merging.startswith(
        "0 of 2 pairs of layers share KV; the KV of others would move by 0.7"
    )


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_layers_that_are_not_alike_are_refused(store, codec):
    model, ids = loud(build("llama")), prompt(TOKENS)
    suspension = suspended(model, store, Krul(codec=codec, **ANY), ids)
    assert not pairs_in(store) and suspension.merging.startswith("0 of 2 pairs of layers share KV; more would lose")
    assert store.conversations()[0].merging == suspension.merging and not suspension.reason
    assert suspended(alike(build("llama"), equal=False), store, Krul(codec=codec, **ANY), ids).merging.startswith(
        "0 of 2"
    )
    assert not pairs_in(store)
    forced = Krul.paper(codec=codec, gamma=0.0, recompute=0.0)
    with TieredCache(model, store, conversation="bob", method=forced) as cache:
        said(model, cache, ids)
    assert pairs_in(store)  # the published settings merge them all the same


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_layers_that_are_alike_share_and_the_next_turn_stays_within_the_target(store, codec):
    model, ids, method = alike(build("llama")), prompt(TOKENS), Krul(codec=codec, **ANY)
    assert suspended(model, store, method, ids).tokens == TOKENS and len(pairs_in(store)) == 2
    longer_ids = torch.cat([ids, prompt(40, seed=5)], dim=1)
    cache = TieredCache(model, store, conversation="alice", method=method, record=False)
    log_probs = said(model, cache, longer_ids, 40)
    assert cache.stats.tokens_restored == TOKENS
    assert divergence(said(model, DynamicCache(), longer_ids, 40), log_probs) <= method.quality


def test_what_a_trained_model_accepts_stays_within_the_target(tmp_path):
    need_eval()
    from eval.reference.check import contexts
    from eval.reference.language import KINDS
    from eval.reference.queries import language_of, load

    model, accepted = load(XS), 0
    for number, (context, _) in enumerate(contexts(language_of(XS), 400, 5, 3, KINDS)):
        ids = torch.tensor([[token for document in context.documents for token in document]])
        end = ids.shape[1] - 96
        with KVStore(tmp_path / str(number), engine="posix") as store:
            suspension = suspended(model, store, Krul(recompute=0.0), ids[:, :end])
            cache = TieredCache(model, store, conversation="alice", method=Krul(recompute=0.0), record=False)
            log_probs = said(model, cache, ids, 96)
            assert cache.stats.tokens_restored == suspension.tokens == end // 16 * 16
            accepted += bool(pairs_in(store))
        assert divergence(said(model, DynamicCache(), ids, 96), log_probs) <= 0.01
    assert accepted


@pytest.mark.skipif(not STORIES.exists(), reason="needs stories260K next to the repository")
def test_a_trained_model_whose_layers_are_not_alike_is_refused(store, tmp_path, monkeypatch):
    need_eval()
    from eval.data import Data
    from eval.tasks.ruler.haystack import sentences

    model, losses = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32).eval(), counting(monkeypatch)
    text = " ".join(sentences(Data(None))[:200])
    ids = torch.tensor([AutoTokenizer.from_pretrained(STORIES)(text)["input_ids"][:400]])
    suspension = suspended(model, store, Krul(recompute=0.0), ids)
    assert suspension.merging.startswith("no layers share KV: a merge moves that of any two by 0.") and not losses
    for pairs_by in ("kv", "attention"):
        with KVStore(tmp_path / pairs_by, engine="posix") as other_store:
            suspension = suspended(model, other_store, Krul(pairs_by=pairs_by, gamma=0.0, **ANY), ids)
            assert suspension.merging.startswith("0 of 2 pairs of layers share KV; more would lose") and losses
            assert not pairs_in(other_store)


def counting(monkeypatch):
    """Count the replays in a list that grows."""
    losses, real_loss = [], CacheReplay.loss

    def noting(self, changed):
        losses.append(len(changed))
        return real_loss(self, changed)

    monkeypatch.setattr(CacheReplay, "loss", noting)
    return losses


def test_a_short_first_turn_decides_nothing(store):
    model, ids, method = alike(build("llama")), prompt(400), Krul(**ANY)
    assert suspended(model, store, method, ids[:, :20]).merging == ""
    assert suspended(model, store, method, ids[:, :120]).merging == "" and not pairs_in(store)
    suspension = suspended(model, store, method, ids)
    assert len(pairs_in(store)) == 2 and suspension.merging.startswith("2 of 2 pairs")


def test_what_was_refused_is_proposed_again_at_twice_the_length(store, monkeypatch):
    model, ids, method, losses = loud(build("llama")), prompt(512), Krul(**ANY), counting(monkeypatch)
    turns = []
    for end in (160, 300, 512):
        suspended(model, store, method, ids[:, :end])
        turns.append(len(losses))
        losses.clear()
    assert turns == [2, 0, 2]
    assert not pairs_in(store)


def test_pairs_that_a_later_turn_contradicts_are_dissolved(store):
    model, ids = loud(build("llama")), prompt(400)
    suspended(model, store, Krul(quality=1e9, **ANY), ids[:, :200])
    assert len(pairs_in(store)) == 2
    suspension = suspended(model, store, Krul(quality=1e-6, change=1.0, recompute=0.0), ids)
    assert suspension.merging.startswith("0 of 2") and suspension.tokens == 400
    newest = max(store.segments(), key=lambda row: row.position)
    assert not storage_of(store).disk.reader(newest.id).shape.geometry.pairs
    cache = TieredCache(model, store, conversation="alice", method=Krul(recompute=0.0), record=False)
    said(model, cache, torch.cat([ids, prompt(9, seed=4)], dim=1))
    assert cache.stats.tokens_restored == 400


@pytest.mark.parametrize("fault", [None, RuntimeError("out of memory")])
def test_without_a_replay_nothing_is_merged_and_all_is_stored(store, monkeypatch, fault):
    def failing(*args):
        if fault is None:
            return None
        raise fault

    if fault is None:
        monkeypatch.setattr(suspend, "_replay", failing)
    else:
        monkeypatch.setattr(CacheReplay, "loss", failing)
    suspension = suspended(alike(build("llama")), store, Krul(**ANY), prompt(TOKENS))
    assert suspension.tokens == TOKENS and not suspension.reason and not pairs_in(store)
    assert suspension.merging.startswith("no layers share KV: the ")


KILLED = f"""
import os, sys
sys.path[:0] = [{LIB!r}, {str(Path(__file__).parent)!r}]
import torch
torch.set_num_threads(1)
from hf_tiered_cache import KVStore
from hf_tiered_cache.methods import Krul, krul
from test_acceptance import ANY, alike, build, prompt, suspended
krul.merge_segments = lambda *given: os._exit(9)
with KVStore(sys.argv[1]) as store:
    suspended(alike(build("llama")), store, Krul(**ANY), prompt({TOKENS}))
"""


def test_a_kill_between_replay_and_store_loses_nothing(root):
    process = processes.run([sys.executable, "-c", KILLED, str(root)], timeout=240, cwd=Path(__file__).parents[2])
    assert process.returncode == 9
    with KVStore(root) as store:
        assert store.verify().ok and not pairs_in(store)
        model, method = alike(build("llama")), Krul(**ANY)
        cache = TieredCache(model, store, conversation="alice", method=method)
        said(model, cache, torch.cat([prompt(TOKENS), prompt(40, seed=4)], dim=1))
        assert cache.stats.tokens_restored == TOKENS


def test_a_record_without_a_decision_is_read(store, root):
    suspended(alike(build("llama")), store, Krul(**ANY), prompt(TOKENS))
    path = root / "conversations" / f"{conversation_name('alice')}.json"
    facts = json.loads(path.read_text())
    assert facts.pop("merging").startswith("2 of 2") and facts.pop("refused_tokens") == 0
    assert ConversationRecord.decode(json.dumps(facts).encode()).merging == ""
    del facts["turns"]
    with pytest.raises(Exception, match="turns"):
        ConversationRecord.decode(json.dumps(facts).encode())


def test_the_target_has_a_margin():
    assert krul.MARGIN == MARGIN == 4 and Krul().quality == 0.01 and Krul().geometry.codec == "int8"
