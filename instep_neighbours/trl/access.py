"""Who may call which route of the front, by the keys that a request brings; `instep_engine/guard.py` is for engines."""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass

from instep_engine.guard import EVERYONE, GENERATION_ROUTES

OPEN = frozenset({"/health", "/health/"})
# What no weight depends on: who may generate may call them, too.
READING = GENERATION_ROUTES | frozenset(
    "/get_world_size/ /generate/ /chat/ /get_sequence_logprobs/ /get_world_size /server_info /is_paused /weight_info "
    "/v1/chat/completions/render".split()
)


@dataclass(frozen=True)
class Access:
    """Who may call what.

    Attributes:
        key: opens every route; "": they are open.
        generate_key: opens `READING`, too; `EVERYONE`: they are open; "": no further key does.
        key_file: where the user finds `key`.
    """

    key: str
    generate_key: str = ""
    key_file: str = ""

    def refusal(self, path: str, header: str) -> tuple[int, str] | None:
        """HTTP status and message of a refused request with this header Authorization; None for one that may pass."""
        reads = path in READING
        if path in OPEN or not self.key or (reads and self.generate_key == EVERYONE) or sends(header, self.key):
            return None
        if self.generate_key not in ("", EVERYONE) and sends(header, self.generate_key):
            told = f"this key opens generation only, not {path}, which asks for that in {self.key_file}"
            return None if reads else (403, told)
        how = "send 'Authorization: Bearer KEY', or name the server http://user:KEY@HOST:PORT (vllm_server_base_url)"
        which = f"the key in {self.key_file}" if self.key_file and not reads else "the server's key"
        return 401, f"{path} needs {which}: {how}"


def sends(header: str, key: str) -> bool:
    """Whether the header carries the key: as a bearer's token, or as the password of http://user:KEY@HOST."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode(errors="replace").partition(":")[2]
        except binascii.Error:
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(errors="surrogateescape"), key.encode())
