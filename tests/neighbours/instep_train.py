"""`trl_train.py`'s task and settings through `instep.train`, in GRPOConfig's words. Imports neither TRL nor a stand-in.

    python instep_train.py --model DIR --data train.jsonl --steps 25 --seed 0 --out FILE [--config]

With `--config` the fields come in a `GRPOConfig` of the TRL that is installed, else as keywords.
"""

from __future__ import annotations

import json
from typing import Any

from quickstart_task import boxed, fields_of, parser_of, rows_of

import instep


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--config", action="store_true")
    args = parser.parse_args()
    fields = fields_of(args, str(args.out.parent / "run"))
    more: dict[str, Any] = fields
    if args.config:
        from trl import GRPOConfig

        more = {"args": GRPOConfig(**fields)}
    run = instep.Run(
        model=args.model,
        reward_funcs=boxed,
        train_dataset=rows_of(args),
        train_backend="hf",
        rollout_backend="embedded",
        num_threads=1,
        **more,
    )
    steps = [{"reward": step.metrics["rollout/reward_mean"]} for step in run]
    args.out.write_text(json.dumps({"steps": steps, "summary": run.summary}, default=str) + "\n")


if __name__ == "__main__":
    main()
