"""One process of the soak: threads that use stores on one folder in every way there is, until it is told to stop.

It is told by SIGTERM, and tells what it has done in lines of JSON on its standard output.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import json
import logging
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "lib"), str(Path(__file__).parents[2])]

import numpy as np
import torch
from cases import GREEDY, Case, Turn, answer_of, model_of
from changes import Site, Undo, sites_within
from drawn_faults import Faults
from families import prompt
from transformers import PreTrainedModel

import eval.baselines  # noqa: F401  # registers h2o
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.errors import ConfigError, StoreClosedError, StoreError
from hf_tiered_cache.methods import CacheTune, make_method
from hf_tiered_cache.tiers.slabs import ORPHANED, RESERVED

BUDGETED = ("contiguous_kv:budget=0.25", "impress:budget=0.25", "h2o:budget=0.25")
PASSAGES = [prompt(48 + 16 * seed, seed=900 + seed)[0] for seed in range(4)]
MOST_STORES = 2
WAIT_SECONDS = 60.0
"""How long one operation may take while this process runs: twice as long as the longest of the store's own waits."""
HANG_SECONDS = 150.0
_TICK_SECONDS = 0.1


class Clock:
    """Seconds during which this process was not stopped, and who has been busy since when."""

    def __init__(self, stacks: Path) -> None:
        self.awake = 0.0
        self._stacks = stacks
        self._busy: dict[int, tuple[str, float]] = {}
        threading.Thread(target=self._watch, name="soak-watchdog", daemon=True).start()

    @contextmanager
    def busy(self, name: str) -> Iterator[Callable[[], float]]:
        """Mark this thread as busy, and yield a function that returns for how long."""
        since, me = self.awake, threading.get_ident()
        self._busy[me] = name, since
        try:
            yield lambda: self.awake - since
        finally:
            self._busy.pop(me, None)

    def _watch(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            self.awake += min(now - before, 5 * _TICK_SECONDS)
            before = now
            for name, since in list(self._busy.values()):
                if self.awake - since > HANG_SECONDS:
                    with self._stacks.open("a") as file:
                        file.write(f"{os.getpid()}: {name} has taken {self.awake - since:.0f} s\n")
                        file.flush()
                        faulthandler.dump_traceback(file, all_threads=True)
                    os._exit(3)


class Worker:
    """Process of the soak test.

    Args:
        plan: Settings that `soak.py` has written for all processes.
        seed: Random seed of this process.
    """

    def __init__(self, plan: dict[str, Any], seed: str) -> None:
        self.folder, self.root = Path(plan["folder"]), Path(plan["folder"]) / "store"
        self.limits, self.threads, self.seed = plan["limits"], plan["threads"], seed
        self.cases: list[Case] = torch.load(self.folder / "cases.pt", weights_only=False)
        self.models = {family: model_of(family) for family in {case.family for case in self.cases}}
        self.originals = copy.deepcopy(self.models)  # never run
        self.changeable: dict[tuple[int, str], PreTrainedModel] = {}  # copies, by thread and family
        self.sites = {family: _by_kind(sites_within(model)) for family, model in self.originals.items()}
        self.counts: Counter[str] = Counter()
        self.longest: dict[str, float] = {}
        self.lock = threading.Lock()
        self.stores: list[KVStore] = []
        self.stopping = threading.Event()
        self.armed = False  # whether an interrupt may come: the main thread is at something
        self.failing = 0  # counts the beginnings and ends of faults
        self.clock = Clock(self.folder / "stacks.txt")
        complaints = logging.Handler(logging.ERROR)  # what the library did not foresee
        complaints.emit = lambda record: self.wrong(complaints.format(record))
        logging.getLogger("hf_tiered_cache").addHandler(complaints)
        logging.getLogger("hf_tiered_cache").propagate = False
        threading.excepthook = lambda raised: self.raised_unseen(raised.exc_value)
        sys.unraisablehook = lambda raised: self.raised_unseen(raised.exc_value)

    # --- telling

    def say(self, **line: Any) -> None:
        with self.lock:
            os.write(1, (json.dumps(line) + "\n").encode())

    def wrong(self, message: str) -> None:
        self.say(wrong=f"{message} (seed {self.seed})")

    def raised_unseen(self, error: BaseException | None) -> None:
        """Record an error in a thread's own function or a finalizer, where Ctrl-C may occur too."""
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self.wrong("".join(traceback.format_exception(error)))

    def report(self) -> None:
        rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        self.say(counts=dict(self.counts), longest=self.longest, rss=rss)

    # --- what there is to do

    def request(self, choose: random.Random, store: KVStore) -> None:
        """Run a prompt, and sometimes the next turn, with the same cache, a fork of it or a new one."""
        case = choose.choice(self.cases)
        cache = TieredCache(self.models[case.family], store)
        turns = case.turns if choose.random() < 0.35 else case.turns[: 1 + (choose.random() < 0.1)][-1:]
        for turn in turns:
            try:
                self.ask(cache, turn, case.family)
            except KeyboardInterrupt:  # what came in the middle of it is forgotten
                self.counts["interrupted_requests"] += 1
                self.ask(cache if choose.random() < 0.5 else TieredCache(cache.model, store), turn, "after Ctrl-C")
            cache = choose.choice([cache, cache, cache.fork(), TieredCache(cache.model, store)])

    def ask(self, cache: TieredCache, turn: Any, name: str) -> None:
        before = cache.stats.tokens_restored
        out = cache.model.generate(turn.ids, past_key_values=cache, **GREEDY)
        self.counts["requests"] += 1
        self.counts["tokens_restored"] += cache.stats.tokens_restored - before
        if differs := turn.differs(out):
            self.wrong(f"{name}, {turn.ids.shape[1]} tokens, {cache.stats.as_dict()}: {differs}")

    def under_change(self, choose: random.Random, store: KVStore) -> None:
        """Ask a copy of a model that is changed, and ask it again when the change is undone.

        A copy that an exception leaves changed is not used again.
        """
        case, thread = choose.choice(self.cases), threading.get_ident()
        turn, family = choose.choice(case.turns), case.family
        model = self.changeable.pop((thread, family), None) or copy.deepcopy(self.originals[family])
        cache = TieredCache(model, store)
        if choose.random() < 0.5:
            self.ask(cache, case.turns[0], family)
        site, undo, expected, decided = self.change(choose, model, family, turn.ids)
        if choose.random() < 0.5:  # the KV of two models: nobody expects an answer
            with suppress(Exception):
                model.generate(case.turns[1].ids, past_key_values=cache, **GREEDY)
        with suppress(ConfigError):  # it has another number of layers
            for _ in range(2):
                cache = TieredCache(model, store)
                self.ask_changed(cache, expected, decided, f"{family}, {site}")
        undo()
        if choose.random() < 0.5:
            with suppress(Exception):
                model.generate(case.turns[1].ids, past_key_values=cache, **GREEDY)
        self.ask(TieredCache(model, store), turn, f"{family}, {site} undone")
        self.changeable[thread, family] = model

    def change(
        self, choose: random.Random, model: PreTrainedModel, family: str, ids: torch.Tensor
    ) -> tuple[Site, Undo, Turn, bool]:
        """Change a model in a way that lets it answer.

        Returns:
            The place of the change, what undoes it, the answer to `ids` without a store, and whether other rounding
            would not change its tokens.
        """
        while True:
            site = choose.choice(choose.choice(self.sites[family]))
            undo = site.change(model)
            with suppress(Exception):  # another shape, for example
                expected, decided = answer_of(model, ids)
                if expected.logits.isfinite().all():
                    self.counts["changes"] += 1
                    self.counts[f"changes: {site.kind}"] += 1
                    return site, undo, expected, decided
            undo()

    def ask_changed(self, cache: TieredCache, expected: Turn, decided: bool, name: str) -> None:
        out = cache.model.generate(expected.ids, past_key_values=cache, **GREEDY)
        self.counts["requests_under_change"] += 1
        self.counts["tokens_restored_under_change"] += cache.stats.tokens_restored
        if differs := expected.differs(out) if decided else expected.logits_differ(out):
            self.wrong(f"{name}, {expected.ids.shape[1]} tokens, {cache.stats.as_dict()}: {differs}")

    def within_a_budget(self, choose: random.Random, store: KVStore) -> None:
        case, method = choose.choice(self.cases), make_method(choose.choice(BUDGETED))
        turn = choose.choice(case.turns)
        try:
            cache = TieredCache(self.models[case.family], store, method=method)
        except ConfigError:  # it does not suit the model
            return
        out = cache.model.generate(turn.ids, past_key_values=cache, **GREEDY)
        if not torch.isfinite(out.logits[0]).all():
            self.wrong(f"{method}: the logits are not finite")
        self.counts["requests_within_a_budget"] += 1

    def passages(self, choose: random.Random, store: KVStore) -> None:
        model, method = self.models["llama"], CacheTune(recompute=0.25)
        passages = choose.sample(PASSAGES, 2)
        ids = torch.cat([prompt(9, seed=1)[0], *passages, prompt(11, seed=2)[0]]).unsqueeze(0)
        out = model.generate(ids, past_key_values=TieredCache(model, store, method=method), **GREEDY)
        if not torch.isfinite(out.logits[0]).all():
            self.wrong("passages: the logits are not finite")
        self.counts["requests_with_passages"] += 1

    def precompute(self, choose: random.Random, store: KVStore) -> None:
        if choose.random() < 0.3:
            passages = choose.sample(PASSAGES, 2)
            method = CacheTune(recompute=0.25)
            store.precompute(self.models["llama"], passages, passages=True, method=method, progress=False)
            return
        case, method = choose.choice(self.cases), choose.choice([None, *BUDGETED])
        with suppress(ConfigError):
            store.precompute(
                self.models[case.family], case.turns[0].ids, method=method, progress=False, pin=choose.random() < 0.1
            )

    def look(self, choose: random.Random, store: KVStore) -> None:
        case = choose.choice(self.cases)
        verb = choose.choice([store.lookup, lambda *args: store.warm(*args, progress=False)])
        verb(self.models[case.family], case.turns[1].ids)

    def remove(self, choose: random.Random, store: KVStore) -> None:
        rows = store.segments()
        store.remove(row.id for row in choose.sample(rows, min(len(rows), 2)))

    def unpin(self, choose: random.Random, store: KVStore) -> None:
        store.pin(store.pinned(), pinned=False)

    def gc(self, choose: random.Random, store: KVStore) -> None:
        store.gc(dry_run=choose.random() < 0.3)

    def verify(self, choose: random.Random, store: KVStore) -> None:
        before = self.failing
        report = store.verify(repair=choose.random() < 0.5)
        damaged = (self.folder / "damaged.txt").read_text().split()
        if (unexpected := report.bad.keys() - set(damaged)) and before == self.failing and not before % 2:
            self.wrong(f"verify: {[report.bad[name] for name in unexpected]}")

    def relayout(self, choose: random.Random, store: KVStore) -> None:
        rows = store.segments()
        ids = [row.id for row in choose.sample(rows, min(len(rows), 3))]
        store.relayout(make_method(choose.choice(["exact", *BUDGETED])), ids, progress=False)

    def clear(self, choose: random.Random, store: KVStore) -> None:
        store.clear(disk=choose.random() < 0.1)

    def flush(self, choose: random.Random, store: KVStore) -> None:
        store.flush()

    def reopen(self, choose: random.Random, store: KVStore) -> None:
        """Reopen a store that other processes may be using."""
        with self.lock:
            if store in self.stores:
                self.stores.remove(store)
        store.close()

    VERBS = (
        (60, request),
        (10, under_change),
        (8, within_a_budget),
        (4, passages),
        (5, precompute),
        (3, look),
        (2, remove),
        (1, unpin),
        (1, gc),
        (1, verify),
        (2, relayout),
        (1, clear),
        (1, flush),
        (1, reopen),
    )

    # --- doing it

    def store(self, choose: random.Random) -> KVStore:
        with self.lock:
            if len(self.stores) >= MOST_STORES:
                return choose.choice(self.stores)
        store = KVStore(self.root, **self.limits)
        with self.lock:
            self.stores.append(store)
        return store

    def one_thing(self, choose: random.Random, verb: Callable[..., None] | None = None) -> None:
        verb = verb or choose.choices([verb for _, verb in self.VERBS], [weight for weight, _ in self.VERBS])[0]
        name, failing, store = verb.__name__, self.failing, None
        with self.clock.busy(name) as elapsed:
            try:
                store = self.store(choose)
                verb(self, choose, store)
            except KeyboardInterrupt:
                self.counts["interrupts"] += 1
            except StoreClosedError:
                if store is None or store.usable:
                    self.wrong(f"{name}: {traceback.format_exc()}")
            except (StoreError, OSError) as error:
                may_refuse = verb.__name__ not in ("request", "under_change", "within_a_budget", "passages")
                if not may_refuse or (isinstance(error, OSError) and failing == self.failing and not failing % 2):
                    self.wrong(f"{name}: {traceback.format_exc()}")
                self.counts["refused"] += 1
            except Exception:
                self.wrong(f"{name}: {traceback.format_exc()}")
            self.counts["operations"] += 1
            self.longest[name] = round(max(self.longest.get(name, 0.0), elapsed()), 1)
            if elapsed() > WAIT_SECONDS:
                self.wrong(f"{name} has taken {elapsed():.0f} s")

    def go_on(self, number: int) -> None:
        choose = random.Random(f"{self.seed}/{number}")
        self.one_thing(choose, Worker.under_change)
        while not self.stopping.is_set():
            self.one_thing(choose)

    def weather(self) -> None:
        """Alternate between calm and failing system calls."""
        choose = random.Random(f"{self.seed}/weather")
        while not self.stopping.wait(choose.uniform(0.5, 6)):
            faults = Faults(self.root, choose.random(), choose.choice([0.02, 0.1, 0.4, 1.0]))
            self.failing += 1
            with faults.under_way():
                self.stopping.wait(choose.uniform(0.2, 1.5))
            time.sleep(0.2)  # calls under way
            self.failing += 1
            self.counts["faults"] += faults.struck

    def interrupted(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def run(self) -> None:
        signal.signal(signal.SIGINT, self.interrupted)
        signal.signal(signal.SIGTERM, lambda *_: self.stopping.set())
        threads = [threading.Thread(target=self.go_on, args=(n,)) for n in range(1, self.threads)]
        threads.append(threading.Thread(target=self.weather))
        threads.append(threading.Thread(target=self.tell_regularly))
        for thread in threads:
            thread.start()
        choose = random.Random(f"{self.seed}/0")
        while not self.stopping.is_set():
            try:
                self.armed = True
                self.one_thing(choose)
                self.armed = False
            except KeyboardInterrupt:  # on the way in or out
                self.counts["interrupts"] += 1
        for thread in threads:
            thread.join()
        with self.clock.busy("the end"):
            self.end()
        self.report()
        self.say(ended=True)

    def tell_regularly(self) -> None:
        self.report()
        while not self.stopping.wait(1.0):
            self.report()

    # --- the end

    def end(self) -> None:
        """Close all stores, and assert that nothing is left of them."""
        while self.stores:
            store = self.stores.pop()
            store.close()
            residency = store._storage.residency
            if residency.segments() or residency._pins:
                self.wrong(f"held after close: {residency._pins}, {residency.segments()}")
            for tier in residency.tiers:
                for pool in tier.pools():
                    if pool.pins.any() or np.isin(pool.owner, (RESERVED, ORPHANED)).any():
                        self.wrong(f"slots after close: {pool.pins.sum()} pinned")
            del store, residency
        deadline = time.monotonic() + 20
        while (leftover := self.left()) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)
        if leftover:
            self.wrong(f"left after close: {leftover}")

    def left(self) -> list[str]:
        """Return threads of the library, and open files of the store."""
        leftover = [thread.name for thread in threading.enumerate() if thread.name.startswith("hf-tiered")]
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if target.startswith(str(self.root)):
                    leftover.append(target)
        return leftover


def _by_kind(sites: list[Site]) -> list[list[Site]]:
    kinds: dict[str, list[Site]] = {}
    for site in sites:
        kinds.setdefault(site.kind, []).append(site)
    return list(kinds.values())


def main() -> None:
    warnings.simplefilter("ignore")
    faulthandler.enable()
    torch.set_num_threads(1)
    folder, seed = sys.argv[1:]
    stacks = (Path(folder) / "stacks.txt").open("a")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    Worker(json.loads((Path(folder) / "plan.json").read_text()), seed).run()


if __name__ == "__main__":
    main()
