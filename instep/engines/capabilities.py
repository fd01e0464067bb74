"""What an engine offers, where kinds and versions of engines differ. Nothing else asks an engine for its version."""

from __future__ import annotations

from dataclasses import dataclass

from instep.errors import ConfigError


@dataclass(frozen=True)
class Capabilities:
    """What one engine offers. What it lacks is done in another, stated way, or refused.

    Attributes:
        engine: its name in errors; version: empty for an engine that is part of instep.
        version_spans: its answers say which weight version made each token. Without that (vLLM 0.26) the client notes
            the version, which is exact because no request is under way when it changes (`rollout/admission.py`).
        spans_in_arrays: its answers in arrays say it, at least. The pause mode `keep`, which mixes versions in a
            response, wants one of the two; under it tokens of other answers are of unknown versions.
        stop_reasons: its answers say which stop token or string ended a response. Without that (vLLM 0.26) the client
            looks for the stop string that the last token completed (`rollout/tokens.py`).
        digests: `/weight_checker` gives a digest of every weight under its Hugging Face name. vLLM's own covers neither
            those names nor packed weights; there a failed proof names no tensors.
        strict_requests: an unknown parameter is an error. vLLM ignores it, so the client checks the names.
        serves_nothing_unproven: the engine itself answers 503 after a failed session. vLLM is kept paused by instep.
    """

    engine: str
    version: str = ""
    version_spans: bool = True
    spans_in_arrays: bool = False
    stop_reasons: bool = True
    digests: bool = False
    strict_requests: bool = False
    serves_nothing_unproven: bool = False

    def tells_versions(self, *, arrays: bool) -> bool:
        """Whether its answers, in arrays or in JSON, say which weights made each token."""
        return self.version_spans or (self.spans_in_arrays and arrays)

    def check_pause(self, mode: str, *, arrays: bool) -> None:
        """Raise ConfigError if the weight versions of tokens would be unknown under this `--pause-mode`.

        Args:
            arrays: whether the engine answers in arrays (`kind.answers_in_arrays`).
        """
        if mode == "keep" and not self.tells_versions(arrays=arrays):
            raise ConfigError(
                f"{self.engine} {self.version} does not say in JSON which weights made a token, so a response that "
                "goes on after a sync would have unknown versions",
                where="--pause-mode keep",
                remedy="use abort or wait, or engines that this run starts, without --no-fast-log-probs, --vllm-config "
                f"and --vllm-scheduler-cls, or a newer {self.engine}",
            )
