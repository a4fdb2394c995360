"""A method for conversations that does nothing: classes of tests derive from it, and override what they do."""

from __future__ import annotations

from typing import Any

from hf_tiered_cache.methods import ForConversation


class Conversing(ForConversation):
    """Method without KV of conversations, which observes and compacts nothing."""

    def for_conversation(self, name: str) -> Any:
        return self

    def compact(self, idle: Any) -> None:
        return None

    def observer(self) -> Any:
        return None
