"""Servers of remotes, for tests and benchmarks: real ones, in processes of their own, in the loopback network."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.request import Request, urlopen

AWS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "testsecret",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}
"""Credentials of the S3-compatible server."""
_OSD = "00000000-0000-4000-8000-000000000001"
_CEPH = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon}
public addr = 127.0.0.1
ms bind msgr1 = false
keyring = {folder}/keyring
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
run dir = {folder}
log file = {folder}/$name.log
pid file =
admin socket =
mon data avail crit = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd class load list = *
osd objectstore = bluestore
bluestore block size = {nbytes}
bluestore block create = true
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw enable apis = s3
"""


class MissingServerError(Exception):
    """A server that is not installed. The message says what to install."""


class Server:
    """A server in its own process.

    Args:
        command: Command, with "{port}" for the port and "{folder}" for the folder.
        folder: Folder of its data and of its output, log.txt.
        is_ready: Returns whether it answers, given its port.
        port: Port; None for a free one.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, is_ready: Callable[[int], bool] | None = None, port: int = 0
    ) -> None:
        self.port, self._folder, self._is_ready = port or free_port(), folder, is_ready or accepts
        self._command = [word.format(port=self.port, folder=folder) for word in command]
        self.start()

    def start(self) -> None:
        """Start it, on the same port as before, and wait until it answers."""
        with (self._folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self._folder)
        deadline = time.monotonic() + 120
        while not self._is_ready(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_text = (self._folder / "log.txt").read_text(errors="replace")
                raise RuntimeError(f"{self._command[0]} did not start: {log_text[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it at once, as a power failure does."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Stop it: it takes connections and does not answer."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue it after `stop`."""
        self._process.send_signal(signal.SIGCONT)


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def accepts(port: int) -> bool:
    """Return whether a server takes connections."""
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def _programs(names: Sequence[str], package: str) -> None:
    if missing_names := [name for name in names if shutil.which(name) is None]:
        raise MissingServerError(f"{missing_names[0]} is missing; apt-get install {package}")


