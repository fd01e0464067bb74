"""The address at which TRL's client offers the store of its weight group."""


def get_ip() -> str:
    """The loopback: client and server of a test run on one machine."""
    return "127.0.0.1"
