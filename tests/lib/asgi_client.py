"""An ASGI client of the server, without a socket, and a folder with a model that it can serve."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

from families import CHAT_TEMPLATE

REFERENCE = Path(__file__).parents[2] / "eval" / "reference" / "xs"


def copy_reference(folder: Path) -> Path:
    """Copy the reference model, with a chat template."""
    shutil.copytree(REFERENCE, folder, ignore=shutil.ignore_patterns("curve.*", "check.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


class Client:
    """An ASGI client of the application, without a socket."""

    def __init__(self, app, models=None):
        self.app, self.models = app, models

    def ask(self, path, body=b"", headers=(), method="POST", chunks=None, pause=0.0):
        """Return status and text of the answer; the body arrives in `chunks`, `pause` seconds apart."""
        chunks = [body] if chunks is None else chunks
        pending, answer = list(chunks), {"text": b""}

        async def receive():
            await asyncio.sleep(pause)
            if not pending:
                await asyncio.sleep(60)
            return {"type": "http.request", "body": pending.pop(0), "more_body": bool(pending)}

        async def send(message):
            answer["status"] = message.get("status", answer.get("status"))
            answer["text"] += message.get("body", b"")

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json"), *headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        asyncio.run(asyncio.wait_for(self.app(scope, receive, send), 60))
        return answer["status"], answer["text"].decode()

    def chat(self, body, path="/v1/chat/completions"):
        return self.ask(path, json.dumps(body).encode())
