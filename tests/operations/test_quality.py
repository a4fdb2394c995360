"""A target in place of a budget: what was measured of a model says which budget keeps it."""

from __future__ import annotations

import json
import secrets
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from families import build, prompt
from reference import kv_of
from test_selective import ask, fill, question
from transformers import AutoTokenizer, DynamicCache

from eval.baselines import H2O
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.cache.calibrations import QualityFinding, keep_quality
from hf_tiered_cache.cli.calibrate import _prompts
from hf_tiered_cache.errors import ConfigError
from hf_tiered_cache.methods import ContiguousKV, Exact, Impress, KVDrive, describe_method, make_method
from hf_tiered_cache.operations import quality

METHODS = ("contiguous_kv:reorder=False", "h2o")
BUDGETS = (0.1, 0.5)


@pytest.fixture(scope="module")
def model():
    return build("qwen2", initializer_range=0.2)


@pytest.fixture(scope="module")
def text():
    return prompt(320, seed=3)[0]


def test_what_is_found_is_what_a_method_loses(model, text, tmp_path):
    with KVStore(tmp_path / "store") as store, KVStore(tmp_path / "other") as second:
        results = store.calibrate_quality(model, text, methods=METHODS, budgets=BUDGETS, questions=2, progress=False)
        assert [(result.method, result.budget) for result in results] == [
            (name, b) for name in METHODS for b in BUDGETS
        ]
        assert store.segments() == []  # the texts are not stored
        for result in results:
            method = replace(make_method(result.method), budget=result.budget)
            with KVStore(tmp_path / f"{result.method} {result.budget}") as method_store:
                method_store.precompute(model, text[:256], method=method, progress=False)
                losses = []
                for end in (288, 320):
                    cache = TieredCache(model, method_store, method=method, record=False)
                    with torch.no_grad():
                        logits, full = (
                            model(input_ids=text[None, :end], past_key_values=kv, logits_to_keep=1)
                            .logits[0, -1]
                            .log_softmax(-1)
                            for kv in (cache, DynamicCache(config=model.config))
                        )
                    losses.append(float((full.exp() * (full - logits)).sum()))
            assert result.losses == pytest.approx(losses, abs=2e-5)
        by_name = {(result.method, result.budget): result for result in results}
        chunks = by_name[METHODS[0], 0.5]
        assert chunks.loss < by_name[METHODS[0], 0.1].loss
        assert chunks.index == pytest.approx((16 + 4) / (2 * 16 * 4), rel=0.01)  # of each key a byte a number, a scale
        assert second.calibrate_quality(model, text, methods=METHODS[:1], budgets=(0.5,), questions=1, progress=False)


def test_a_target_takes_the_least_budget_that_keeps_it(model, text, tmp_path, caplog):
    ids, target = prompt(200), ContiguousKV(quality=0.05, reorder=False)
    with KVStore(tmp_path, policy="attention") as store:
        fill(store, model, ids, target)
        _, cache = ask(model, store, question(ids), target)
        assert cache.method.budget == 0.5 and "was not measured for this model" in caplog.text
        results = store.calibrate_quality(
            model, text, methods=[target], budgets=(0.1, 0.3, 0.6), questions=2, progress=False
        )
        losses = sorted({result.loss for result in results})
        for quality in (losses[0], losses[-1] * 8, *(4 * loss for loss in losses)):
            keeping = [result.budget for result in results if result.keeps(quality)]
            _, cache = ask(model, store, question(ids), replace(target, quality=quality))
            expected = min(keeping, default=1.0)
            assert cache.method.budget == expected
            attended = 192 if expected == 1 else max(1, int(expected * 24)) * 8
            assert cache.stats.tokens_attended == attended
        store.flush()
    with KVStore(tmp_path, policy="attention") as store:  # it is kept, of this model and these settings alone
        caplog.clear()
        assert ask(model, store, question(ids), replace(target, quality=losses[-1] * 8))[1].method.budget == 0.1
        assert "was not measured" not in caplog.text
        assert ask(model, store, question(ids), replace(target, chunk_tokens=4))[1].method.budget == 0.5
        assert "was not measured" in caplog.text


def test_a_target_that_nothing_keeps_restores_everything(model, text, tmp_path):
    ids, target = prompt(200), ContiguousKV(quality=1e-9, reorder=False)
    with KVStore(tmp_path) as store:
        fill(store, model, ids, target)
        store.calibrate_quality(model, text, methods=[target], budgets=(0.1,), questions=1, progress=False)
        output, cache = ask(model, store, question(ids), target)
        exact, _ = ask(model, store, question(ids), None)
        assert torch.equal(output.sequences, exact.sequences)
        assert all(torch.equal(a, b) for a, b in zip(output.logits, exact.logits, strict=True))
        layer, (keys, _) = cache.layers[0], kv_of(model, ids)[0]
        assert torch.equal(layer.keys[:, :, :192], keys[:, :, :192])


