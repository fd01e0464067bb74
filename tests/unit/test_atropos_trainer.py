"""The command lines of Atropos' example trainer and its server: every flag acts, or is refused or reported by name."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from instep.arguments.parse import parse
from instep.cli import main
from instep.engines.vllm import VllmKind
from instep.errors import ConfigError, EngineError
from instep.preflight.install.packages import pins
from instep.system.ports import free_port
from instep_engine.guard import EVERYONE, GENERATION_ROUTES
from instep_neighbours.atropos import server, trainer
from instep_neighbours.atropos.trainer_flags import layer_indices, parser, read
from tests.assets import make_checkpoint
from tests.atropos import serving
from tests.bounds import allowed

ROOT = Path(__file__).parents[2]
WHEEL = json.loads((Path(__file__).parent / "data/atropos_flags.json").read_text())["flags"]
BY_NAME = {name: action for action in parser()._actions for name in action.option_strings}
# For each flag of the wheel a value other than its default, and the flags beside which it has its meaning.
VALUES: dict[str, tuple[list[str], list[str]]] = {
    "--lr": (["1e-4"], []),
    "--training-steps": (["7"], []),
    "--batch-size": (["3"], []),
    "--seq-len": (["64"], []),
    "--gradient-accumulation-steps": (["5"], []),
    "--warmup-steps": (["3"], []),
    "--optimizer": (["adamw"], []),
    "--adafactor-scale-parameter": ([], []),
    "--adafactor-relative-step": ([], []),
    "--device": (["cpu"], []),
    "--save-path": (["elsewhere"], []),
    "--checkpoint-interval": (["5"], ["--weight-bridge-mode", "shared_vllm"]),
    "--clip-eps": (["0.3"], []),
    "--vllm-port": (["9002"], []),
    "--vllm-gpu": (["1"], ["--device", "cuda"]),
    "--gpu-memory-utilization": (["0.3"], ["--device", "cuda"]),
    "--max-model-len": (["100"], []),
    "--dtype": (["float16"], []),
    "--vllm-restart-interval": (["5"], []),
    "--atropos-url": (["http://127.0.0.1:8001"], []),
    "--use-wandb": ([], ["--wandb-project", "p"]),
    "--wandb-project": (["p"], ["--use-wandb"]),
    "--wandb-group": (["g"], ["--use-wandb", "--wandb-project", "p"]),
    "--weight-bridge-mode": (["lora_only"], []),
    "--vllm-config-path": (["x.json"], ["--weight-bridge-mode", "shared_vllm"]),
    "--train-layer-indices": (["1"], []),
    "--lora-r": (["8"], ["--weight-bridge-mode", "lora_only"]),
    "--lora-alpha": (["8"], ["--weight-bridge-mode", "lora_only"]),
    "--lora-dropout": (["0.1"], ["--weight-bridge-mode", "lora_only"]),
    "--lora-target-modules": (["o_proj"], ["--weight-bridge-mode", "lora_only"]),
    "--lora-layer-indices": (["0"], ["--weight-bridge-mode", "lora_only"]),
    "--world-size": (["2"], []),
    "--init-method": (["tcp://127.0.0.1:1"], []),
    "--num-inference-nodes": (["1"], []),
    "--log-dir": (["logs"], []),
}
PRINTED = {"--benchmark", "--debug-loading"}  # they change what is printed: tests/e2e/test_atropos_trainer.py
JOINS = {"--trainer-rank"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "hf")


def flags_of(model: Path, *words: str) -> Any:
    return read(["--model-name", str(model), *words])


def outcome(model: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """All that a command line comes to before anything starts: words, lines and visible GPUs, or its refusal."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    try:
        flags = flags_of(model, *words)
        trainer.choose_gpus(flags)
        return trainer.words_of(flags), trainer.reports(flags), os.environ["CUDA_VISIBLE_DEVICES"]
    except ConfigError as error:
        assert error.where and error.remedy
        return str(error)


