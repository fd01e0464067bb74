"""docs/files.md lists the files of a run. (Those that a whole run leaves: `e2e/test_train.py`.)"""

from instep.arguments.paths import RUN_FILES
from instep.observability.run_folder import _OUR_LOGS, move_run_aside
from tests.documented import unlisted
from tests.logged_run import run, unfinished_run

LOGS = "actor-rank0 critic-rank12 engine-0 engine-3-node1 router router-actor gate gate-ref env-0 env-eval-1 trackio"


def names(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_a_logger_writes_and_a_new_run_moves_aside(tmp_path):
    folder = unfinished_run(tmp_path / "run")
    with run(folder, resume_from_step=0, use_tensorboard=True) as log:
        log.notes(["a note"])
        log.finish({})
    assert names(folder) >= {"metrics.jsonl", "summary.json", "report.html", "logs/notes.txt", "config.json"}
    assert unlisted(names(folder), "--run-dir") == set()
    assert move_run_aside(folder) is not None and unlisted(names(folder), "--run-dir") == set()
    (folder / "more.txt").write_text("")
    assert unlisted(names(folder), "--run-dir") == {"more.txt"}


def test_all_logs_and_folders_that_a_run_has():
    logs = {f"{name}.log" for name in LOGS.split()} | {
        f"{n}.txt" for n in ("dump-1", "error", "notes", "stdout", "stderr")
    }
    assert all(_OUR_LOGS.fullmatch(name) for name in logs)
    assert unlisted({f"logs/{name}" for name in logs}, "--run-dir") == set()
    folders = {"tensorboard", "logs", "profile"}
    inside = {"tensorboard/events", "logs/error.txt", "profile/step-2.txt"}
    assert unlisted({*RUN_FILES} - folders | inside, "--run-dir") == set()
