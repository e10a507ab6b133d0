"""The environment process: `python -m rewriter.emulation --serve HOST:PORT`, or started by the launcher, which
hands it a socket that listens already: `python -m rewriter.emulation.environment_main DESCRIPTOR`."""

from __future__ import annotations

import signal
import socket
import sys

from rewriter.common.errors import RewriterError
from rewriter.common.processes import end_with_parent
from rewriter.emulation.config import EmulationConfig
from rewriter.emulation.environment import Environment
from rewriter.emulation.wire_mode import endpoint


def serve(listener: socket.socket, config: EmulationConfig) -> None:
    """Play all ranks that are not real until SIGTERM or SIGINT."""
    environment = Environment(listener, config.pace())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: environment.stop())
    environment.run()


def listen(address: str) -> socket.socket:
    """A socket that listens at "host:port". Raises RewriterError where it cannot."""
    host, port = endpoint(address)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise RewriterError(f"--serve {address}: {error}. Take an address of this machine and a free port") from None


if __name__ == "__main__":
    end_with_parent()
    given = EmulationConfig.from_environment()
    assert given is not None
    serve(socket.socket(fileno=int(sys.argv[1])), given)
