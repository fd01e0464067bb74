"""A decode engine is asked together with a prefill engine that has the same weights."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager

import pytest

from instep.engines.engine import Engine
from instep.engines.sglang_pairs import partner_of
from instep.errors import EngineError
from tests.stub_server import answering


def test_a_prefill_engine_that_is_down_or_has_other_weights_is_passed_over() -> None:
    def serving(version: str) -> AbstractContextManager[str]:
        return answering({"/weight_info": json.dumps({"weight_version": version})})

    with serving("3") as down:
        pass
    with serving("2") as old, serving("3") as new, serving("3") as url:
        decode = Engine("engine 3", url, role="decode")
        decode.prefills = [Engine(f"engine {i}", at, role="prefill") for i, at in enumerate((down, old, new))]
        assert partner_of(decode).name == "engine 2"
        decode.prefills = decode.prefills[:2]
        with pytest.raises(EngineError, match=r"no prefill engine answers with the weights of engine 3 \(3\)"):
            partner_of(decode)
