"""Where TRL's client offers the store of its weight group."""

import socket


def get_ip() -> str:
    """The loopback: client and server of a test run on one machine."""
    return "127.0.0.1"


def get_open_port() -> int:
    """A free port for that store; TRL's asynchronous trainers choose one each time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
