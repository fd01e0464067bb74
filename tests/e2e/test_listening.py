"""All listening sockets of a real run, tried as another user of the host would try them: control needs the key."""

import subprocess
import sys
import time

import psutil
import pytest

from tests.e2e.commands import ENVIRONMENT, grpo_arguments, on_vllm
from tests.e2e.listening import CONTROL, GENERATION, LOOPBACK, PAGE, listeners

REFUSED = {401, 403, 404, 405, 415, 422, 501}  # 415 and 422: vllm-router reads a body before it asks for the key
APART = [*on_vllm(2), "--prefill-num-servers", "1"]  # NIXL hands the KV cache over
WORKER = "instep.cluster.worker_main"
EMBEDDED, TWO_RANKS = "--rollout-backend embedded", "--actor-num-gpus-per-node 2 --num-threads 2"


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(f"{EMBEDDED} --rollout-num-gpus 2 {TWO_RANKS}".split(), id="router", marks=pytest.mark.router),
        pytest.param(f"{EMBEDDED} --no-api-key".split(), id="no-api-key", marks=pytest.mark.slow),
        pytest.param(on_vllm(), id="vllm", marks=[pytest.mark.vllm, pytest.mark.slow]),
        pytest.param(APART, id="prefill-decode", marks=[pytest.mark.vllm, pytest.mark.slow]),
    ],
)
def test_a_stranger_controls_nothing(small, tmp_path, tmp_path_factory, words):
    command = [sys.executable, "-m", "instep.cli"]
    command += grpo_arguments(small, tmp_path, *words, "--num-rollout", "100000")
    command += ["--custom-rm-path", "tests.e2e.listening.telling_reward"]
    told = tmp_path_factory.mktemp("told") / "key"
    with open(tmp_path / "out.txt", "w") as out:
        process = subprocess.Popen(command, env={**ENVIRONMENT, "KEY_TOLD": str(told)}, stdout=out, stderr=out)
    try:
        steps = wait_for_steps(process, tmp_path, 1)
        me = psutil.Process(process.pid)
        family = [me, *me.children(recursive=True)]
        found = list(dict.fromkeys(listeners(family)))
        assert {x.address for x in found if x.port} <= set(LOOPBACK), found
        assert not [x for x in found if x.path and x.open_to_others()], found
        of_engines = [x for x in found if "engines.embedded" in x.program or "vllm_main" in x.program]
        for one in found:
            if not one.port or WORKER in one.program:
                continue  # gloo speaks no HTTP, and knows no keys (docs/security.md)
            if (status := one.ask("GET /no_such_route")) is None:
                continue  # gloo of vLLM's
            if status == 200:  # the router's metrics, which answer every path with themselves
                assert "vllm::router" in one.program, one
                continue
            assert {one.ask(route) for route in CONTROL} <= REFUSED, one
            if one in of_engines and one.ask("GET /health") == 200:
                assert {one.ask(route) for route in CONTROL} == {401}, one
                assert {one.ask(route, **PAGE) for route in (*CONTROL, *GENERATION)} == {403}, one
                expected = {401} if "--no-api-key" not in words else {200, 400}
                assert {one.ask(route) for route in GENERATION} <= expected, one
        assert any(one.ask("GET /health") == 200 for one in of_engines)
        for one in found:
            if WORKER in one.program:
                assert one.ask("POST /pause", timeout=0.2) is None
        wait_for_steps(process, tmp_path, steps + 2)  # it goes on as if nothing had been
        key = told.read_text()
        words_of_all = [" ".join(p.cmdline()) for p in family if p.is_running()]
        assert len(key) >= 40 and not any(key in text for text in words_of_all)
        said = [path for path in tmp_path.rglob("*") if path.is_file() and key in path.read_text(errors="replace")]
        assert [path.name for path in said] == ([] if "--no-api-key" in words else ["api_key"])
        assert all(path.stat().st_mode & 0o077 == 0 for path in said)
    finally:
        process.terminate()
        process.wait(timeout=240)
    assert not (tmp_path / "api_key").exists()


def wait_for_steps(process, run_dir, count, seconds=300.0):
    """Wait until `count` steps are logged; how many are."""
    deadline, path = time.monotonic() + seconds, run_dir / "metrics.jsonl"
    while (done := path.read_text().count('"train/loss"') if path.exists() else 0) < count:
        assert process.poll() is None and time.monotonic() < deadline, (process.poll(), done)
        time.sleep(0.1)
    return done
