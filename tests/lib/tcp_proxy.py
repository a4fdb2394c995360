"""TCP proxy in front of a local server, which can stop forwarding: a network that is partitioned, and heals."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_WINDOW = 64 << 10


class TcpProxy:
    """Proxy that forwards the bytes of all connections in both directions until `cut` is called.

    Connections stay open while it does not forward, and new ones are taken. `heal` forwards what has waited.

    Args:
        port: Port of the server.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._flows = threading.Event()
        self._flows.set()
        self._ended = False
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def cut(self) -> None:
        """Forward nothing until `heal` is called."""
        self._flows.clear()

    def heal(self) -> None:
        """Forward again."""
        self._flows.set()

    def close(self) -> None:
        """Close all connections."""
        self._ended = True
        self._flows.set()
        for connection in [self._listener, *self._sockets]:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _start(self, run, *arguments) -> None:
        threading.Thread(target=run, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        while not self._ended:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(client)
            self._start(self._connect, client)

    def _connect(self, client: socket.socket) -> None:
        self._flows.wait()
        try:
            server = socket.create_connection(("127.0.0.1", self._server_port), timeout=10)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        self._sockets.append(server)
        for connection in (client, server):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._start(self._forward, client, server)
        self._start(self._forward, server, client)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(_WINDOW):
                self._flows.wait()
                target.sendall(content)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


@contextmanager
def proxied(port: int) -> Iterator[TcpProxy]:
    """Run a proxy in front of a port."""
    proxy = TcpProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
