"""Can a server listen there? Asked before a large target is loaded."""

import socket


def check_address(host: str, port: int) -> None:
    """Raises ValueError where host:port cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"host={host} port={port} cannot be listened on: {error}; port=0 takes a free one") from None
