"""The port of `instep vllm-serve` by itself."""

from __future__ import annotations

import asyncio

import pytest

from instep.arguments import parse
from instep.integrations.trl import front
from instep.integrations.trl.front import Front
from tests.assets import make_checkpoint


def test_a_port_that_never_listens_is_not_waited_for(tmp_path, monkeypatch):
    """A host's name that no server of names answers, say."""
    checkpoint = make_checkpoint(tmp_path / "hf")
    args = parse(["--hf-checkpoint", str(checkpoint), "--run-dir", str(tmp_path / "run")], "serve")
    server = Front(args, "http://127.0.0.1:1", "m", "", "127.0.0.1", None, lambda: True)
    monkeypatch.setattr(front, "START_SECONDS", 0.05)
    monkeypatch.setattr(server, "_serve", lambda: asyncio.sleep(0.3))
    with pytest.raises(OSError, match="does not listen after"):
        server.start()
    server.close()
