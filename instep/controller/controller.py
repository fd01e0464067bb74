"""The controller: the one process that owns order. It starts everything, and ends everything that it has started.

It holds the data source, the ledger, the versions of the policy and the run's state; the weights live in the workers
and the engines. The schedule of a run is not here but in `instep/train.py`.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from instep.checkpoints.hf_export import check_hf_checkpoint
from instep.cluster.local import WorkerGroup
from instep.controller.ledger import Ledger, LedgeredDataSource
from instep.controller.metrics import evaluation_metrics, training_metrics, wandb_settings
from instep.controller.run_state import (
    changed_arguments,
    find_checkpoint,
    read_state,
    restore_source,
    save_checkpoint,
    source_state,
)
from instep.controller.sync import SyncResult, WeightSync
from instep.controller.training import TrainingRound
from instep.controller.watch import run_watched
from instep.engines.launch import Engine, start_embedded
from instep.errors import ConfigError
from instep.hooks import load_function
from instep.observability.memory import PssSampler
from instep.observability.metrics import rollout_metrics
from instep.observability.run_logger import RunLogger
from instep.observability.versions import versions
from instep.processes import DETERMINISTIC_ENV, OPENMP_ENV, num_usable_cpus, stop_all
from instep.rollout import runtime
from instep.rollout.outputs import as_eval_output, as_train_output, flatten
from instep.training import lr_schedule
from instep.types import Group


class Controller:
    """A run. Use it as a context manager: leaving it ends every process it has started."""

    def __init__(self, args: Any, *, title: str, with_engines: bool = True):
        self.started = time.monotonic()
        self.args, self._with_engines = args, with_engines
        self.run_dir = Path(args.run_dir)
        self._resolve_device()
        args.num_threads = args.num_threads or num_usable_cpus()
        self._hf_config = check_hf_checkpoint(Path(args.hf_checkpoint))
        self._runtime: dict[str, Any] = {}
        self.hook_args = args.view(self._runtime)  # what hooks get: read-only, no secrets
        self.ledger = Ledger()
        source = load_function(args.data_source_path)(self.hook_args)
        self.data_source = LedgeredDataSource(source, self.ledger)
        self._resolve_num_rollout()
        self._rollout_function = load_function(args.rollout_function_path)
        self._eval_function = load_function(args.eval_function_path)
        self.num_steps = self.rollout_id = 0
        self.evaluations: list[dict[str, float]] = []
        self.last_sync: SyncResult | None = None
        self.max_probe_diff = 0.0
        self._engines: list[Engine] = []
        self._workers: WorkerGroup | None = None
        self._sync: WeightSync | None = None
        self._scratch = Path(tempfile.mkdtemp(prefix="instep-run-"))
        self._reference = self._scratch / "reference"  # as --ref-update-interval refreshed it
        self._memory = PssSampler()
        checkpoint = find_checkpoint(Path(args.load) if args.load else None, args.ckpt_step)
        self._resumed_state = read_state(checkpoint[0]) if checkpoint and not args.finetune else None
        start = self._start_rollout_id(checkpoint)
        self.start_rollout_id = self.rollout_id = start
        self.log = RunLogger(
            self.run_dir,
            args.to_dict(),
            title=title,
            num_steps=self.num_rollout,
            use_tensorboard=args.use_tensorboard,
            wandb=wandb_settings(args, (self._resumed_state or {}).get("wandb_run_id")),
            resume_from_step=start if self._resumed_state else None,
        )
        self._checkpoint = checkpoint

    # ---- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Controller:
        self._memory.start()
        self.log.__enter__()
        try:
            with self.log.phase("start"):
                self._start()
            self.log.take_phase_seconds()  # the start belongs to no step
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        runtime.shutdown()
        processes = [e.process for e in self._engines if e.process is not None]
        processes += self._workers.processes if self._workers is not None else []
        stop_all(processes, grace=2.0)
        if self._sync is not None:
            self._sync.close()
        self._memory.stop()
        shutil.rmtree(self._scratch, ignore_errors=True)
        self.log.__exit__(kind, error, traceback)

    def _start(self) -> None:
        args = self.args
        num_ranks = args.actor_num_nodes * args.actor_num_gpus_per_node
        logs = self.run_dir / "logs"
        threads = max(1, args.num_threads // num_ranks)
        worker_env = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
        worker_env |= OPENMP_ENV | (DETERMINISTIC_ENV if args.deterministic_mode else {})
        self._workers = WorkerGroup("actor", num_ranks, logs, worker_env)
        if self._with_engines:
            self._engines = [start_embedded(args, 0, num_threads=args.num_threads, log_dir=logs, port=args.engine_port)]
        requests = [(args, rank, num_ranks, str(self._scratch / "rendezvous"), threads) for rank in range(num_ranks)]
        layout = self._workers.call("setup", timeout=args.worker_start_timeout, per_rank=requests)
        self._load_weights()
        total = self.num_rollout * args.rollout_batch_size * args.n_samples_per_prompt if self.num_rollout else 0
        schedule = lr_schedule.from_args(args, max(1, total // args.global_batch_size) if total else 1)
        self._round = TrainingRound(args, self.hook_args, self._workers, layout, schedule)
        if self._round.uses_reference:
            path = self._model_folder(Path(args.ref_load or args.hf_checkpoint))
            if self._resumed_state is not None and self._checkpoint and (self._checkpoint[0] / "reference").is_dir():
                path = Path(shutil.copytree(self._checkpoint[0] / "reference", self._reference))
            self._workers.call("load_reference", path, timeout=args.worker_start_timeout)
        if args.rollout_top_p < 1 or args.rollout_top_k > 0:
            note = "top-p/top-k: the engine's log-probs are of the truncated distribution, the gap shows the difference"
            self.log.status(note)
        for engine in self._engines:
            engine.wait_ready(args.engine_start_timeout)
        url = self._engines[0].url if self._engines else "http://127.0.0.1:0"
        self._runtime.update(
            {
                "vllm_router_ip": "127.0.0.1",
                "vllm_router_port": int(url.rsplit(":", 1)[1]),
                "vllm_model_routers": {"actor": ("127.0.0.1", int(url.rsplit(":", 1)[1]))},
                "rollout_engine_urls": [e.url for e in self._engines],
                "num_rollout": self.num_rollout,
            }
        )
        if self._engines:
            max_len = args.vllm_max_model_len or int(self._hf_config.get("max_position_embeddings", 128))
            vocab_size = int(self._hf_config["vocab_size"])
            self._sync = WeightSync(args, self._workers, self._engines, vocab_size=vocab_size, max_len=max_len)
            self._sync.version = int((self._resumed_state or {}).get("version", 0))  # versions go on, never back

    def _load_weights(self) -> None:
        """`--load` if it holds a checkpoint, else `--ref-load`, else `--hf-checkpoint` (the seeds' rule)."""
        args, workers = self.args, self._require_workers()
        timeout = args.worker_start_timeout
        if self._checkpoint is not None:
            with_optimizer = not (args.no_load_optim or args.finetune)
            workers.call("load", self._checkpoint[0], with_optimizer, timeout=timeout)
            if self._resumed_state is not None:
                self._restore(self._resumed_state)
            self.log.status(f"continuing from {self._checkpoint[0]} at rollout {self.start_rollout_id}")
            return
        path = args.ref_load or args.hf_checkpoint
        if args.load and (Path(args.load) / "config.json").exists():
            path = args.load
        workers.call("load_weights", self._model_folder(Path(path)), timeout=timeout)

    def _model_folder(self, path: Path) -> Path:
        """A Hugging Face checkpoint as it is; of a folder of ours, the checkpoint to use."""
        if (path / "config.json").exists():
            return path
        found = find_checkpoint(
            path, self.args.ref_ckpt_step if self.args.ref_load and path == Path(self.args.ref_load) else None
        )
        if found is None:
            raise ConfigError(
                f"{path} is neither a Hugging Face checkpoint nor holds one of instep's",
                where="--ref-load",
                remedy="name a folder with config.json, or one with latest_checkpointed_iteration.txt",
            )
        return found[0]

    def _resolve_device(self) -> None:
        import torch

        args = self.args
        if args.device == "auto":
            args.device = "cuda" if torch.cuda.is_available() else "cpu"
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("this machine has no CUDA device", where="--device cuda", remedy="use --device cpu")
        if args.precision == "auto":
            args.precision = "bf16" if args.device == "cuda" else "fp32"
        if self._with_engines and args.device == "cuda" and args.rollout_backend == "auto":
            raise ConfigError(
                "this machine has a GPU, where the embedded engine is not chosen by itself",
                where="--rollout-backend auto",
                remedy="name it: --rollout-backend embedded (the vLLM backend comes later)",
            )

    def _resolve_num_rollout(self) -> None:
        args = self.args
        if args.num_rollout is not None:
            self.num_rollout = args.num_rollout
            return
        self.num_rollout = math.ceil(args.num_epoch * len(self.data_source) / args.rollout_batch_size)

    def _start_rollout_id(self, checkpoint: tuple[Path, int] | None) -> int:
        if self.args.start_rollout_id is not None:
            return int(self.args.start_rollout_id)
        if self._resumed_state is not None:
            return int(self._resumed_state["rollout_id"]) + 1
        return checkpoint[1] + 1 if checkpoint is not None and not self.args.finetune else 0

    # ---- what the loop calls -------------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """One proven session from the workers to every engine."""
        assert self._sync is not None
        with self.log.phase("sync"):
            self.last_sync = self._sync.run()
        self.max_probe_diff = max(self.max_probe_diff, self.last_sync.probe_max_abs_diff)

    def generate(self, rollout_id: int) -> list[Group]:
        """One rollout: groups with rewards, each entered in the ledger as consumed."""
        self.rollout_id = rollout_id
        args = self.args
        runtime.set_progress_listener(lambda done, total, extra: self.log.status(f"groups {done}/{total}"))
        started, dropped_before = time.monotonic(), self.ledger.num_dropped
        with self.log.phase("rollout"):
            output = run_watched(
                lambda: self._rollout_function(self.hook_args, rollout_id, self.data_source, evaluation=False),
                self._engines,
                self._require_workers(),
                timeout=args.rollout_timeout,
                what=f"rollout {rollout_id}",
            )
            train_output = as_train_output(output)
        seconds = time.monotonic() - started
        groups = train_output.samples
        self.ledger.adopt(groups)
        self.ledger.consume(groups)
        self.ledger.drop_outstanding("not returned by the rollout function")
        self.ledger.check()
        self._rollout_metrics = {**rollout_metrics(groups, reward_key=args.reward_key), **train_output.metrics}
        if args.custom_rollout_log_function_path:
            samples = [s for g in groups for s in flatten(g)]
            log = load_function(args.custom_rollout_log_function_path)
            if log(rollout_id, self.hook_args, samples, train_output.metrics, seconds):
                self._rollout_metrics = {}
        if args.loss_type == "sft_loss":  # demonstrations have no reward
            self._rollout_metrics = {k: v for k, v in self._rollout_metrics.items() if "reward" not in k}
        self._rollout_metrics["rollout/num_dropped_groups"] = float(self.ledger.num_dropped - dropped_before)
        self.log.samples(rollout_id, groups, split="train", limit=args.num_logged_samples)
        return groups

    def train(self, rollout_id: int, groups: list[Group]) -> None:
        """The optimizer steps of one rollout, and its line of metrics begins."""
        with self.log.phase("train"):
            steps = self._round.run(groups, self.num_steps)
        self.num_steps += len(steps)
        interval = self.args.ref_update_interval
        if self._round.uses_reference and interval and (rollout_id + 1) % interval == 0:
            self._require_workers().call("refresh_reference", self._reference, timeout=self.args.train_timeout)
        self._train_metrics = training_metrics(steps)
        self._num_tokens = sum(len(s.tokens) for g in groups for s in flatten(g))
        self._num_response_tokens = sum(s.response_length for g in groups for s in flatten(g))

    def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Mean reward and lengths on every evaluation data set; kept for the report and the summary."""
        with self.log.phase("eval"):
            output = as_eval_output(
                run_watched(
                    lambda: self._eval_function(self.hook_args, rollout_id, self.data_source, evaluation=True),
                    self._engines,
                    self._require_workers(),
                    timeout=self.args.rollout_timeout,
                    what=f"evaluation before rollout {rollout_id}",
                )
            )
        metrics = evaluation_metrics(output)
        for name, result in output.data.items():
            self.log.samples(rollout_id, [[s] for s in result["samples"]], split=f"eval/{name}", limit=8)
        self.evaluations.append({"rollout_id": float(rollout_id), **metrics})
        hook = self.args.custom_eval_rollout_log_function_path
        if not (hook and load_function(hook)(rollout_id, self.hook_args, output.data, output.metrics)):
            self.log.log(rollout_id, metrics)
        return metrics

    def save(self, rollout_id: int) -> None:
        """A complete checkpoint (--save), and a Hugging Face one (--save-hf)."""
        args, workers = self.args, self._require_workers()
        with self.log.phase("save"):
            if args.save:
                state = {
                    "rollout_id": rollout_id,
                    "num_steps": self.num_steps,
                    "version": self._sync.version if self._sync is not None else 0,
                    "ledger": self.ledger.state_dict(),
                    "data_source": source_state(self.data_source.source, rollout_id),
                    "evaluations": self.evaluations,
                    "wandb_run_id": self.log.wandb_run_id,
                    "args": args.to_dict(),
                }

                def write(folder: Path) -> None:
                    workers.call("save", folder, timeout=args.train_timeout)
                    if self._reference.is_dir():
                        shutil.copytree(self._reference, folder / "reference")

                save_checkpoint(Path(args.save), rollout_id, write, state)
            if args.save_hf:
                self.export_hf(Path(str(args.save_hf).format(rollout_id=rollout_id)))
        self.log.log(rollout_id, {"perf/save_seconds": self.log.take_phase_seconds()["save"]})

    def export_hf(self, path: Path) -> None:
        self._require_workers().call("export_hf", path, timeout=self.args.train_timeout)

    def finish_step(self, rollout_id: int) -> None:
        """Close the line of metrics of one round."""
        seconds = self.log.take_phase_seconds()
        metrics = {**self._rollout_metrics, **self._train_metrics}
        metrics |= {f"perf/{name}_seconds": s for name, s in seconds.items()}
        metrics["perf/step_seconds"] = sum(s for name, s in seconds.items() if name != "eval")
        if seconds.get("rollout"):
            metrics["perf/rollout_tokens_per_second"] = self._num_response_tokens / seconds["rollout"]
        if seconds.get("train"):
            metrics["perf/train_tokens_per_second"] = self._num_tokens / seconds["train"]
        metrics |= {"perf/pss_bytes": self._memory.current, "perf/peak_pss_bytes": self._memory.peak}
        metrics |= self._require_workers().call("memory", timeout=self.args.train_timeout)[0]
        if self.last_sync is not None:
            metrics["sync/version"] = self.last_sync.version
            metrics["sync/probe_max_abs_diff"] = self.last_sync.probe_max_abs_diff
            metrics["sync/probe_tolerance"] = self.last_sync.tolerance
            metrics["sync/bytes"] = self.last_sync.num_bytes
        self.log.log(rollout_id, metrics)

    def finish(self) -> dict[str, Any]:
        """summary.json, report.html and the table at the end."""
        summary: dict[str, Any] = {
            "num_rollouts": self.num_rollout - self.start_rollout_id,
            "num_steps": self.num_steps,
            "wall_seconds": time.monotonic() - self.started,
            "peak_pss_bytes": self._memory.peak,
            "ledger": {k: v for k, v in self.ledger.state_dict().items() if k.startswith("num") or k == "dropped"},
            "versions": versions(),
        }
        if self.evaluations:
            first, last = self.evaluations[0], self.evaluations[-1]
            name = next(k for k in first if k.endswith("/reward_mean"))
            if first["rollout_id"] == 0:
                summary["eval_reward_before"] = first[name]
            summary["eval_reward_after"] = last[name]
            summary["evaluations"] = self.evaluations
        if self.last_sync is not None:
            summary["sync_probe_max_abs_diff"] = self.max_probe_diff
            summary["sync_probe_tolerance"] = self.last_sync.tolerance
        self.log.finish(summary)
        return summary

    def _require_workers(self) -> WorkerGroup:
        assert self._workers is not None, "the controller is used as a context manager"
        return self._workers

    def _restore(self, state: dict[str, Any]) -> None:
        for line in changed_arguments(state["args"], self.args):
            self.log.progress.line(f"changed since the checkpoint: {line}")
        self.num_steps = int(state["num_steps"])
        self.ledger.load_state_dict(state["ledger"])
        self.evaluations = state["evaluations"]
        restore_source(self.data_source.source, state["data_source"], int(state["rollout_id"]))
