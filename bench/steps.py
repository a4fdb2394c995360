"""Work of a warm pass: calls, distinct functions, and changes of file; kernels and views.

    python bench/steps.py                        # this checkout
    python bench/steps.py --source ../before     # compared with one of `git worktree add ../before COMMIT`

Measures a pass of a Llama with two small layers over a prefix in host memory, which is mostly this library's own work.
Counts functions of the package that are entered in the calling thread. Comprehensions and resumed generators are not
counted, because they depend on the version of Python. Counts do not vary from run to run. Kernels and views are those
that one more layer needs in addition to `DynamicCache`. Here every query head has keys of its own, since the CPU's
attention saves work if heads share keys. An operation on an empty tensor is not a kernel. Times are those beyond
`DynamicCache`, measured in turns. Sources take turns, too, with a process for each round.
"""

from __future__ import annotations

import dis
import gc
import inspect
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from lib.common import first_token, interleaved, median, parser_of, seconds
from lib.pages import commit_of, machine, machine_text, save, table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_tiered_cache
from hf_tiered_cache import KVStore, TieredCache
from hf_tiered_cache.identity.fingerprint import active_mode
from hf_tiered_cache.methods import CacheTune, ContiguousKV, Exact, Krul, KVDrive, Passages

PACKAGE = Path(hf_tiered_cache.__file__).parent
PREFIX, SUFFIX = 256, 16
METHODS = {
    "Exact": Exact(),
    "ContiguousKV": ContiguousKV(0.25, reorder=False),
    "KVDrive": KVDrive(0.25),
    "CacheTune": CacheTune(recompute=0.15),
    "Krul": Krul(recompute=0.0),
}
KINDS = ("prompt", "token")
CPU = torch.device("cpu")
_PARTS_OF_FUNCTIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>"}
_RESUME = dis.opmap.get("RESUME", -1)  # since Python 3.11


def counted(action: Callable[[], Any]) -> dict[str, int]:
    """Count the calls, functions and changes of file within the package that `action` makes in this thread."""
    entered: list[CodeType] = []
    within = f"{PACKAGE}{os.sep}"

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name in _PARTS_OF_FUNCTIONS or not code.co_filename.startswith(within):
            return
        if not (code.co_flags & inspect.CO_GENERATOR and _goes_on(frame)):
            entered.append(code)

    gc.collect()
    gc.disable()  # finalizers run whenever a collection does
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    files = [code.co_filename for code in entered]
    return {
        "calls": len(entered),
        "functions": len(set(entered)),
        "changes_of_file": sum(before != after for before, after in itertools.pairwise(files)),
    }


def _goes_on(frame: FrameType) -> bool:
    """Return whether a frame resumes a generator."""
    if _RESUME < 0:
        return frame.f_lasti >= 0
    at, instructions = frame.f_lasti, frame.f_code.co_code
    return not (instructions[at] == _RESUME and instructions[at + 1] & 3 == 0)


class Operations(TorchDispatchMode):
    """Dispatch mode that counts PyTorch's kernels and views."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.views = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.is_view or name == "_unsafe_view":
            self.views += 1
        elif not name.startswith("empty"):  # which only allocates
            self.kernels += any(isinstance(leaf, torch.Tensor) and leaf.numel() for leaf in tree_leaves(result))
        return result


def model_of(layers: int, kv_heads: int) -> LlamaForCausalLM:
    """Build a small Llama with four heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    return model


@torch.no_grad()
def count_operations(folder: Path, layers: int) -> dict[str, tuple[int, int]]:
    """Count kernels and views of an exact prompt's pass and of a token's, both recorded, beyond `DynamicCache`."""
    model = model_of(layers, kv_heads=4)
    prompt = torch.randint(1, 128, (1, PREFIX + SUFFIX))
    prefix, suffix = prompt.split([PREFIX, SUFFIX], dim=1)

    def count(cache: Any, ids: torch.Tensor) -> Operations:
        with Operations() as operations:
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        return operations

    dynamic = DynamicCache(config=model.config)
    model(input_ids=prefix, past_key_values=dynamic)
    dynamic_counts = {"prompt": count(dynamic, suffix), "token": count(dynamic, suffix[:, :1])}
    with KVStore(folder / str(layers)) as store:
        store.precompute(model, prefix, progress=False)
        for record in (False, True):  # the first one warms up
            cache = TieredCache(model, store, record=record)
            tiered_counts = {"prompt": count(cache, prompt), "token": count(cache, suffix[:, :1])}
            assert cache.stats.tokens_restored == PREFIX
    return {
        kind: (counts.kernels - dynamic_counts[kind].kernels, counts.views - dynamic_counts[kind].views)
        for kind, counts in tiered_counts.items()
    }


def operations() -> dict[str, dict[str, float]]:
    """Return the kernels and views of one more layer, from models with four and with eight layers."""
    sys.modules[active_mode.__module__].HARMLESS_MODES += (Operations,)
    with tempfile.TemporaryDirectory() as folder:
        few, many = (count_operations(Path(folder), layers) for layers in (4, 8))
    return {
        kind: {
            name: (more - less) / 4
            for name, less, more in zip(("kernels", "views"), few[kind], many[kind], strict=True)
        }
        for kind in few
    }


