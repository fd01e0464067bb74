#!/usr/bin/env bash
# setup_beside.sh NAME: makes .venv-NAME: the packages of .venv, seen through a .pth file, and before them those of
# requirements/NAME.txt, without what they ask for. A second call installs nothing (it compares a stamp).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name=$1 venv=.venv-$1
stamp="$venv/.instep-$(cat requirements/cpu.txt "requirements/$name.txt" scripts/setup_beside.sh | cksum | tr ' ' -)"
[[ -e $stamp && -x $venv/bin/python ]] && exit 0
unset PYTHONPATH PYTHONHOME
echo "setup: making $venv from requirements/$name.txt"
.venv/bin/python -m venv --clear "$venv"
site() { "$1" -c 'import site; print(site.getsitepackages()[0])'; }
"$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --requirement "requirements/$name.txt"
site .venv/bin/python >"$(site "$venv/bin/python")/instep.pth"
touch "$stamp"
