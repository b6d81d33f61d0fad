"""An engine whose port is in use reports it before it loads the model."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path


def test_a_taken_port_ends_the_engine_before_the_model_is_looked_at(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # The model does not exist: a server that looked for it first would name it instead.
        command = [
            sys.executable,
            "-P",
            "-m",
            "argosy",
            "serve",
            str(tmp_path / "no-model"),
            "--port",
            str(port),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"argosy serve: cannot listen on 127.0.0.1:{port}: the port is taken; ")
    assert line.endswith("choose another port with --port")
