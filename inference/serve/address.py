"""Can a server listen there, and may it? Asked before a large target is loaded."""

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Is it a name of this machine that no other reaches?"""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_exposed(host: str, api_key: str | None, insecure: bool) -> None:
    """Raises ValueError for a key that is none, and where other machines could ask without one."""
    if api_key == "":
        raise ValueError("FOREDRAFT_API_KEY is empty: set a key, or unset it to serve this machine without one")
    if api_key is None and not insecure and not is_loopback(host):
        raise ValueError(
            f"host={host} can be reached by other machines: set FOREDRAFT_API_KEY, or give insecure=true to serve anybody"
        )


def check_address(host: str, port: int) -> None:
    """Raises ValueError where host:port cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"host={host} port={port} cannot be listened on: {error}; port=0 takes a free one") from None
