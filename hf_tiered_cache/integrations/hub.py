"""Check whether the hub can be reached: once and for a few seconds, since its clients retry for minutes."""

from __future__ import annotations

import functools
import sys
import threading

from huggingface_hub import constants, get_session

PROBE_SECONDS = 3.0


@functools.cache
def go_offline_without_hub() -> bool:
    """Use only the local cache for data sets and models if the hub does not answer within `PROBE_SECONDS`.

    The hub is not contacted if HF_HUB_OFFLINE is set.

    Returns:
        Whether the hub answered.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    answered = _hub_answers()
    if not answered:
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # it copied the setting on import; a later import copies the new value
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return answered


def _hub_answers() -> bool:
    """Return whether the hub answers, through the proxy and with the certificates of its client."""
    answers: list[int] = []

    def ask() -> None:
        try:
            answers.append(get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS).status_code)
        except Exception:  # clients raise different errors by version; all mean no answer
            return

    thread = threading.Thread(target=ask, daemon=True)  # a DNS lookup has no time limit of its own
    thread.start()
    thread.join(PROBE_SECONDS)
    return bool(answers)