@pytest.mark.parametrize("flag", WHEEL, ids=lambda flag: flag["names"][0])
def test_each_flag_of_the_wheel_acts_or_says_why_not(flag: dict, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    action = BY_NAME[name := flag["names"][0]]
    assert all(BY_NAME[alias] is action for alias in flag["names"])
    assert set(flag["choices"] or ()) <= set(action.choices or ()), "fewer choices than the original"
    told = {
        "--lora-dropout",
        "--lora-target-modules",
        "--log-dir",
    }
    if name not in told and name != "--model":
        assert action.default == flag["default"] or (flag["switch"] and action.default is False), name
    if name == "--model" or name in PRINTED | JOINS:
        return
    given, beside = VALUES[name]
    with_it = outcome(model, monkeypatch, *beside, name, *given)
    assert with_it != outcome(model, monkeypatch, *beside), f"{name} changes nothing"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mode", ["none", "shared_vllm", "lora_only", "lora_restart"])
def test_each_mode_is_a_run_that_instep_takes(mode: str, device: str, model: Path, tmp_path: Path) -> None:
    more = ["--device", device, "--save-path", str(tmp_path / "out"), "--kl-coef", "0.1", "--resume"]
    flags = flags_of(model, "--weight-bridge-mode", mode, "--vllm-restart-interval", "2", *more)
    command, words = trainer.words_of(flags)
    args = parse([word for word in words if word != "auto"], command)
    assert command == ("train" if mode == "shared_vllm" else "train-async")
    ways = {"none": "restart", "shared_vllm": "single-copy", "lora_only": "lora", "lora_restart": "lora"}
    assert args.weight_sync == ways[mode] and args.device == device
    assert args.rollout_batch_size * args.n_samples_per_prompt == args.global_batch_size == 2 * 32
    own = mode in ("none", "lora_restart")
    assert (args.engine_port == 9001) is own
    assert (args.rollout_external_engine_addrs == ["127.0.0.1:9001"]) is not own
    assert args.use_rollout_logprobs and args.use_kl_loss and (args.eps_clip, args.kl_loss_coef) == (0.2, 0.1)
    assert args.precision == "bf16" and args.optimizer == "adamw_8bit" and args.lr == 1e-5
    assert args.lora_rank == (16 if mode.startswith("lora") else 0)


@pytest.mark.parametrize("version,wanted", [("0.26.0", "wait"), ("0.32.0", "keep"), ("", "keep")])
def test_a_response_spans_a_sync_where_vllm_says_so(version: str, wanted: str, model: Path, monkeypatch) -> None:
    monkeypatch.setattr(trainer, "installed_version", lambda package: version)
    for mode in ("shared_vllm", "lora_only", "lora_restart", "none"):
        _, words = trainer.words_of(flags_of(model, "--weight-bridge-mode", mode))
        assert words[words.index("--pause-mode") + 1] == ("wait" if mode == "none" else wanted)


def test_layers_are_named() -> None:
    assert layer_indices("0-2, 5,5") == [0, 1, 2, 5]
    for text in ("", "3-1", "a", "-1", "1-"):
        with pytest.raises(ConfigError, match="write 0-3,28-31"):
            read(["--model", "x", "--lora-layer-indices", text])


def test_layers_become_names_of_the_models_modules(model: Path) -> None:
    mode = ["--weight-bridge-mode", "lora_only"]
    flags = flags_of(model, *mode, "--lora-layer-indices", "1", "--lora-target-modules", "q_proj", "down_proj")
    assert trainer.target_modules(flags) == ["layers.1.mlp.down_proj", "layers.1.self_attn.q_proj"]
    with pytest.raises(ConfigError, match=r"no q_proj or v_proj in layers \[77\]"):
        trainer.target_modules(flags_of(model, *mode, "--lora-layer-indices", "77"))


@pytest.mark.parametrize(
    "words,what",
    [
        (["--optimizer", "adafactor"], "Adafactor is not supported"),
        (["--dtype", "float16"], "loss scale"),
        (["--lora-dropout", "0.05"], "no dropout"),
        (["--single-copy", "--weight-bridge-mode", "lora_only"], "remove one of the two"),
        (["--trainer-rank", "2", "--world-size", "2"], "ranks are 0 to"),
        (["--training-step", "3"], "did you mean --training-steps"),
        (["--training-steps", "0"], "not an integer above 0"),
        (["--weight-bridge-mode", "ipc"], "invalid choice"),
    ],
)
def test_what_is_refused_says_why(words: list[str], what: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["atropos-train", "--model-name", str(model), *words]) == 2
    error = capsys.readouterr().err
    assert what in error and "remedy:" in error and "Traceback" not in error, error


def test_a_hub_name_and_missing_neighbours_are_named(model: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(trainer, "_missing", lambda url: "refused")
    assert main(["atropos-train", "--model-name", str(model)]) == EngineError.exit_code
    assert "no Atropos API answered" in capsys.readouterr().err
    assert main(["atropos-train", "--model-name", str(model), "--single-copy"]) == EngineError.exit_code
    assert "VLLM_ENABLE_SHARED_WEIGHTS=1 instep atropos-serve" in capsys.readouterr().err
    assert main(["atropos-train", "--model-name", "Qwen/Qwen2.5-3B-Instruct"]) == 2
    assert "hf download" in capsys.readouterr().err


def test_a_quantized_base_is_refused_at_once_with_what_serves_it_in_8_bits(tmp_path, monkeypatch, capsys) -> None:
    config = tmp_path / "config.json"
    for how in ("bitsandbytes", "mxfp4"):
        config.write_text(json.dumps({"model_type": "qwen3", "quantization_config": {"quant_method": how}}))
        assert main(["atropos-train", "--model-name", str(tmp_path), "--weight-bridge-mode", "lora_only"]) == 2
        error = capsys.readouterr().err
        assert f"quantized ({how})" in error and "`--quantization fp8`" in error and "lora_only" in error, error
    (tmp_path / "model.safetensors").touch()
    for how in ("gptq", "awq"):
        config.write_text(json.dumps({"quantization_config": {"quant_method": how, "bits": 4}}))
        trainer.check_readable(str(tmp_path))
        for given in ({}, {"--enable-lora": ""}):
            server.server_args({"--model": str(tmp_path), **given}, [])
    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", "1")
    with pytest.raises(ConfigError, match="keeps this checkpoint quantized"):
        server.server_args({"--model": str(tmp_path)}, [])


def test_what_speaks_no_http_is_no_neighbour(model: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(trainer, "NEIGHBOUR_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: listener.accept()[0].sendall(b"SSH-2.0-x\r\n" * 2), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main(["atropos-train", "--model-name", str(model), "--atropos-url", url]) == EngineError.exit_code
    assert "no Atropos API answered" in capsys.readouterr().err


def test_a_neighbour_that_is_missing_is_waited_for_with_a_line_at_once(monkeypatch, capsys) -> None:
    """It may be starting; after at most ten seconds it is an error, which says how it failed."""
    assert trainer.NEIGHBOUR_SECONDS <= 10
    monkeypatch.setattr(trainer, "NEIGHBOUR_SECONDS", 1.0)
    url, began = f"http://127.0.0.1:{free_port()}/info", time.monotonic()
    assert "Connection refused" in trainer._missing(url) and 1 <= time.monotonic() - began < allowed(5)
    assert f"waiting for {url}, 1 s left" in capsys.readouterr().out
    monkeypatch.setattr(trainer, "NEIGHBOUR_SECONDS", 60.0)
    port = free_port()
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(trainer._missing, f"http://127.0.0.1:{port}/info")
        time.sleep(1)
        with serving(port):
            assert waits.result() == ""


def test_the_environment_is_read_or_reported(model: Path, monkeypatch) -> None:
    for name, value in (("VLLM_SKIP_WEIGHT_DAEMON", "0"), ("VLLM_ENABLE_SHARED_WEIGHTS", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NUM_INFERENCE_NODES", "2")
    lines = "\n".join(trainer.reports(flags_of(model, "--use-wandb", "--log-dir", "x")))
    for name in ("VLLM_SKIP_WEIGHT_DAEMON", "VLLM_ENABLE_SHARED_WEIGHTS", "NUM_INFERENCE_NODES", "wandb_project"):
        assert name in lines
    for name in ("VLLM_SKIP_WEIGHT_DAEMON", "NUM_INFERENCE_NODES"):
        monkeypatch.delenv(name)
    assert trainer.reports(flags_of(model, "--single-copy")) == []  # the guide's own command


@pytest.mark.parametrize(
    "visible,words,seen",
    [
        ("4,5", ["--device", "cuda:1"], "5"),
        ("4", ["--vllm-gpu", "7"], "4,7"),
        ("4", ["--vllm-gpu", "7", "--weight-bridge-mode", "lora_only"], "4"),
        ("", ["--device", "cuda"], ""),
    ],
)
def test_gpus_are_those_of_the_flags(visible: str, words: list[str], seen: str, model: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    trainer.choose_gpus(flags_of(model, *words))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


# ---- the server ------------------------------------------------------------------------------------------------------


def served(model: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    given, rest = server._split(["--model", str(model), *words])
    return server.command(given, rest, "127.0.0.1", 9001)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr("instep.engines.vllm.VllmKind.check_installed", lambda self, where: None)
    monkeypatch.setattr("instep.engines.vllm.VllmKind.capabilities", VllmKind("0.32.0").capabilities)


@pytest.mark.parametrize("shared", [True, False])
def test_the_server_shares_its_weights_if_the_environment_says_so(shared, tmp_path, monkeypatch, installed) -> None:
    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", str(int(shared)))
    monkeypatch.delenv("NUM_INFERENCE_NODES", raising=False)
    model = make_checkpoint(tmp_path / "hf", head_dim=32)
    argv, env = served(model, "--tensor_parallel_size", "1", "--max-model-len=64", "--log-level", "info")
    assert argv[:4] == ["-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    assert argv[argv.index("--weight-transfer-config") + 1] == json.dumps(
        {"backend": "instep_single_copy" if shared else "instep_shm"}
    )
    middlewares = [argv[i + 1] for i, word in enumerate(argv) if word == "--middleware"]
    assert (
        middlewares[0] == "instep_engine.vllm.atropos.Middleware"
        and middlewares[-1] == "instep_engine.vllm.auth.Middleware"
    )
    assert argv[argv.index("--max-model-len") + 1] == "64" and argv[argv.index("--dtype") + 1] == "bfloat16"
    assert argv[argv.index("--uvicorn-log-level") + 1] == "info" and argv[-4:] == ["--host", "127.0.0.1", *argv[-2:]]
    assert env["VLLM_SERVER_DEV_MODE"] == "1" and env["INSTEP_DIE_WITH_PARENT"] == "children"


def test_the_server_takes_adapters(tmp_path, monkeypatch, installed) -> None:
    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", "1")  # adapters win: such an engine cannot share
    model = make_checkpoint(tmp_path / "hf", head_dim=32)
    argv, env = served(model, "--enable-lora", "--max-lora-rank", "32", "--gpu-memory-utilization", "0.4", "-tp", "1")
    assert "--enable-lora" in argv and argv[argv.index("--max-lora-rank") + 1] == "32"
    assert env["INSTEP_LORA"] == env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_a_server_sleeps_unless_it_shares_its_weights(tmp_path, monkeypatch, installed) -> None:
    model = make_checkpoint(tmp_path / "hf", head_dim=32)
    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", "0")
    assert served(model, "--enable-sleep-mode")[0][-1] == "--enable-sleep-mode"
    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", "1")
    with pytest.raises(ConfigError, match="cannot sleep"):
        served(model, "--enable-sleep-mode")


def test_a_server_over_two_gpus_shares_its_weights(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", "1")
    monkeypatch.setattr("instep.controller.device.device_here", lambda: "cuda")
    args = server.server_args({"--model": str(make_checkpoint(tmp_path / "hf")), "--tensor-parallel-size": "2"}, [])
    assert (args.weight_sync, args.colocate, args.rollout_num_gpus_per_engine) == ("single-copy", True, 2)


def test_a_pipeline_takes_adapters_and_does_not_share_its_weights(tmp_path, monkeypatch, installed, capsys) -> None:
    """The guide's own command of LoRA and legacy with two GPUs."""
    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", "1")
    monkeypatch.setattr("instep.controller.device.device_here", lambda: "cpu")
    model = make_checkpoint(tmp_path / "hf", head_dim=32)
    stages = ["--tensor-parallel-size", "1", "--pipeline-parallel-size", "2"]
    argv, _ = served(model, *stages, "--enable-lora", "--max-lora-rank", "32")
    assert argv[argv.index("--pipeline-parallel-size") + 1] == "2"
    assert main(["atropos-serve", "--model", str(model), "--port", str(free_port()), *stages]) == 2
    error = capsys.readouterr().err
    assert "cannot share their weights" in error and "`--tensor-parallel-size 2`, or `--enable-lora`" in error
    monkeypatch.setenv("VLLM_ENABLE_SHARED_WEIGHTS", "0")
    assert json.dumps({"backend": "instep_shm"}) in served(model, *stages)[0]


def test_the_guides_requirements_are_those_of_its_api_alone() -> None:
    """Neither torch nor vLLM: pip would replace the builds that are there."""
    lines = (ROOT / "examples/atropos/example_trainer/requirements.txt").read_text()
    (wanted,) = [line for line in lines.splitlines() if not line.startswith("#")]
    assert wanted.startswith("atroposlib==") and wanted in pins("atropos")


@pytest.mark.parametrize("name", server.REFUSED)
def test_what_the_server_refuses_says_why(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["atropos-serve", "--model", "x", name, "1"]) == 2
    error = capsys.readouterr().err
    assert name in error and "is refused" in error and "remedy:" in error


@pytest.mark.parametrize("value", ["abc", "0", "-2", "1.5", ""])
def test_a_number_of_gpus_is_one(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["atropos-serve", "--model", "x", "--port", str(free_port()), f"--tensor-parallel-size={value}"]) == 2
    assert f"{value!r} is not a number of GPUs" in capsys.readouterr().err


def test_the_key_lies_where_the_trainer_of_this_user_looks(tmp_path, monkeypatch, installed, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("INSTEP_API_KEY", raising=False)
    begun: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda program, argv, env: begun.append((program, argv, env)))
    model = make_checkpoint(tmp_path / "hf", head_dim=32)
    server.main(["--model", str(model), "--port", "19001"])
    (program, argv, env), file = begun[0], server.key_file(19001)
    assert program == argv[0] == sys.executable and argv[3:5] == ["-m", "vllm.entrypoints.cli.main"]
    assert env["INSTEP_GENERATE_KEY"] == EVERYONE
    assert env["INSTEP_API_KEY"] == file.read_text().strip() and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert env["INSTEP_API_KEY"] not in capsys.readouterr().out
    _, words = trainer.words_of(flags_of(model, "--weight-bridge-mode", "lora_only", "--vllm-port", "19001"))
    assert words[words.index("--api-key-file") + 1] == str(file)


def test_the_guides_pkill_finds_the_server_whose_log_has_every_line_at_once(tmp_path: Path) -> None:
    """With a program of ours in vLLM's place, which prints a line and stays."""
    (tmp_path / "vllm/entrypoints/cli").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").touch()
    (tmp_path / "vllm/entrypoints/cli/main.py").write_text("import time\nprint('it serves')\ntime.sleep(100)\n")
    code = "from instep.engines.vllm import VllmKind; VllmKind.check_installed = lambda *_: None; "
    code += "VllmKind.capabilities = VllmKind('0.32.0').capabilities; "
    code += "from instep_neighbours.atropos.server import main; import sys; main(sys.argv[1:])"
    model, port, log = make_checkpoint(tmp_path / "hf", head_dim=32), str(free_port()), tmp_path / "log"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    env |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "XDG_CACHE_HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as file:
        command = [sys.executable, "-u", "-c", code, "--model", str(model), "--port", port]
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60
        while "it serves" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        assert "vllm_api_server" in Path(f"/proc/{process.pid}/cmdline").read_text()  # which `pkill -f` reads
    finally:
        process.kill()
        process.wait()


def test_state_is_open_and_control_needs_the_key() -> None:
    from instep_engine.vllm.atropos import ROUTES

    opened = {path for path in ROUTES if path in GENERATION_ROUTES}
    assert {method for path, (method, _) in ROUTES.items() if path in opened} == {"GET"}
    assert ROUTES.keys() - opened == {
        *("/bridge/pause", "/bridge/resume", "/bridge/sleep", "/bridge/wake_up", "/bridge/debug"),
        *("/lora/load", "/lora/unload"),
    }
