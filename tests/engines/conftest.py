"""One engine process per kind and model, for the whole session. `running.py` has what imports torch.

The process that hands the tests to others (pytest-xdist) imports this file, too, before they start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from instep.engines.engine import Engine as ControlledEngine
    from tests.engines.running import Engine

ENGINE_KINDS = {
    "embedded": [],
    "vllm": [pytest.mark.vllm],
    "sglang": [pytest.mark.sglang],
}  # and marks of the tests that use it


VLLMS_FORM = ("test_vllm_form", "test_teacher", "test_streaming", "test_robustness", "test_conformance_routes")


def _params(*fast: tuple[str, str]) -> list[Any]:
    """Every kind with every model; those that are not `fast` are slow."""
    return [
        pytest.param(
            (kind, model), id=f"{kind}-{model}", marks=[*marks, *([] if (kind, model) in fast else [pytest.mark.slow])]
        )
        for kind, marks in ENGINE_KINDS.items()
        for model in ("tied", "untied")
    ]


# A second engine costs as much as the first one, and few tests see how its head is made.
TIED = [(kind, "tied") for kind in ENGINE_KINDS]
PARAMS = _params(*TIED)
# For tests that do: a tied head is no weight of its own.
both_heads = pytest.mark.parametrize("engine", _params(*TIED, ("embedded", "untied")), indirect=True)


@pytest.fixture(scope="session", params=PARAMS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from tests.engines.running import make_checkpoint, run_engine

    kind, model = request.param
    folder = tmp_path_factory.mktemp(f"{kind}-{model}")
    hf = make_checkpoint(folder / "model", tied=model == "tied")
    with run_engine(kind, folder / "model", hf, folder / "log") as running:
        yield running


@pytest.fixture(autouse=True)
def _of_its_form(request: pytest.FixtureRequest) -> None:
    if request.path.stem in VLLMS_FORM and "engine" in request.fixturenames:
        if request.getfixturevalue("engine").kind == "sglang":
            pytest.skip("SGLang's routes have another form: tests/engines/test_sglang.py")


@pytest.fixture(autouse=True)
def _leave_engine_clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves the shared engine paused."""
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.ok("/abort_requests")
        engine.ok("/resume")


# ---- one embedded engine for tests of rollouts, and arguments about it


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.assets import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "hf", max_len=1024)


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlledEngine]:
    from instep.rollout import runtime
    from tests.engines import rollouts

    engine = rollouts.start_engine(tiny_model, tmp_path_factory.mktemp("engine"))
    yield engine
    runtime.shutdown()
    engine.stop()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engines import rollouts

    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [
        {"prompt": [{"role": "user", "content": f"{i} + {i} ="}], "label": str(2 * i)}
        for i in range(rollouts.NUM_PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make_args(tiny_model: Path, data: Path, server: ControlledEngine) -> Callable[..., Any]:
    """Arguments by the real parser, as hooks get them."""
    from instep.arguments.parse import parse
    from tests.engines import rollouts

    def make(*extra: str, url: str = server.url, kind: str = "embedded") -> Any:
        argv = ["--hf-checkpoint", str(tiny_model), "--prompt-data", str(data), "--input-key", "prompt"]
        argv += ["--label-key", "label", "--apply-chat-template", "--num-rollout", "3", "--rollout-batch-size", "4"]
        argv += ["--n-samples-per-prompt", "2", "--rollout-max-response-len", "12", "--rollout-timeout", "60"]
        argv += ["--actor-num-gpus-per-node", "1"]
        reward = [] if "--rm-type" in extra else ["--custom-rm-path", f"{rollouts.__name__}.parity"]
        reward = [] if "--custom-rm-path" in extra else reward
        port = int(url.rsplit(":", 1)[1])
        return parse([*argv, *reward, *extra]).view(
            {
                "vllm_router_ip": "127.0.0.1",
                "vllm_router_port": port,
                "vllm_model_routers": {"actor": ("127.0.0.1", port)},
                "rollout_engine_urls": [url],
                "rollout_engine_kind": kind,
                "num_rollout": 3,
            }
        )

    return make


@pytest.fixture(autouse=True)
def _forget_calls() -> None:
    from tests.engines import rollouts

    rollouts.calls.clear()
