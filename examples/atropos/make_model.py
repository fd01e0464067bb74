"""The model and the data of the guide, in `models/policy` and `data/train.jsonl` of the current folder.

They are the quickstart's task, and its tiny model after supervised fine-tuning (two minutes on two cores).
"""

import shutil
import subprocess
import sys
from pathlib import Path

QUICKSTART = Path(__file__).parent.parent / "quickstart"


def main() -> int:
    sys.path.insert(0, str(QUICKSTART))
    from run import settings, stages

    out = Path("runs/atropos-model")
    for title, command in stages(settings(["--out", str(out), *sys.argv[1:]]))[:2]:
        print(title, flush=True)
        if code := subprocess.run(command).returncode:
            return code
    shutil.copytree(out / "sft" / "hf", "models/policy", dirs_exist_ok=True)
    Path("data").mkdir(exist_ok=True)
    shutil.copy(out / "task" / "train.jsonl", "data/train.jsonl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
