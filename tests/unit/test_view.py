"""`instep view`: what it answers about runs that live, have ended or were killed, and to whom."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from instep.cli import main
from instep.controller.gauges import _tokens
from instep.engines.embedded.kind import EmbeddedKind
from instep.engines.engine import Engine
from instep.errors import ConfigError
from instep.observability.samples import sample_row
from instep.observability.view.command import main as view
from instep.observability.view.runs import Runs, compare, runs_below
from instep.observability.view.server import HEADERS, ViewServer
from instep.observability.view.timeline import Timeline, averaged, thinned
from instep.observability.view.turns import turns_of
from instep.rollout.request_gate import MOST_POINTS, RequestGate
from instep.types import Sample, Status, VersionSpan
from tests.logged_run import HOSTILE, make_groups, run, unfinished_run

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [unfinished_run(root / "one"), unfinished_run(root / "two", lr=0.2)]


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[ViewServer]:
    with ViewServer(Runs(lambda: folders), port=0) as serving:
        threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield serving
        serving.shutdown()


def get(server: ViewServer, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


@pytest.fixture
def ask(server: ViewServer) -> Ask:
    def asking(name: str, **query: Any) -> Any:
        answer, content = get(server, f"/{server.token}/api/{name}?{urlencode(query)}")
        assert answer.status == 200, content
        return json.loads(content)

    return asking


# ---- who gets an answer ----------------------------------------------------------------------------------------------


def test_only_who_knows_the_token_gets_anything(server: ViewServer) -> None:
    assert urlsplit(server.url).hostname == "127.0.0.1" and server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 32
    for path in ("/", "/api/runs", f"/{server.token[:-1]}/", f"/{server.token}x/", "/%e9/"):
        answer, content = get(server, path)
        assert answer.status == 403 and b"printed" in content, path
    assert get(server, f"/{server.token}/")[0].status == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:9000", 200), ("127.0.0.1", 200), ("rebound.example:8620", 403), ("127.0.0.1.evil.com", 403)],
)
def test_a_name_of_another_site_is_refused(server: ViewServer, host: str, status: int) -> None:
    assert get(server, f"/{server.token}/", Host=host)[0].status == status


def test_the_page_may_load_and_run_its_own_files_alone(server: ViewServer) -> None:
    answer, page = get(server, f"/{server.token}/")
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert b"http" not in page.replace(b"http-equiv", b"") and b"onerror" not in page
    for name in ("style.css", "view.css", "main.js", "tokens.js"):
        answer, content = get(server, f"/{server.token}/{name}")
        assert answer.status == 200 and (b"innerHTML" not in content) and b"https://" not in content, name
    for name in ("../server.py", "..%2fserver.py", "nothing.js", "page", "api/nothing"):
        assert get(server, f"/{server.token}/{name}")[0].status == 404, name


@pytest.mark.parametrize("query", ["runs=9", "runs=0&at=1", "runs=0"])
def test_what_is_not_there_is_said(server: ViewServer, query: str) -> None:
    assert get(server, f"/{server.token}/api/sample?{query}")[0].status == 404
    assert get(server, f"/{server.token}/api/samples?runs=x")[0].status == 400


# ---- runs and curves -------------------------------------------------------------------------------------------------


def test_a_run_that_does_not_live_any_more_says_so(ask: Ask, folders: list[Path]) -> None:
    first, second = ask("runs")["runs"]
    assert (first["name"], second["name"]) == ("one", "two") and first["title"] == HOSTILE
    assert first["num_steps"] == 6 and first["num_rollout"] == 9
    assert first["alarms"] == [{"step": 4, "name": "truncation", "text": first["alarms"][0]["text"]}]
    assert "try a larger --rollout-max-response-len" in first["alarms"][0]["text"]
    config = json.loads((folders[0] / "config.json").read_text())
    assert first["state"] == "running" and config["process"]["pid"]  # of this process


def test_curves_of_several_runs(ask: Ask) -> None:
    found = ask("curves", runs="0,1")
    assert len(found) == 2 and found[0]["raised"] == {"truncation": [4, 5]}
    (label, x, y, *_), *_ = found[0]["panels"]["reward"]["left"]
    assert label == "training rollouts" and x == [*range(6)] and y == pytest.approx([0.1 * i for i in range(6)])
    assert found[0]["panels"]["phases"]["stack"]


def test_many_points_keep_their_extremes() -> None:
    y = [0.0] * 100_000
    y[777], y[55_555] = -5.0, 9.0
    x, thin = thinned(range(100_000), y, 1200)
    assert len(x) <= 1300 and min(thin) == -5.0 and max(thin) == 9.0 and x[0] == 0 and x[-1] == 99_999
    assert [x[thin.index(v)] for v in (-5.0, 9.0)] == [777, 55_555]
    middle, means = averaged([*range(100_000)], y, 100)
    assert (
        middle[0] == 499.5 and len(means) == 100 and means[0] == -0.005 and averaged([1, 2], [3, 5], 100)[1] == [3, 5]
    )


# ---- time and processes ----------------------------------------------------------------------------------------------


def test_the_time_of_the_last_steps(ask: Ask) -> None:
    (found,) = ask("timeline", runs=0, steps=2, last=3)
    assert found["last"] == 3 and found["newest"] == 5 and [r for r, _ in found["steps"]] == [1, 2, 3]
    assert found["ended"] - found["began"] == pytest.approx(20) and found["means"]["perf/engine_idle_ratio"] == 0.25
    (whole,) = ask("timeline", runs=0, steps=100)
    assert [p["phase"] for p in whole["phases"][:3]] == ["start", "rollout", "train"]
    assert all(p["ended"] >= p["began"] and not p["goes_on"] for p in whole["phases"])
    assert [n for _, n in whole["requests"]][:2] == [3, 0]


def test_a_phase_without_an_end_goes_on(tmp_path: Path) -> None:
    log = run(tmp_path, args_dict={"num_rollout": 2})
    with pytest.raises(ZeroDivisionError), log.phase("train", 0):
        _ = 1 / 0
    (files,) = Runs(lambda: [tmp_path]).all()
    assert [(p["name"], p["rollout_id"]) for p in files.about()["phases"]] == [("train", 0)]
    assert files.timeline({})["phases"][0]["goes_on"]
    log._close.close()


def test_a_session_that_a_resume_follows(tmp_path: Path) -> None:
    began = {"phase": "train", "rollout_id": 2, "began": 4.0}
    rows = [{"phase": "start", "began": 0.0}, {"phase": "start", "began": 0.0, "ended": 1.0}]
    rows += [{"rollout_id": i, "time": 2.0 + i, "processes": []} for i in range(2)]
    rows += [began, {"phase": "start", "began": 100.0}, {"rollout_id": 1, "time": 105.0, "processes": []}]
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    timeline = Timeline(tmp_path)
    timeline.read_on()
    assert timeline.under_way() == [{"phase": "start", "began": 100.0}]
    found = timeline.window(9, None, None)
    assert found["steps"] == [(0, 2.0), (1, 105.0)] and (found["began"], found["ended"]) == (0.0, 105.0)
    assert {**began, "ended": 4.0, "goes_on": False} in found["phases"]


def test_what_the_engines_generate(ask: Ask) -> None:
    (processes,) = ask("processes", runs=0)
    assert [p["name"] for p in processes] == ["controller", "engine 0"]
    assert processes[1]["gauges"]["tokens_per_second"] == [None, *[pytest.approx(10)] * 5]
    assert processes[0]["gauges"]["host_bytes"] == [1e9] * 6


@pytest.mark.parametrize("answer", [b"5\r\n\r\n[1]  ", b"5\r\n\r\n{}   ", b"9\r\n\r\n{", b"no number"])
def test_an_engine_that_breaks_off_has_no_count(answer: bytes) -> None:
    def talk() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(10_000)
            connection.sendall((b"HTTP/1.1 200 OK\r\nContent-Length: " if answer[0] < 58 else b"") + answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=talk)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert _tokens(Engine("engine 0", url, kind=EmbeddedKind())) is None
        thread.join()


async def _requests(gate: RequestGate, number: int) -> None:
    for _ in range(number):
        async with gate.admitted("http://engine"):
            pass


def test_the_course_of_many_requests_is_short_and_keeps_its_peak() -> None:
    import asyncio

    gate = RequestGate()
    asyncio.run(_requests(gate, 5))
    assert [n for _, n in gate.take_course()] == [1, 0] * 5 and gate.take_course() == []
    asyncio.run(_requests(gate, 4000))
    course = gate.take_course()
    assert 2 <= len(course) <= MOST_POINTS + 2 and max(n for _, n in course) == 1 and course[-1][1] == 0
    assert [at for at, _ in course] == sorted(at for at, _ in course)


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_samples_come_page_by_page(ask: Ask) -> None:
    seen = []
    for page in range(5):
        (found,) = ask("samples", runs=0, size=10, page=page, order="old")
        assert found["total"] == found["matching"] == 48 and found["read"] == found["size"]
        assert len(found["rows"]) == (10 if page < 4 else 8) and "tokens" not in found["rows"][0]
        seen += [(row["rollout"], row["index"]) for row in found["rows"]]
    assert len(set(seen)) == 48 and [r for r, _ in seen] == sorted(r for r, _ in seen)
    assert len(json.dumps(ask("samples", runs=0, size=10_000)[0]["rows"])) < 48 * 1000


def test_samples_by_reward_status_length_and_group(ask: Ask) -> None:
    every = [sample for step in range(6) for group in make_groups(4, 2, step) for sample in group]
    (found,) = ask("samples", runs=1, min_reward=0.3, max_reward=0.8, status="truncated", min_length=5, order="reward")
    wanted = sorted(
        s.reward for s in every if 0.3 <= s.reward <= 0.8 and s.status is Status.TRUNCATED and s.response_length >= 5
    )
    assert [row["reward"] for row in found["rows"]] == pytest.approx(wanted) and wanted
    (found,) = ask("samples", runs=1, group=2, **{"from": 3, "to": 4})
    assert [(row["rollout"], row["group"]) for row in found["rows"]] == [(4, 2)] * 2 + [(3, 2)] * 2
    (longest, *_) = ask("samples", runs=1, order="-length")[0]["rows"]
    assert longest["length"] == max(s.response_length for s in every)


def test_hostile_text_is_only_text(ask: Ask, server: ViewServer) -> None:
    (row, *_) = ask("samples", runs=0, group=0, order="old")[0]["rows"]
    (sample,) = ask("sample", runs=0, at=row["offset"])
    assert sample["response"] == HOSTILE and sample["turns"][0] == {"role": "prompt", "text": HOSTILE}
    answer, _ = get(server, f"/{server.token}/api/sample?runs=0&at={row['offset']}")
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert len(sample["group"]) == 2 and row["offset"] in sample["group"]


def test_a_file_that_grows_and_one_that_a_resume_replaces(tmp_path: Path, folders: list[Path]) -> None:
    folder = shutil.copytree(folders[0], tmp_path / "run")
    (files,) = Runs(lambda: [folder]).all()
    assert files.samples.page({})["total"] == 48
    with (folder / "samples.jsonl").open("a") as file:
        file.write('{"half')
        file.flush()
        assert files.samples.page({})["total"] == 48
        file.write('": 1}\n' + json.dumps({"split": "train", "rollout_id": 9, "response": "x"}) + "\n")
        file.flush()
        found = files.samples.page({"from": "9"})
        assert found["total"] == 49 and found["rows"][0]["response"] == "x"
    with run(folder, resume_from_step=2) as log:
        log.log(2, {"train/loss": 7.0})
    assert files.samples.page({})["total"] == 16 and files.about()["num_steps"] == 3


def test_the_index_does_not_read_tokens(tmp_path: Path) -> None:
    rows = [
        {"split": "train", "metadata": {"a": 1, "tokens": {"x": '", "tokens": {'}}, "response": '", "tokens": {'},
        {"split": "train", "response": '", "tokens": {', "gap_max": 0.5, "tokens": {"ids": [1]}},
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.json").write_text('{"args": {}, "versions": {}}')
    (files,) = Runs(lambda: [tmp_path]).all()
    found = files.samples.page({"order": "-gap"})["rows"]
    assert [row["gap"] for row in found] == [0.5, None] and {row["response"] for row in found} == {'", "tokens": {'}


# ---- turns and tokens ------------------------------------------------------------------------------------------------


def test_calls_and_answers_are_turns() -> None:
    texts = ["I ", "ask", ".<tool_", "call>", "{}", "</tool_call>", "19", "\n", "so ", "<tool_call>", "again"]
    mask = [1] * 6 + [0] * 2 + [1] * 3
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n12 + 7?<|im_end|>\n<|im_start|>assistant\n"
    turns = turns_of({"prompt": prompt, "tokens": {"texts": texts, "loss_mask": mask}})
    assert [(t["role"], t["text"]) for t in turns[:2]] == [("system", "Be brief."), ("user", "12 + 7?")]
    spans = [(t["role"], t["start"], t["end"]) for t in turns[2:]]
    assert spans == [
        ("model", 0, 2), ("tool call", 2, 6), ("not trained on", 6, 8), ("model", 8, 9), ("tool call", 9, 11)
    ]  # fmt: skip
    assert "".join(t["text"] for t in turns[2:]) == "".join(texts)


def test_messages_are_turns_as_they_are() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    prompt = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": None, "tool_calls": [call]}, "odd"]
    turns = turns_of({"prompt": prompt, "response": "yes", "tokens": {"texts": None, "loss_mask": [1]}})
    assert [t["role"] for t in turns] == ["user", "assistant", "tool call", "?", "model"]
    assert turns[0]["text"] == HOSTILE and json.loads(turns[2]["text"]) == call and turns[4] == {
        "role": "model", "text": "yes"
    }  # fmt: skip


def test_the_response_of_the_data_is_shown_once() -> None:
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"prompt": prompt, "tokens": {"texts": ["b"], "loss_mask": [1]}}
    assert [t["role"] for t in turns_of({**row, "loss": 1.0})] == ["user", "model"]
    assert [t["role"] for t in turns_of(row)] == ["user", "assistant", "model"]


def test_a_row_has_what_is_known_of_each_token() -> None:
    sample = Sample(tokens=[1, 2, 3, 4], response_length=3, rollout_log_probs=[-1.0, -2.0, -3.0], loss_mask=[1, 0, 1])
    sample.weight_versions = [VersionSpan("6", 0, 2), VersionSpan("7", 2, 3)]
    row = sample_row(sample, None, [-1.5, -9.0, -3.25], [0.123456, 0.5, float("nan")])
    assert row["tokens"]["entropies"] == [0.1235, 0.5, None] and row["gap_max"] == 0.5
    assert list(row)[-1] == "tokens" and row["version_spans"] == [["6", 0, 2], ["7", 2, 3]]
    assert sample_row(sample)["gap_max"] is None and sample_row(sample)["tokens"]["entropies"] is None


# ---- flags and the command -------------------------------------------------------------------------------------------


def test_flags_of_two_runs(ask: Ask) -> None:
    rows = {row["name"]: row for row in ask("flags", runs="0,1")}
    assert [name for name, row in rows.items() if row["differ"]] == ["--lr"]
    assert rows["--lr"]["values"] == [0.1, 0.2] and "learning rate" in rows["--lr"]["help"].lower()
    one = [{"args": {"lr": 1, "own": 2}, "versions": {"torch": "2"}}, {"args": {"lr": 1}, "versions": {"torch": "3"}}]
    differ = {row["name"]: row["values"] for row in compare(one) if row["differ"]}
    assert differ == {"own": [2, None], "torch": ["2", "3"]}


def test_runs_below_a_folder(folders: list[Path], tmp_path: Path) -> None:
    assert sorted(runs_below(folders[0].parent)) == folders
    assert runs_below(tmp_path) == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, folders: list[Path], capsys, monkeypatch) -> None:
    for folder, what in ((tmp_path, "is not the folder of a run"), (tmp_path / "none", "there is no folder")):
        with pytest.raises(ConfigError, match=what) as error:
            view([str(folder)])
        assert "metrics.jsonl" in error.value.remedy and "config.json" in error.value.remedy
    with pytest.raises(ConfigError) as error:
        view([str(folders[0].parent)])
    assert str(folders[0]) in error.value.remedy
    monkeypatch.chdir(tmp_path)
    assert main(["view"]) == 2 and "no run below runs/" in capsys.readouterr().err
    assert main(["view", str(folders[0]), "--port", "99999"]) == 2
    with pytest.raises(SystemExit):
        main(["view", "--help"])
    assert "ssh -L" in capsys.readouterr().out


def test_a_port_that_is_taken(server: ViewServer) -> None:
    with pytest.raises(ConfigError, match=f"port {server.server_port} cannot be used"):
        ViewServer(Runs(lambda: []), port=server.server_port)