def test_a_budget_that_is_known_to_lose_much_is_told_once(model, text, tmp_path, caplog):
    ids, method = prompt(200), ContiguousKV(0.1, reorder=False)
    with KVStore(tmp_path, policy="attention") as store:
        fill(store, model, ids, method)
        (result,) = store.calibrate_quality(model, text, methods=[method], budgets=(0.3,), questions=2, progress=False)
        fingerprint = store.segments()[0].fingerprint
        for loss, budget, warns in ((0.05, 0.1, False), (0.2, 0.4, False), (0.2, 0.1, True), (0.2, 0.1, False)):
            keep_quality(store._storage, fingerprint, [replace(result, losses=[loss, loss])])
            caplog.clear()
            ask(model, store, question(ids), replace(method, budget=budget))
            assert ("loses 0.2 nats on this model at a budget of 0.3" in caplog.text) == warns


@pytest.mark.parametrize("kind", [ContiguousKV, H2O, Impress, KVDrive])
def test_every_method_with_a_budget_takes_a_target(kind):
    method = kind(quality=0.02)
    assert make_method(describe_method(method)) == method
    methods = []
    adjusted = method.with_measured_budget(lambda candidate: methods.append(candidate) or 0.35)
    assert methods == [method] and adjusted == kind(0.35, quality=0.02)
    assert describe_method(adjusted, adjusted.loss_ignores) == describe_method(kind())
    assert method.with_measured_budget(lambda candidate: None).budget == 0.5
    assert kind(0.3, quality=0.02).with_measured_budget(lambda candidate: 0.2).budget == 0.2  # the target counts
    assert kind(0.3).with_measured_budget(None).budget == 0.3
    for wrong in (0, -1, True, "0.1", float("nan")):
        with pytest.raises(ConfigError, match="quality must be a loss in nats"):
            kind(quality=wrong)


def test_the_codec_of_the_store_is_a_setting_of_what_was_measured(model, text, tmp_path, caplog):
    ids, target = prompt(200), ContiguousKV(quality=50, reorder=False)
    with KVStore(tmp_path, policy="attention", codec="int8") as store:
        fill(store, model, ids, "exact")
        (result,) = store.calibrate_quality(
            model, text, methods=["contiguous_kv:reorder=false"], budgets=(0.3,), questions=1, progress=False
        )
        assert result.method == "contiguous_kv:codec=int8:reorder=False"
        _, cache = ask(model, store, question(ids), target)
        assert cache.method.budget == 0.3 and "was not measured" not in caplog.text


def test_a_second_prompt_of_a_cache_keeps_the_measured_budget(tmp_path, caplog):
    model, ids, target = build("llama"), prompt(1200), KVDrive(quality=50, exact_from=0)
    with KVStore(tmp_path) as store:
        store.calibrate_quality(model, prompt(400)[0], methods=[target], budgets=(0.125,), questions=1, progress=False)
        fill(store, model, ids, replace(target, budget=0.125, quality=None))
        cache = TieredCache(model, store, method=target)
        for seed in (5, 6):
            request_ids = torch.cat([ids, prompt(24, seed=seed)], dim=1)
            model.generate(request_ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
            assert cache.method.budget == 0.125
            cache.reset()
    assert "was not measured" not in caplog.text


def test_most_questions_lose_no_more_than_twice_the_target():
    few = QualityFinding("h2o", 0.1, [0.0] * 30 + [0.1], 1.0, 0.1, 0.0, 0.1)
    assert few.keeps(0.02)
    assert not replace(few, losses=[0.0] * 10 + [0.04]).keeps(0.02)  # 9 % of them do
    assert not replace(few, losses=[0.006] * 10).keeps(0.02)
    assert replace(few, losses=[0.004] * 10).keeps(0.02)  # a quarter: other text may lose more
    assert np.isclose(few.loss, 0.1 / 31)


def test_the_texts_of_an_encrypted_store_are_encrypted(model, text, tmp_path, monkeypatch):
    keys, real_init = [], KVStore.__init__

    def noted(self, path, **settings):
        keys.append(settings.get("key"))
        real_init(self, path, **settings)

    with KVStore(tmp_path, key=secrets.token_bytes(32)) as store:
        monkeypatch.setattr(KVStore, "__init__", noted)
        store.calibrate_quality(model, text, methods=["h2o"], budgets=(0.5,), questions=1, progress=False)
    assert len(keys) == 2 == len(set(keys)) and None not in keys


def test_the_texts_of_a_killed_measurement_are_removed_by_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, shared, other_folder = (tmp_path / f"hf-tiered-quality-{name}" for name in ("killed", "shared", "other"))
    for folder in (killed, shared):
        KVStore(folder).close()
        (folder / "tmp" / "1-2-3").touch()
        (folder / "tmp" / "1-2-3.lock").touch()
    for folder in (shared, other_folder):
        folder.mkdir(exist_ok=True)
        (folder / "notes.txt").write_text("precious")
    with quality.scratch_folder() as running:
        KVStore(running).close()
        with quality.scratch_folder():
            assert not killed.exists()
            assert (Path(running) / "hf_tiered_cache.json").exists()
        for folder in (shared, other_folder):
            assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert sorted(tmp_path.iterdir()) == [other_folder, shared]


def test_the_texts_are_not_sent_to_a_remote(model, text, tmp_path, monkeypatch):
    with KVStore(tmp_path / "store") as store:
        monkeypatch.setenv("HF_TIERED_CACHE_REMOTE", f"sqlite://{tmp_path}/shared.db")
        store.calibrate_quality(model, text, methods=["h2o"], budgets=(0.5,), questions=1, progress=False)
    assert not (tmp_path / "shared.db").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"methods": ["exact"]}, "exact has no budget to choose"),
        ({"budgets": (0.1, 1.0)}, "budgets must be shares"),
        ({"budgets": ()}, "budgets must be shares"),
        ({"questions": 7}, "a text of 320 tokens is too short"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, text, tmp_path, settings, message):
    with KVStore(tmp_path) as store, pytest.raises(ConfigError, match=message):
        store.calibrate_quality(model, text, progress=False, **settings)