@torch.no_grad()
def count_calls(folder: Path, layers: int) -> dict[str, int]:
    """Count the calls of an exact prompt's pass and of a token's, without spot checks and recording."""
    model = model_of(layers, kv_heads=2)
    prompt = torch.randint(1, 128, (1, PREFIX + SUFFIX))
    with KVStore(folder / f"calls-{layers}", spot_checks=0.0) as store:
        store.precompute(model, prompt[:, :PREFIX], progress=False)
        for _ in range(4):  # the last pass is counted, the others warm up
            cache = TieredCache(model, store, record=False)
            passes = {
                "prompt": partial(model, input_ids=prompt, past_key_values=cache, logits_to_keep=1),
                "token": partial(model, input_ids=prompt[:, :1], past_key_values=cache),
            }
            counts = {kind: counted(run)["calls"] for kind, run in passes.items()}
            assert cache.stats.tokens_restored == PREFIX
    return counts


def calls_per_layer() -> dict[str, float]:
    """Return the calls of one more layer, from models with four and with twelve layers."""
    with tempfile.TemporaryDirectory() as folder:
        few, many = (count_calls(Path(folder), layers) for layers in (4, 12))
    return {kind: (many[kind] - few[kind]) / 8 for kind in few}


class Workload:
    """Model, prompts, and a store with a prefix and two passages for each method."""

    def __init__(self, folder: Path, layers: int = 2) -> None:
        self.model = model_of(layers, kv_heads=2)
        prefix, second_prefix = torch.randint(1, 128, (2, PREFIX))
        self.suffix = torch.randint(1, 128, (1, SUFFIX))
        self.stores: dict[str, KVStore] = {}
        self.prompts: dict[str, torch.Tensor] = {}
        # earlier versions call it `segments`
        switch = "passages" if "passages" in inspect.signature(KVStore.precompute).parameters else "segments"
        for name, method in METHODS.items():
            passages = isinstance(method, Passages)
            store = self.stores[name] = KVStore(folder / name, policy=method.policy)
            prompts, options = [prefix, second_prefix] if passages else prefix, {switch: passages}
            store.precompute(self.model, prompts, method=method, progress=False, **options)
            leading = [self.suffix[0], prefix, second_prefix] if passages else [prefix]
            self.prompts[name] = torch.cat([*leading, self.suffix[0]]).unsqueeze(0)
        self.dynamic = DynamicCache(config=self.model.config)
        self.model(input_ids=self.prompts["Exact"], past_key_values=self.dynamic)

    def cache(self, name: str) -> TieredCache:
        """Create a cache for a method's store."""
        return TieredCache(self.model, self.stores[name], method=METHODS[name], record=False)

    def close(self) -> None:
        """Close the stores."""
        for store in self.stores.values():
            store.close()

    @torch.no_grad()
    def counts(self, name: str) -> dict[str, Any]:
        """Count the work of a prompt's pass, and of a token's pass after it."""
        token = self.suffix[:, :1]
        for _ in range(3):  # warm up
            cache = self.cache(name)
            self.model(input_ids=self.prompts[name], past_key_values=cache, logits_to_keep=1)
            self.model(input_ids=token, past_key_values=cache)
        cache = self.cache(name)
        prompt = counted(lambda: self.model(input_ids=self.prompts[name], past_key_values=cache, logits_to_keep=1))
        assert cache.stats.tokens_restored > PREFIX // 2, "nothing was restored"
        assert not cache.stats.bytes_read, "it was not warm"
        self.model(input_ids=token, past_key_values=cache)
        return {"prompt": prompt, "token": counted(lambda: self.model(input_ids=token, past_key_values=cache))}

    @torch.no_grad()
    def times(self, turns: int) -> dict[str, float]:
        """Return the median seconds to the first token, and of a token after it, beyond `DynamicCache`."""
        token = self.suffix[:, :1]

        def first_token(name: str) -> float:
            if name in METHODS:
                return self._first_token(name, lambda: self.cache(name))
            self.dynamic.crop(min(0, PREFIX - self.dynamic.get_seq_length()))
            return self._first_token("Exact", lambda: self.dynamic)

        ways = [*METHODS, "DynamicCache"]
        first = interleaved({name: partial(first_token, name) for name in ways}, turns, warm_up=5)
        caches = {name: self.cache(name) for name in METHODS}
        for name, cache in caches.items():
            self.model(input_ids=self.prompts[name], past_key_values=cache, logits_to_keep=1)
        after = interleaved(
            {
                name: partial(seconds, partial(self.model, input_ids=token, past_key_values=cache), CPU)
                for name, cache in {**caches, "DynamicCache": self.dynamic}.items()
            },
            turns,
            warm_up=5,
        )
        return {
            f"{name}, {label}": median(a - b for a, b in zip(times[name], times["DynamicCache"], strict=True))
            for label, times in (("first token", first), ("token", after))
            for name in METHODS
        }

    def _first_token(self, name: str, make: Callable[[], Any]) -> float:
        return first_token(self.model, self.prompts[name], make)


