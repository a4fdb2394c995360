"""Whether the hub can be reached: asked once and for a few seconds, where its clients retry for minutes."""

from __future__ import annotations

import functools
import sys
import threading

from huggingface_hub import constants, get_session

PROBE_SECONDS = 3.0


@functools.cache
def go_offline_without_hub() -> bool:
    """Take data sets and models from the local cache alone if the hub does not answer within `PROBE_SECONDS`.

    Nothing is asked where HF_HUB_OFFLINE is set.

    Returns:
        Whether the hub answered.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    answered = _hub_answers()
    if not answered:
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # it has copied the setting; imported later, it copies this one
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return answered


def _hub_answers() -> bool:
    """Return whether the hub answers at all, through the proxy and with the certificates of its client."""
    answers: list[int] = []

    def ask() -> None:
        try:
            answers.append(get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS).status_code)
        except Exception:  # whatever the client of this version raises: there is no answer
            return

    thread = threading.Thread(target=ask, daemon=True)  # looking up a name has no time limit of its own
    thread.start()
    thread.join(PROBE_SECONDS)
    return bool(answers)