def test_budgets_of_a_method_share_what_is_stored(model, text, tmp_path, monkeypatch):
    method_types = []

    def counted(*args, real=quality.precompute):
        method_types.append(type(args[-1].method))
        return real(*args)

    monkeypatch.setattr(quality, "precompute", counted)
    with KVStore(tmp_path) as store:
        texts, methods = [text, text.flip(0)], ["contiguous_kv", "h2o"]
        store.calibrate_quality(model, texts, methods=methods, budgets=(0.1, 0.3), questions=1, progress=False)
    assert method_types == [kind for kind in (Exact, ContiguousKV, H2O) for _ in texts]


def test_prompts_come_evenly_from_all_texts():
    folder = Path(__file__).parents[2] / "eval" / "reference" / "xs"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.decode(range(first, first + 200)) for first in (100, 400)]
    prompts = _prompts(str(folder), texts, 64, 100)
    assert [len(ids) for ids in prompts] == [64] * len(prompts) and len(prompts) >= 4
    assert _prompts(str(folder), texts, 64, 2) == [prompts[0], prompts[len(prompts) // 2]]


def test_on_the_command_line(run, tmp_path, monkeypatch):
    calls = []

    def once(*args, real=KVStore.calibrate_quality, **kwargs):
        calls.extend(() if calls else real(*args, **kwargs))
        return calls

    monkeypatch.setattr(KVStore, "calibrate_quality", once)
    folder = Path(__file__).parents[2] / "eval" / "reference" / "xs"
    words = AutoTokenizer.from_pretrained(folder).decode(range(100, 400))
    (tmp_path / "text.txt").write_text(words * 2)
    arguments = ("calibrate", tmp_path / "store", "--model", folder, "--quality", "0.5", "--length")
    texts = ("--text", tmp_path / "text.txt", "--methods", "h2o")
    status, out, _ = run(*arguments, 300, *texts, "--plot", tmp_path / "losses.png")
    assert status == 0
    assert "h2o" in out and "70%" in out and "saved for this model" in out
    assert (tmp_path / "losses.png").stat().st_size > 1000
    results = json.loads(run(*arguments, 300, *texts, "--json")[1])
    strict = ("calibrate", tmp_path / "store", "--model", folder, "--quality", "1e-9", "--length", 300)
    assert "no budget lost at most 2.5e-10 on average and 5e-10 in 95 % of the" in run(*strict, *texts)[1]
    assert [result["budget"] for result in results] == [0.05, 0.1, 0.2, 0.35, 0.5, 0.7]
    status, _, error = run(*arguments, 300)
    assert status and "pass it with --text FILE" in error
    status, _, error = run(*arguments, 100000, *texts)
    assert status and "no text has 100000 tokens" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--quality", "0.1", "--text", "t", "--prefix", "64"), "--prefix and --quality cannot be combined"),
        (("--plot", "a.png"), "--plot can only be used with --quality"),
        (("--quality", "0.1", "--text", "t", "--plot", "a.txt"), "end it with .png, .svg or .pdf"),
        (("--quality", "0.1", "--text", "t", "--plot", "nowhere/a"), "the folder of --plot nowhere/a does not exist"),
        (("--methods", "h2o", "--prefix", "64"), "--methods can only be used with --quality"),
        (("--quality", "0.1", "--text", "t", "--repeats", "1"), "--repeats can only be used without --quality"),
        (("--prefix", "64", "--warm"), "--warm can only be used without --prefix"),
    ],
)
def test_options_that_would_be_ignored_are_refused(run, tmp_path, options, message):
    status, _, error = run("calibrate", tmp_path / "store", "--model", "none", *options)
    assert status == 2 and message in error
    assert not (tmp_path / "store").exists()
