"""Names of settings, attributes and methods that a description of a model leaves out, unless user code refers to them.

So are private settings of a configuration, and private attributes that packages add to a model: no class has them.
"""

from __future__ import annotations

import enum

import torch
from torch import nn
from transformers import PreTrainedConfig

IRRELEVANT = frozenset(
    {
        *("architectures", "transformers_version", "torch_dtype", "dtype", "attn_implementation"),
        *("use_cache", "return_dict", "output_attentions", "output_hidden_states", "gradient_checkpointing"),
        *("problem_type", "id2label", "label2id", "num_labels", "task_specific_params", "finetuning_task"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "tokenizer_class"),
        *("chunk_size_feed_forward", "tie_word_embeddings", "initializer_range", "keys_to_ignore_at_inference"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "name_or_path"),
    }
)
"""Settings of a configuration that affect neither keys nor values."""
UNRELATED = frozenset(
    {
        *("_is_hf_initialized", "_is_torch_compile"),
        *("generation_config", "name_or_path", "loss_type", "kernel_config", "all_tied_weights_keys"),
        *("gradient_checkpointing", "rope_deltas", "max_seq_len_cached", "generate", "generate_batch"),
        *("prepare_inputs_for_generation", "quantization_method", "is_quantized", "is_loaded_in_4bit", "hf_quantizer"),
        *("hf_device_map", "warnings_issued", "is_gradient_checkpointing", "peft_config", "vocab_size"),
        *("to", "cuda", "cpu", "npu", "xpu", "mlu", "sdaa", "musa", "train", "eval"),
        *("_no_split_modules", "_skip_keys_device_placement", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
        *("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_save"),
        *("_tied_weights_keys", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_tp_size", "_device_mesh"),
        *("_hf_peft_config_loaded", "_prepare_peft_hotswap_kwargs"),
        *("_gradient_checkpointing_func", "_output_capturing_hooks_installed", "_is_accelerate_prepared"),
    }
)
"""Attributes of torch, transformers, accelerate and peft that affect no KV or depend on the prompt."""
ADAPTER_STATE = frozenset({"_active_adapter", "_disable_adapters", "merged_adapters", "_caches"})
"""Attributes of adapter layers that `adapter_state` covers."""
CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__"})
_UNCALLED = CONSTRUCTORS | {
    *("__init_subclass__", "__class_getitem__", "__set_name__", "__del__"),
    *("__repr__", "__str__", "__format__", "__dir__"),
    *("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__"),
    *("__copy__", "__deepcopy__", "__sizeof__", "__hash__"),
}
"""Special methods that change no result: construction, printing, pickling, hashing. torch.compile replaces some."""
NO_MEMBER = frozenset(
    {
        *("loss_function", "loss_type"),
        *("__doc__", "__module__", "__dict__", "__weakref__", "__annotations__", "__abstractmethods__", "_abc_impl"),
        *("__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__", "__annotate_func__"),
        *("__annotations_cache__", "__slotnames__", "__qualname__"),
    }
)
"""Members that change no result."""
NOT_CONSTRUCTED = (BaseException, enum.Enum, nn.Module, torch.Tensor, PreTrainedConfig)
"""Classes with instances that no pass creates, or whose constructors pass values on only."""


def uncalled(kind: type) -> frozenset[str]:
    """Return the names of methods that no pass calls of a class."""
    return _UNCALLED if issubclass(kind, NOT_CONSTRUCTED) else frozenset()


def is_special(name: str) -> bool:
    """Return whether passes may call a method of this name without a reference to the name."""
    return name.startswith("__") and name.endswith("__") and name not in _UNCALLED
