"""What an engine offers, where engines differ. Read once, when it is ready; nothing else asks for a version.

What an engine lacks is done another, stated way, or refused:

- `version_spans`: answers say under which weights each token was made. Without (vLLM 0.26) the client writes the
  version down, which is exact because no request is under way when it changes (`rollout/admission.py`); `keep`, which
  mixes versions in an answer, is refused.
- `digests`: `/weight_checker` digests every weight under its Hugging Face name. vLLM's own covers neither those names
  nor packed weights; there a failed proof names no tensors.
- `strict_requests`: a parameter that it does not know is an error. vLLM passes over it, so the client checks the names.
- `serves_nothing_unproven`: after a failed session it answers 503 by itself. vLLM stays paused instead, by instep.
"""

from __future__ import annotations

from dataclasses import dataclass

from instep.errors import ConfigError

PROTOCOL = 1  # of the plugin instep-vllm; it refuses another one


@dataclass(frozen=True)
class Capabilities:
    """Of one engine; `version` is that of vLLM, empty for the embedded engine."""

    kind: str
    version: str = ""
    version_spans: bool = True
    digests: bool = False
    strict_requests: bool = False
    serves_nothing_unproven: bool = False

    @property
    def plugin(self) -> bool:
        """Whether weights go through instep-vllm."""
        return self.kind == "vllm"

    def check_pause(self, mode: str) -> None:
        """Raises ConfigError where `mode` would make versions a guess."""
        if mode == "keep" and not self.version_spans:
            raise ConfigError(
                f"vLLM {self.version} does not say which weights made a token, so a response that goes on after a sync "
                "would have unknown versions",
                where="--pause-mode keep",
                remedy="use abort or wait, or vLLM 0.32",
            )


EMBEDDED = Capabilities("embedded", digests=True, strict_requests=True, serves_nothing_unproven=True)


def of_vllm(version: str) -> Capabilities:
    """What vLLM `version` ("0.32.0", "0.32.0+cpu") offers.

    Raises:
        ConfigError: older than any that instep can drive.
    """
    number = release(version)
    if number < (0, 26):
        raise ConfigError(
            f"vLLM {version} has no weight-transfer sessions of the form that instep uses",
            where="--rollout-backend vllm",
            remedy="install vLLM 0.26 or 0.32 (make install-vllm does so on a CPU)",
        )
    return Capabilities("vllm", version, version_spans=number >= (0, 32))


def release(version: str) -> tuple[int, int]:
    """(0, 32) of "0.32.0+cpu"."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)
