"""Which keys open which routes of the front; `instep_engine/guard.py` is for engines."""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import dataclass

from instep_engine.guard import EVERYONE, GENERATION_ROUTES

OPEN = frozenset({"/health", "/health/"})
# Routes without effect on weights: keys for generation open them, too.
READING = GENERATION_ROUTES | frozenset(
    "/get_world_size/ /generate/ /chat/ /get_sequence_logprobs/ /get_world_size /server_info /is_paused /weight_info "
    "/v1/chat/completions/render".split()
)


@dataclass(frozen=True)
class Access:
    """Access rules of routes.

    Attributes:
        key: opens every route; "": all are open.
        generate_key: opens `READING`, too; `EVERYONE`: they are open; "": there is no such key.
        key_file: where the user finds `key`.
    """

    key: str
    generate_key: str = ""
    key_file: str = ""

    def refusal(self, path: str, header: str) -> tuple[int, str] | None:
        """Return status and message of a refused request with this Authorization header; None for an accepted one."""
        reads = path in READING
        if path in OPEN or not self.key or (reads and self.generate_key == EVERYONE) or sends(header, self.key):
            return None
        if self.generate_key not in ("", EVERYONE) and sends(header, self.generate_key):
            told = f"this key opens generation only, not {path}, which needs the key in {self.key_file}"
            return None if reads else (403, told)
        how = "send 'Authorization: Bearer KEY', or name the server http://user:KEY@HOST:PORT (vllm_server_base_url)"
        which = f"the key in {self.key_file}" if self.key_file and not reads else "the server's key"
        return 401, f"{path} needs {which}: {how}"


def sends(header: str, key: str) -> bool:
    """Return whether the header has the key: as a bearer token, or as the password of http://user:KEY@HOST."""
    scheme, _, given = header.partition(" ")
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode(errors="replace").partition(":")[2]
        except binascii.Error:
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode(errors="surrogateescape"), key.encode())
