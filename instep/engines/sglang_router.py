"""sglang-router in front of SGLang engines: what differs from vllm-router. Its process is `sglang_router_main.py`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from instep.arguments.settings import Settings
from instep.engines.keys import key_of
from instep.engines.router import CALL_SECONDS, COMMON_FLAGS, NoRoute, Router
from instep.engines.topology import ServerRole
from instep.errors import ConfigError, EngineError
from instep_engine.guard import KEY_VARIABLE
from instep_engine.sglang_form import MORE_LABEL, PATH

# What sglang-router 0.3.2 passes on of a body of SGLang's `/generate`, and of its sampling parameters.
PASSED = frozenset(
    "text input_ids input_embeds image_data video_data audio_data modalities sampling_params rid model stream "
    "return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs return_hidden_states "
    "return_bytes return_entropy session_params lora_path lora_id custom_logit_processor bootstrap_host bootstrap_port "
    "bootstrap_room bootstrap_pair_key data_parallel_rank conversation_id background priority extra_key no_logs "
    "log_metrics custom_labels".split()
)
PASSED_SAMPLING = frozenset(
    "max_new_tokens min_new_tokens temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty "
    "stop stop_token_ids ignore_eos skip_special_tokens no_stop_trim n sampling_seed json_schema regex ebnf".split()
)
_TRUE_ANYWAY = "spaces_between_special_tokens"  # SGLang's only such field that the router drops


class SglangRouter(Router):
    """A sglang-router, or an external one. Engines of every role join and leave while it runs."""

    program, package, main = "sglang-router", "sglang_router", "instep.engines.sglang_router_main"
    external_flags = "--sglang-router-ip and --sglang-router-port"
    remove_route = "DELETE /workers/ID, with the ID in GET /workers"
    how_to_install = "pip install sglang-router"
    own_flags: ClassVar[Mapping[str, Sequence[str]]] = {
        "policy": ["cache_aware"],  # this and the next three are slime's
        "balance_abs_threshold": ["10"],
        "balance_rel_threshold": ["1.2"],
        "log_level": ["warn"],
        "shutdown_grace_period_secs": ["0"],  # `drop_requests`: a hung request would hold it up
        "worker_startup_timeout_secs": [str(round(CALL_SECONDS))],  # one that dies as it joins does not join later
        **COMMON_FLAGS,
    }

    _has_ids = False  # older routers do not have them: they have the routes of vllm-router

    @classmethod
    def words(cls, args: Settings) -> list[str]:
        """Do the same as `Router.words`. Raises ConfigError: a policy with which it does not start without engines."""
        for field in ("policy", "prefill_policy", "decode_policy"):
            if args.router_overrides.get(field, [])[-1:] == ["power_of_two"]:
                raise ConfigError(
                    "sglang-router does not start with this policy: its engines join later, once they are ready",
                    where=f"--router-{field.replace('_', '-')} power_of_two",
                    remedy="use cache_aware (the default), round_robin, random or manual",
                )
        return super().words(args)

    @classmethod
    def disaggregated_words(cls, kv_connector: str, members: Iterable[tuple[ServerRole, str]]) -> list[str]:
        """Return the flag for prefill and decode engines, which join later."""
        return ["--pd-disaggregation"]

    @classmethod
    def environment(cls, key: str) -> dict[str, str]:
        return {KEY_VARIABLE: key}

    @classmethod
    def disaggregated(cls) -> type[Router]:
        return cls

    @classmethod
    def packed(cls, path: str, payload: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a request in a form of which it drops nothing: the rest is JSON in a label, which the plugin reads."""
        if path != PATH or not isinstance(payload, Mapping):
            return payload
        given = payload.get("sampling_params")
        rest = _more(payload, PASSED)
        if any(_more(params, PASSED_SAMPLING) for params in (given if isinstance(given, list) else [given])):
            rest["sampling_params"] = given
        if not rest:
            return payload
        return {**payload, "custom_labels": {**(payload.get("custom_labels") or {}), MORE_LABEL: json.dumps(rest)}}

    def listed(self) -> set[str]:
        if not self._has_ids:
            try:
                return super().listed()
            except NoRoute:
                self._has_ids = True
        return set(self._workers())

    def _workers(self) -> dict[str, dict[str, Any]]:
        """Return what the router says about each engine, by URL."""
        return {worker["url"]: worker for worker in self._call("GET", "/workers")["workers"]}

    def _change(self, leave: Sequence[str], join: Sequence[str]) -> None:
        """Let engines leave and join, and wait until they have: the router answers before it has done so."""
        if not self._has_ids:
            return super()._change(leave, join)
        workers = self._workers()
        for url in workers.keys() & set(leave):
            self._call("DELETE", f"/workers/{workers[url]['id']}")
        for url in join:
            self._call("POST", "/workers", self._about(url))
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            workers = self._workers()
            still = sorted(workers.keys() & set(leave))
            absent = [url for url in join if not workers.get(url, {}).get("is_healthy")]
            if not still and not absent:
                return None
            if time.monotonic() > deadline:
                what = f"takes no {', '.join(absent)}" if absent else f"keeps {', '.join(still)}"
                remedy = "see the router's log; do /health, /model_info and /server_info answer there?"
                raise EngineError(f"the router {what} within {CALL_SECONDS:.0f} s", where=self.url, remedy=remedy)
            time.sleep(0.05)

    def _about(self, url: str) -> dict[str, Any]:
        """Return what the router needs to know about an engine. An external router gets no key but that of its clients.

        The router sends `api_key` to a regular engine in place of its client's. Others get the client's.
        """
        about: dict[str, Any] = {"url": url, "worker_type": "regular"}
        if (engine := self._engines.get(url)) is not None:
            about["worker_type"] = engine.role
            if engine.role == "prefill":
                about["bootstrap_port"] = engine.bootstrap_port
        if key := key_of(url if self._start is not None else self.url):
            about["api_key"] = key
        return about


def _more(given: Any, passed: frozenset[str]) -> dict[str, Any]:
    """Return the fields of `given` beyond `passed` that ask for something."""
    if not isinstance(given, Mapping):  # absent, or the engine refuses it
        return {}
    return {name: x for name, x in given.items() if name not in passed and x not in (None, name == _TRUE_ANYWAY)}
