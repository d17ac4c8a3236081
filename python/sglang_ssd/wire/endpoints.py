"""Where a drafter may listen: a socket file, the loopback interface or, with keys, anywhere."""

from __future__ import annotations

import os
import tempfile
from urllib.parse import urlsplit

IPC = "ipc://"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
ALLOWED_ENDPOINTS = (
    "ipc:///PATH of a socket, tcp://127.0.0.1:PORT or, with both keys, tcp://HOST:PORT"
)
SOCKET_DIR_PREFIX = "sglang-ssd-"

_MAX_IPC_PATH = 103  # sockaddr_un.sun_path holds 104 bytes on the tightest system


def endpoint_refusal(endpoint: str, *, has_keys: bool) -> str | None:
    """Why this is no endpoint for us; None if it is one."""
    if endpoint.startswith(IPC):
        path = endpoint.removeprefix(IPC)
        if not path.startswith("/"):
            return "not an absolute path"
        if len(os.fsencode(path)) > _MAX_IPC_PATH:
            return f"the path is longer than {_MAX_IPC_PATH} bytes"
        return None
    if not endpoint.startswith("tcp://"):
        return "unknown kind of endpoint"
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return str(error)
    if host not in LOOPBACK_HOSTS and not has_keys:
        return f"host {host} is not the loopback interface, and there are no keys"
    if not host:
        return "no host"
    if port is None or parts.path:
        return "no port"
    return None


def is_here(endpoint: str) -> bool:
    """Whether both ends are on this machine."""
    return endpoint.startswith(IPC) or urlsplit(endpoint).hostname in LOOPBACK_HOSTS


def validate_endpoint(endpoint: str, *, has_keys: bool = False) -> str:
    """The endpoint itself; ValueError says what is wrong with it and what is allowed."""
    refusal = endpoint_refusal(endpoint, has_keys=has_keys)
    if refusal is not None:
        raise ValueError(f"{endpoint!r}: {refusal}; must be {ALLOWED_ENDPOINTS}")
    return endpoint


def pid_namespace() -> int:
    """Where a process id of ours means something: containers may share the folder for sockets."""
    return os.stat("/proc/self/ns/pid").st_ino


def unique_ipc_endpoint() -> str:
    """A fresh ipc:// endpoint in a new directory that only this user may enter (mode 0700)."""
    prefix = f"{SOCKET_DIR_PREFIX}{pid_namespace()}-{os.getpid()}-"
    return f"{IPC}{tempfile.mkdtemp(prefix=prefix)}/drafter"
