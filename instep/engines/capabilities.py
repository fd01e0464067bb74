"""What an engine offers, where engines differ. Nothing else asks for a version.

What an engine lacks is done another, stated way, or refused:

- `version_spans`: answers say under which weights each token was made. Without (vLLM 0.26) the client writes the
  version down, which is exact because no request is under way when it changes (`rollout/admission.py`); `keep`, which
  mixes versions in an answer, is refused.
- `stop_reasons`: answers say which stop token or string ended a response. Without (vLLM 0.26) the client finds the stop
  string that the last token completed (`rollout/tokens.py`).
- `digests`: `/weight_checker` digests every weight under its Hugging Face name. vLLM's own covers neither those names
  nor packed weights; there a failed proof names no tensors.
- `strict_requests`: a parameter that it does not know is an error. vLLM passes over it, so the client checks the names.
- `serves_nothing_unproven`: after a failed session it answers 503 by itself. vLLM stays paused instead, by instep.
"""

from __future__ import annotations

from dataclasses import dataclass

from instep.errors import ConfigError


@dataclass(frozen=True)
class Capabilities:
    """What one engine offers; `engine` names it in errors, `version` is empty for an engine that is part of instep."""

    engine: str
    version: str = ""
    version_spans: bool = True
    stop_reasons: bool = True
    digests: bool = False
    strict_requests: bool = False
    serves_nothing_unproven: bool = False

    def check_pause(self, mode: str) -> None:
        """Raises ConfigError where `mode` would make versions a guess."""
        if mode == "keep" and not self.version_spans:
            raise ConfigError(
                f"{self.engine} {self.version} does not say which weights made a token, so a response that goes on "
                "after a sync would have unknown versions",
                where="--pause-mode keep",
                remedy=f"use abort or wait, or a newer {self.engine}",
            )
