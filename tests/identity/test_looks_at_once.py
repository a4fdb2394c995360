"""Threads that look at a model at once, or are interrupted, never take its KV for that of earlier weights."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from families import build
from torch import nn

from hf_tiered_cache.identity import Fingerprinter, fingerprint
from hf_tiered_cache.identity import weights as weights_module


def edit_in_place(linear):
    with torch.no_grad():
        linear.weight.neg_()


def replace_memory(linear):
    linear.weight.data = -linear.weight.data


def replace_parameter(linear):
    linear.weight = nn.Parameter(-linear.weight.detach())


class Slow:
    """Stops each read of weights in host memory before it digests anything, until `go` is set."""

    def __init__(self, monkeypatch):
        self.began, self.go = threading.Event(), threading.Event()
        real_read = weights_module.HostMemory.read

        def read_slowly(memory, tensors):
            self.began.set()
            assert self.go.wait(10)
            real_read(memory, tensors)

        monkeypatch.setattr(weights_module.HostMemory, "read", read_slowly)


@pytest.mark.parametrize("edit", [edit_in_place, replace_memory, replace_parameter])
def test_a_look_waits_while_another_thread_reads_changed_weights(monkeypatch, edit):
    model = build("llama")
    name = Fingerprinter(model)
    before = name()
    edit(model.model.layers[1].mlp.up_proj)
    slow = Slow(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(name)
        assert slow.began.wait(10)
        second = pool.submit(name.look, begins_request=False)
        wait([second], timeout=0.2)  # without the lock it returns the old fingerprint at once
        slow.go.set()
        assert first.result() == second.result().fingerprint == fingerprint(model) != before


def test_weights_hold_only_by_a_read_that_has_ended(monkeypatch):
    """The writer asks, before it publishes KV, while an edit without a trace is being found."""
    model = build("llama")
    name = Fingerprinter(model)
    identity = name.look()
    model.model.layers[1].mlp.up_proj.weight.data.neg_()
    computed_at = time.monotonic()
    slow = Slow(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        refreshed = pool.submit(name.refresh)
        assert slow.began.wait(10)
        future = pool.submit(identity.weights_held, computed_at)
        wait([future], timeout=0.2)
        slow.go.set()
        refreshed.result()
        assert not future.result()
    assert name() != identity.fingerprint


def test_weights_hold_though_their_memory_was_freed():
    """`share_memory` frees it, for example as `torch.multiprocessing` sends the model to another process."""
    model = build("llama")
    name = Fingerprinter(model)
    identity = name.look()
    model.share_memory()
    assert identity.weights_held(time.monotonic())
    model.model.layers[1].mlp.up_proj.weight.data.neg_()
    assert not identity.weights_held(time.monotonic())
    name.refresh()
    assert name() == fingerprint(model) != identity.fingerprint


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("edit", [edit_in_place, replace_memory, replace_parameter])
def test_a_look_after_an_interrupted_one_finds_the_change(monkeypatch, edit, reads):
    """Ctrl-C before the changed weights are read, or after."""
    model = build("llama")
    name = Fingerprinter(model)
    before = name()
    edit(model.model.layers[1].mlp.up_proj)
    real_read = weights_module.HostMemory.read

    def interrupted(memory, tensors):
        if reads:
            real_read(memory, tensors)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(weights_module.HostMemory, "read", interrupted)
        name()
    assert name.look(begins_request=False).fingerprint == fingerprint(model) != before
