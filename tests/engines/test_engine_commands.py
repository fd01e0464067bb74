"""The tables and the planned command lines, against the parsers of the vLLM and the router that are installed here."""

import http.server
import importlib.util
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from instep.arguments.help import record
from instep.arguments.parse import parse
from instep.cluster.engine_plan import plan_engines, plan_routers
from instep.engines.flags import (
    TABLES,
    EngineFlag,
    Package,
    engine_words,
    flag_table,
    installed_version,
    read_table,
    router_arguments,
)
from instep.engines.reserved_flags import reserved
from instep.engines.spec import Addresses
from instep.engines.vllm_process import serve_arguments
from instep.system.ports import free_port
from instep.system.processes import SupervisedProcess, stop_all

AT = Addresses("127.0.0.1", 8000, "10.0.0.1", 29501, 29550, 5600)

# Reads [[argv, ...], ...] and answers, for each, what the package's own parser makes of it.
PARSE = """
import argparse, json, sys
sys.path.append({folder!r})
import extract_flags
out, sys.stdout, argvs = sys.stdout, sys.stderr, json.load(sys.stdin)
sys.argv = ["vllm"]
answers = []
parser = extract_flags.parser_of({package!r})
for argv in argvs:
    try:
        answers.append({{k: str(v) for k, v in vars(parser.parse_args(argv)).items()}})
    except SystemExit:
        answers.append(None)
json.dump(answers, out)
"""


def needs(package: Package, module: str):
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{package} is not installed here")


def answers(package: str, argvs: list[list[str]]) -> list[dict | None]:
    folder = importlib.util.find_spec("instep.engines").submodule_search_locations[0]
    code = PARSE.format(folder=folder, package=package)
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(argvs), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def example(flag: EngineFlag) -> list[str]:
    """A value that it takes."""
    special = {"lora_modules": "name=path", "mm_processor_device": "auto", "mm_feature_transport": "cpu"}
    special["speculative_algorithm"] = "EAGLE"
    if flag.field in special:
        return [special[flag.field]]
    values = {"int": "1", "float": "0.5", "size": "2k", "json": "{}", "text": "x", "json_or_text": '{"a": "b"}'}
    values["si_size"] = "2Ki"
    return [] if flag.kind in ("switch", "boolean") else [flag.choices[0] if flag.choices else values[flag.kind]]


@needs("vllm-router", "vllm_router")
def test_the_routers_table_and_commands():
    package: Package = "vllm-router"
    if installed_version(package) in TABLES[package]:
        assert extracted(package) == read_table(package, installed_version(package)).flags
    refused = {field for field, _, _ in reserved(package)}
    known = [flag for flag in flag_table(package).flags if flag.field not in refused]
    given = [["--router-" + flag.name.removeprefix("--"), *example(flag)] for flag in known]
    argvs = [router_arguments(parse(words, "plan")) for words in given]
    (spec,) = routers = plan_routers(*planned("--rollout-num-gpus 2 --prefill-num-servers 1 --router-policy random"))
    argvs.append(spec.arguments("127.0.0.1", 3000, 3001, [("prefill", "http://p:1"), ("decode", "http://d:1")]))
    (spec,) = plan_routers(*planned("--rollout-num-gpus 2 --router-balance-abs-threshold 0"))
    argvs.append(spec.arguments("127.0.0.1", 3000, 3001))
    *singles, disaggregated, regular = answers("vllm-router", argvs)
    assert [flag.name for flag, answer in zip(known, singles, strict=True) if answer is None] == []
    assert len(routers) == 1
    assert disaggregated["vllm_pd_disaggregation"] == "True" and disaggregated["policy"] == "random"
    assert (disaggregated["prefill"], disaggregated["decode"]) == ("[['http://p:1']]", "[['http://d:1']]")
    assert (regular["worker_urls"], regular["balance_abs_threshold"]) == ("[]", "0")
    assert (regular["policy"], regular["disable_retries"]) == ("sticky_least_loaded", "True")
    assert (regular["port"], regular["prometheus_port"]) == ("3000", "3001")


@needs("vllm-router", "vllm_router")
def test_the_planned_router_sends_a_request_to_prefill_and_then_to_decode(tmp_path):
    """Two servers that only note what they get stand for the engines."""
    seen: list[tuple[str, dict]] = []
    members = [(role, note_requests(role, seen)) for role in ("prefill", "decode")]
    (spec,) = plan_routers(*planned("--rollout-num-gpus 2 --prefill-num-servers 1"))
    port = free_port()
    command = [sys.executable, "-m", "vllm_router.launch_router"]
    command += spec.arguments("127.0.0.1", port, free_port(), members)
    router = SupervisedProcess("router", command, tmp_path / "router.log")
    try:
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}}
        answer = ask(f"http://127.0.0.1:{port}/inference/v1/generate", body, router)
    finally:
        stop_all([router], grace=2.0)
    assert [role for role, _ in seen] == ["prefill", "decode"]
    (_, first), (_, second) = seen
    assert first["token_ids"] == second["token_ids"] == [1, 2, 3]
    assert first["sampling_params"]["max_tokens"] == 1 and first["kv_transfer_params"]["do_remote_decode"] is True
    assert second["sampling_params"] == {"max_tokens": 4} and second["kv_transfer_params"] == {"from": "prefill"}
    assert answer["kv_transfer_params"] == {"from": "decode"}


