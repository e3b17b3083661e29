"""Checks of the server's address, before a large target is loaded."""

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Return whether this is a name of the machine that other machines cannot reach."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_exposed(host: str, api_key: str | None, insecure: bool) -> None:
    """Raise ValueError for an empty key, and if other machines could send requests without a key."""
    if api_key == "":
        raise ValueError("FOREDRAFT_API_KEY is empty: set a key, or unset it to serve this machine without one")
    if api_key is None and not insecure and not is_loopback(host):
        remedy = "set FOREDRAFT_API_KEY, or set insecure=true to serve everyone"
        raise ValueError(f"host={host} can be reached by other machines: {remedy}")


def check_address(host: str, port: int) -> None:
    """Raise ValueError if the server cannot listen on host:port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as error:
        place = f"host={host} port={port}"
        raise ValueError(f"the server cannot listen on {place}: {error}; port=0 uses a free port") from None