def _packages(names: Sequence[str], command: str) -> None:
    for name in names:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            raise MissingServerError(f"the package {name} is missing; {command}")


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Kill a server at the end of the context."""
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[Server]:
    """Run a Redis or Valkey server."""
    _packages(["redis"], "pip install '.[redis]'")
    program = shutil.which("valkey-server") or "redis-server"
    _programs([program], "redis-server")
    command = [program, "--port", "{port}", "--bind", "127.0.0.1", "--save", "", "--dir", "{folder}", *options]
    with running(Server(command, folder)) as server:
        yield server


@contextmanager
def s3_server(folder: Path, nbytes: int = 8 << 30) -> Iterator[Server]:
    """Run Ceph's object gateway, with a cluster of one monitor and one disk, which is a sparse file of `nbytes`.

    The context's server is the gateway: what it has stored outlives a kill.
    """
    _packages(["obstore"], "pip install '.[remote]'")
    _programs(["ceph-mon", "ceph-osd", "radosgw", "radosgw-admin"], "radosgw ceph-mon ceph-osd")
    port, mon = free_port(), free_port()
    conf = folder / "ceph.conf"
    conf.write_text(_CEPH.format(folder=folder, fsid=uuid.uuid4(), mon=mon, port=port, nbytes=nbytes))
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir()
    log = (folder / "setup.txt").open("wb")

    def run(program: str, *arguments: str) -> None:
        subprocess.run([program, "-c", str(conf), *arguments], check=True, timeout=120, stdout=log, stderr=log)

    def daemon(program: str, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([program, "-c", str(conf), *arguments, "-f"], stdout=log, stderr=log)

    keyring, monmap = str(folder / "keyring"), str(folder / "monmap")
    caps = ["--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *"]
    run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "client.admin", *caps)
    run("ceph-authtool", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    run("monmaptool", "--create", "--addv", "a", f"[v2:127.0.0.1:{mon}]", monmap)
    run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
    daemons = [daemon("ceph-mon", "-i", "a")]
    try:
        run("ceph", "osd", "new", _OSD)
        osd_keyring = str(folder / "osd" / "keyring")
        osd_caps = ["mon", "allow profile osd", "osd", "allow *"]
        run("ceph", "auth", "get-or-create", "osd.0", *osd_caps, "-o", osd_keyring)
        run("ceph-osd", "-i", "0", "-k", osd_keyring, "--mkfs", "--osd-uuid", _OSD)
        daemons.append(daemon("ceph-osd", "-i", "0", "-k", osd_keyring))
        keys = [f"--access-key={AWS['AWS_ACCESS_KEY_ID']}", f"--secret-key={AWS['AWS_SECRET_ACCESS_KEY']}"]
        run("radosgw-admin", "user", "create", "--uid=test", "--display-name=test", *keys)
        command = ["radosgw", "-c", str(conf), "-n", "client.admin", "-f"]
        with running(Server(command, folder, _answers, port)) as server:
            yield server
    finally:
        for process in reversed(daemons):
            process.kill()
            process.wait()
        log.close()


def _answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}", timeout=5):
            return True
    except OSError:
        return False


def s3_environment(server: Server) -> Mapping[str, str]:
    """Return the environment of clients of the S3-compatible server."""
    return AWS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}"}


def make_bucket(server: Server, name: str) -> None:
    """Make a bucket on the S3-compatible server."""
    import obstore

    place = obstore.store.S3Store(
        name,
        endpoint=f"http://127.0.0.1:{server.port}",
        region=AWS["AWS_REGION"],
        access_key_id=AWS["AWS_ACCESS_KEY_ID"],
        secret_access_key=AWS["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True},
    )
    url = obstore.sign(place, "PUT", "", timedelta(seconds=60))
    with urlopen(Request(url, method="PUT"), timeout=60):
        pass


@contextmanager
def mooncake_server(folder: Path, pool: int = 256 << 20) -> Iterator[Mooncake]:
    """Run a Mooncake master with its metadata server, and a process that provides a pool of `pool` bytes."""
    _packages(["mooncake.store"], "pip install mooncake-transfer-engine-non-cuda, or .[mooncake] with CUDA")
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None and spec.submodule_search_locations
    program = Path(spec.submodule_search_locations[0]) / "mooncake_master"
    metadata, admin = free_port(), free_port()
    command = [
        str(program),
        *("--rpc_address", "127.0.0.1", "--rpc_port", "{port}", "--metrics_port", str(admin)),
        *("--enable_http_metadata_server=true", "--http_metadata_server_host", "127.0.0.1"),
        *("--http_metadata_server_port", str(metadata), "--default_kv_lease_ttl", "1000"),
    ]
    with running(Server(command, folder)) as master:
        environment = {"MOONCAKE_TE_META_DATA_SERVER": f"http://127.0.0.1:{metadata}/metadata"}
        node = _PoolNode(master, folder, environment, pool)
        with running(node):
            yield Mooncake(master, node, environment, admin)


class _PoolNode(Server):
    """Process that provides memory for a Mooncake pool."""

    def __init__(self, master: Server, folder: Path, environment: Mapping[str, str], pool: int) -> None:
        code = (
            "import sys, time\n"
            "from mooncake.store import MooncakeDistributedStore\n"
            "store = MooncakeDistributedStore()\n"
            "metadata, pool, master, ready = sys.argv[1:]\n"
            "assert not store.setup('127.0.0.1', metadata, int(pool), 16 << 20, 'tcp', '', master)\n"
            "open(ready, 'w').close()\n"
            "time.sleep(1e9)\n"
        )
        ready = folder / f"ready-{uuid.uuid4().hex}"
        arguments = [environment["MOONCAKE_TE_META_DATA_SERVER"], str(pool), f"127.0.0.1:{master.port}", str(ready)]
        super().__init__([sys.executable, "-c", code, *arguments], folder, lambda _: ready.exists())


class Mooncake:
    """A Mooncake master, and a process that provides memory.

    Args:
        master: The master.
        node: The process that provides memory.
        environment: Environment of clients.
        admin_port: Port of the master's web pages.
    """

    def __init__(self, master: Server, node: Server, environment: Mapping[str, str], admin_port: int) -> None:
        self.master, self.node, self.environment, self.admin_port = master, node, environment, admin_port

    def address(self, prefix: str) -> str:
        """Return the address of a prefix."""
        return f"mooncake://127.0.0.1:{self.master.port}/{prefix}?admin={self.admin_port}"