def note_requests(role: str, seen: list[tuple[str, dict]]) -> str:
    """The URL of a server that notes what it is asked to generate."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.reply({})

        def do_POST(self) -> None:
            seen.append((role, json.loads(self.rfile.read(int(self.headers["content-length"])))))
            self.reply({"choices": [{"token_ids": [1]}], "kv_transfer_params": {"from": role}})

        def reply(self, content: dict) -> None:
            text = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def ask(url: str, body: dict, router: SupervisedProcess) -> dict:
    """Its answer, as soon as it is up."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return json.load(answer)
        except OSError:
            assert router.alive() and time.monotonic() < deadline, router.log_tail()
            time.sleep(0.2)


@pytest.mark.slow
@needs("vllm", "vllm")
def test_vllms_table_and_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    package: Package = "vllm"
    if installed_version(package) in TABLES[package]:
        assert extracted(package) == read_table(package, installed_version(package)).flags
    refused = {field for field, _, _ in reserved(package)}
    known = [flag for flag in flag_table(package).flags if flag.field not in refused]
    given = [["--vllm-" + flag.name.removeprefix("--"), *example(flag)] for flag in known if flag.field != "dtype"]
    given += [["--vllm-" + flag.negations[0].removeprefix("--")] for flag in known if flag.negations]
    argvs = [[w for ws in engine_words(parse(words, "plan")).values() for w in ws] for words in given]
    two_nodes = (
        "--rollout-num-gpus 16 --rollout-num-gpus-per-engine 16 --vllm-data-parallel-size 8 "
        "--vllm-pipeline-parallel-size 2 --vllm-enable-expert-parallel --vllm-gpu-memory-utilization 0.7 "
        "--vllm-compilation-config.mode 3"
    )
    prefill = "--rollout-num-gpus 2 --prefill-num-servers 1"
    for _, engines in (planned(two_nodes), planned(prefill)):
        argvs += [serve_arguments(engines[0], AT, rank) for rank in range(len(engines[0].nodes))]
    *singles, head, other, producer = answers("vllm", argvs)
    wrong = [words for words, answer in zip(given, singles, strict=True) if answer is None]
    assert [words for words in wrong if words[-1] != "{}"] == [], "flags that vLLM refuses"
    assert len(wrong) <= 4, wrong  # JSON of which vLLM wants more than {}
    for answer in (head, other):
        expected = {"tensor_parallel_size": "1", "data_parallel_size": "8", "pipeline_parallel_size": "2"}
        expected |= {
            "nnodes": "2",
            "master_addr": "10.0.0.1",
            "master_port": "29501",
            "data_parallel_rpc_port": "29550",
        }
        expected |= {"enable_expert_parallel": "True", "gpu_memory_utilization": "0.7", "model_tag": "models/policy"}
        assert {name: answer[name] for name in expected} == expected
    assert [(a["node_rank"], a["headless"]) for a in (head, other)] == [("0", "False"), ("1", "True")]
    assert head["port"] == "8000"
    assert "kv_connector='NixlConnector'" in producer["kv_transfer_config"]
    assert "kv_role='kv_producer'" in producer["kv_transfer_config"]


def planned(words: str):
    args = parse(f"--hf-checkpoint models/policy {words}".split(), "plan")
    return args, plan_engines(args)


@needs("sglang-router", "sglang_router")
def test_sglangs_router_takes_every_flag():
    words = "--rollout-backend=sglang"
    assert refused_flags("sglang-router", "--router-", words, router_arguments) == []


@pytest.mark.slow
@needs("sglang", "sglang")
def test_sglang_takes_every_flag():
    more = "--sglang-enable-dp-attention"
    assert refused_flags("sglang", "--sglang-", more, words_of_engine) == []


def words_of_engine(args: Any) -> list[str]:
    return ["--model-path", "model", *(word for words in engine_words(args).values() for word in words)]


def refused_flags(package: Package, prefix: str, more: str, read: Callable[[Any], list[str]]) -> list[str]:
    """The flags that instep takes and the installed package does not; before that, its table is compared with it."""
    if installed_version(package) in TABLES[package]:
        assert extracted(package) == read_table(package, installed_version(package)).flags
    refused = {field for field, _, _ in reserved(package)}
    known = [flag for flag in flag_table(package).flags if flag.field not in refused]
    given = [[prefix + flag.name.removeprefix("--"), *example(flag)] for flag in known]
    found = answers(package, [read(parse([*words, more], "plan")) for words in given])
    return [flag.name for flag, answer in zip(known, found, strict=True) if answer is None]


def extracted(package: Package) -> tuple[EngineFlag, ...]:
    """What the installed package says today."""
    script = importlib.util.find_spec("instep.engines.extract_flags").origin
    done = subprocess.run(
        [sys.executable, "-P", script, package, "1"], capture_output=True, text=True, timeout=300, check=True
    )
    rows = json.loads(done.stdout)["flags"]
    return tuple(EngineFlag(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows)


def test_every_flag_has_a_record():
    for package in TABLES:
        table = flag_table(package, extract=False)
        assert all(record(package, flag).passed_to in (package, "") for flag in table.flags)