def measure(turns: int) -> dict[str, Any]:
    """Return counts and times of the imported package."""
    with tempfile.TemporaryDirectory() as folder:
        work = Workload(Path(folder))
        counts = {name: work.counts(name) for name in METHODS}
        times = work.times(turns)
        work.close()
    return {
        "package": str(PACKAGE),
        "counts": counts,
        "calls_per_layer": calls_per_layer(),
        "operations": operations(),
        "times": times,
    }


def measure_in_process(source: Path, turns: int) -> dict[str, Any]:
    """Measure the package of `source` in a new process."""
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, __file__, "--apart", "--turns", str(turns)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        raise SystemExit(f"counting {source} failed:\n{process.stderr}")
    figures = json.loads(process.stdout.splitlines()[-1])
    if Path(figures.pop("package")).parent != source:
        raise SystemExit(f"{source} holds no package hf_tiered_cache")
    return figures


def medians(documents: Sequence[Any]) -> Any:
    """Return the medians of the numbers in documents of equal structure; other threads vary them slightly."""
    if isinstance(documents[0], dict):
        return {name: medians([document[name] for document in documents]) for name in documents[0]}
    return median(documents)


def report(document: dict[str, Any]) -> str:
    """Return the page in Markdown."""
    machine_info, sources = document["machine"], document["sources"]

    def rows(cell: Callable[[dict[str, Any], str, str], str], kinds: tuple[str, ...]) -> list[list[str]]:
        return [
            [f"{name}, {kind}", *(cell(figures, name, kind) for figures in sources.values())]
            for kind in kinds
            for name in METHODS
        ]

    def counts(figures: dict[str, Any], name: str, kind: str) -> str:
        return " / ".join(f"{count:g}" for count in figures["counts"][name][kind].values())

    def operation_counts(kind: str, figures: dict[str, Any]) -> str:
        return " / ".join(f"{count:+g}" for count in figures["operations"][kind].values())

    def layer_calls(kind: str, figures: dict[str, Any]) -> str:
        return f"{figures['calls_per_layer'][kind]:g}"

    def times(figures: dict[str, Any], name: str, kind: str) -> str:
        return f"{median(figures['times'][f'{name}, {kind}']) * 1e3:.2f} ms"

    return (
        f"# Work of a warm pass on {machine_info['device']}\n\n"
        f"{machine_text(machine_info)} A Llama of two layers, a prefix of {PREFIX} tokens (for CacheTune two "
        f"passages of {PREFIX}) in host memory, a suffix of {SUFFIX}. Columns are commits.\n\n"
        "## Calls / distinct functions / changes of file\n\n"
        + table(["pass of", *sources], rows(counts, KINDS))
        + "\n## Calls that a layer adds, exact method, without spot checks\n\n"
        + table(
            ["pass of", *sources],
            [[f"a {kind}", *map(partial(layer_calls, kind), sources.values())] for kind in KINDS],
        )
        + "\n## Kernels / views that a layer needs in addition to DynamicCache, exact method\n\n"
        + table(
            ["pass of", *sources],
            [[f"a {kind}", *map(partial(operation_counts, kind), sources.values())] for kind in KINDS],
        )
        + "\n## Time in addition to DynamicCache\n\n"
        f"Medians of {document['rounds']} rounds of {document['turns']} turns. "
        "CacheTune computes a part of its passages, so its time is not an overhead. Krul decodes int8.\n\n"
        + table(["", *sources], rows(times, ("first token", "token")))
    )


def main() -> None:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--source", type=Path, action="append", default=[], help="another checkout; can be repeated")
    parser.add_argument("--rounds", type=int, default=3, help="number of processes per source")
    parser.add_argument("--turns", type=int, default=60, help="number of timed turns per round")
    parser.add_argument(
        "--apart", action="store_true", help="print the figures of this process as JSON, and save nothing"
    )
    arguments = parser.parse_args()
    if arguments.apart:
        print(json.dumps(measure(arguments.turns)))
        return
    folders = {commit_of(folder): folder.resolve() for folder in (*arguments.source, Path(__file__).parent.parent)}
    rounds = interleaved(
        {commit: partial(measure_in_process, folder, arguments.turns) for commit, folder in folders.items()},
        arguments.rounds,
        warm_up=0,
    )
    sources = {}
    for commit, commit_figures in rounds.items():
        commit_counts = {
            name: medians([figures[name] for figures in commit_figures])
            for name in ("counts", "calls_per_layer", "operations")
        }
        times = {name: [figures["times"][name] for figures in commit_figures] for name in commit_figures[0]["times"]}
        sources[commit] = {**commit_counts, "times": times}
    document = {
        "rounds": arguments.rounds,
        "turns": arguments.turns,
        "machine": machine(CPU, arguments.out.parent),
        "sources": sources,
    }
    save(arguments.out, "steps-cpu", document, report(document))
    print(report(document))


if __name__ == "__main__":
    main()
