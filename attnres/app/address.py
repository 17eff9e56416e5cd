"""Whether the page can be served where it was asked to be: found out before anything is loaded."""

import socket

from attnres.errors import UserError, first_line


def check_port(host: str, port: int) -> str:
    """Return the numeric address that a server on `host` is bound to. Raises UserError where nothing can be served."""
    if not 1 <= port <= 65535:
        raise UserError(f"port is {port}: expected 1 to 65535")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return probe.getsockname()[0]
    except (OSError, UnicodeError) as error:  # a name that no host can have
        why = (getattr(error, "strerror", None) or first_line(error)).lower()
        raise UserError(
            f"cannot serve on {host}:{port} ({why}): choose another --port, or a --host of this machine"
        ) from error
