"""CUDA graphs on the CPU: a pass is recorded once, and replayed without Python code, in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.generation.continuous_batching.model_runner import ModelRunner


class Graph:
    """Recorded operations of a function. `replay` runs them on the current values of the tensors that they read.

    Tensors that the function allocates are overwritten with NaN after each replay. A CUDA graph reuses their memory.
    """

    replays = 0

    def __init__(self, function: Callable[[], None]) -> None:
        self._operations: list[tuple[Any, Any, Any, list[Any]]] = []
        self._own: list[torch.Tensor] = []
        outer = self

        class Recording(TorchDispatchMode):
            def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                assert "_local_scalar_dense" not in str(operation), "a graph cannot wait for a value"
                kwargs = kwargs or {}
                input_pointers = {leaf.untyped_storage().data_ptr() for leaf in _tensors((args, kwargs))}
                result = operation(*args, **kwargs)
                outputs = _tensors(result)
                outer._operations.append((operation, args, kwargs, outputs))
                outer._own += [leaf for leaf in outputs if leaf.untyped_storage().data_ptr() not in input_pointers]
                return result

        with Recording():
            function()
        self._spoil()

    def replay(self) -> None:
        type(self).replays += 1
        for operation, args, kwargs, outputs in self._operations:
            for output, result in zip(outputs, _tensors(operation(*args, **kwargs)), strict=True):
                if output.data_ptr() != result.data_ptr():
                    output.copy_(result)
        self._spoil()

    def reset(self) -> None:
        self._operations, self._own = [], []

    def _spoil(self) -> None:
        for tensor in self._own:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def use_graphs(monkeypatch: Any, varlen: bool = True) -> type[Graph]:
    """Let continuous batching compute with graphs from now on: all passes, or only those that decode.

    On a GPU, passes that decode read pages by a table of blocks. Here they look like all others.
    """

    class CountedGraph(Graph):
        pass

    begin, forward_function = ModelRunner.__init__, ModelRunner._get_forward_fn

    def begin_with_graphs(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self.pad_inputs = True
        self.inputs_and_outputs.use_cuda_graph_varlen = True  # rounds lengths up, so that passes share graphs

    def choose(self: Any, use_block_table: bool) -> tuple[Callable[..., None], bool]:
        requests = self.inputs_and_outputs.requests_in_batch
        decodes = all(request.query_length == 1 for request in requests)
        return forward_function(self, use_block_table)[0], varlen or decodes

    def capture(self: Any, forward: Callable[..., None], stream: Any, *args: Any) -> None:
        forward(*args)
        self.inputs_and_outputs.set_graph(CountedGraph(lambda: forward(*args)))

    monkeypatch.setattr(ModelRunner, "__init__", begin_with_graphs)
    monkeypatch.setattr(ModelRunner, "_capture_graph", capture)
    monkeypatch.setattr(ModelRunner, "_get_forward_fn", choose)
    return CountedGraph
