"""Lead text that precedes passages while their KV is computed (see `Passages`).

It belongs to no document, so the KV of a document holds content of no other document, and deleting a document deletes
its content.
"""

from __future__ import annotations

import logging

import torch
from transformers import AutoTokenizer, DynamicCache

from .calibrations import keep_records, records_of
from .patches.attach import Attachment
from .storage import Storage

TEXT = (
    "The following text has been taken from a larger collection of documents, articles and notes. Each of them was "
    "written by another author, at another time, about another subject, and they stand here one behind the other in no "
    "particular order. Some are long and some are short; some tell of people and places, of films, music and books, "
    "some of history, science, law or sport. Read them with care, since a question about one or several of them may "
    "follow at the end.\n\n"
    "Harbour\nA harbour is a place on the coast where ships lie sheltered from wind and waves. Some harbours are "
    "natural, such as the mouths of large rivers; others were built with walls of stone. Goods are loaded and unloaded "
    "there, and people go on board or ashore.\n\n"
    "Bridge\nA bridge is a structure that carries a road, a railway or a path over a river, a valley or another road. "
    "The first bridges were logs and flat stones. Arches were known in ancient times; steel made much longer spans "
    "possible in the nineteenth century.\n\n"
)
"""Text that ends like a document, so that a passage begins as it does after another one."""
_LEAST, _UNKNOWN = 16, 0.02
"""Minimum number of tokens that a tokenizer must make of the text, and maximum share of unknown tokens."""
logger = logging.getLogger("hf_tiered_cache")


def kept_lead(storage: Storage, attachment: Attachment, fingerprint: str, first: int, tokens: int) -> torch.Tensor:
    """Return the lead text that this store keeps for a model, int64 `[n]`.

    The first call makes it from the end of `TEXT`, with the tokenizer in the model's folder or local cache. If there is
    none, or it does not know the language, the model generates a text.

    Args:
        storage: storage to keep the text in.
        attachment: attachment of the model.
        fingerprint: fingerprint of the model.
        first: token that the text follows.
        tokens: maximum number of tokens of the text.
    """
    name = f"{fingerprint} lead {first} {tokens}"
    for record in records_of(storage, name):
        text = record.get("text")
        if isinstance(text, list) and 0 < len(text) <= tokens and all(_is_id(attachment, one) for one in text):
            return torch.tensor(text)
    text = _tokenized(attachment)[-tokens:] or write(attachment, first, tokens)
    if storage.disk.backend.writable:
        keep_records(storage, name, [{"text": text}])
    return torch.tensor(text)


def _tokenized(attachment: Attachment) -> list[int]:
    """Return `TEXT` as token ids of the model; [] without a tokenizer that knows its words."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            attachment.model.name_or_path, local_files_only=True, trust_remote_code=False
        )
        text: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    except Exception as error:  # the folder may hold anything
        logger.debug("the model's tokenizer cannot be loaded: %r", error)
        return []
    known = sum(one != tokenizer.unk_token_id and _is_id(attachment, one) for one in text)
    return text if len(text) >= _LEAST and known >= (1 - _UNKNOWN) * len(text) else []


@torch.no_grad()
def write(attachment: Attachment, first: int, tokens: int) -> list[int]:
    """Generate a text by sampling from the model, with a fixed seed and without special tokens.

    Args:
        attachment: attachment of the model.
        first: token that the text follows.
        tokens: number of tokens of the text.
    """
    model, generator = attachment.model, torch.Generator().manual_seed(0)
    cache, text = DynamicCache(config=attachment.config), [first]
    special = _special_tokens(attachment)
    for _ in range(tokens):
        ids = torch.tensor([text[-1:]], device=attachment.device_of(0))  # [1, 1]
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        chances = logits.float().cpu().index_fill(0, special, -torch.inf).softmax(0)  # [vocabulary]
        text.append(int(chances.multinomial(1, generator=generator)))
    return text[1:]


def _special_tokens(attachment: Attachment) -> torch.Tensor:
    """Return the token ids that configurations have a name for, int64 `[n]`, such as those of BOS, EOS and images."""
    model, found = attachment.model, set[int]()
    for config in (attachment.config, model.config, getattr(model, "generation_config", None)):
        for name, value in vars(config).items() if config is not None else ():
            if name.endswith(("_token_id", "_token_index")):
                found.update(one for one in (value if isinstance(value, list) else [value]) if _is_id(attachment, one))
    return torch.tensor(sorted(found), dtype=torch.int64)


def _is_id(attachment: Attachment, value: object) -> bool:
    return isinstance(value, int) and 0 <= value < attachment.config.vocab_size
