#!/usr/bin/env bash
# Makes .venv-peers: the packages of .venv, seen through a .pth file, and TRL, verl and peft (requirements/peers.txt).
# A second call installs nothing (it compares a stamp).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=".venv-peers/.instep-$(cat requirements/*.txt scripts/setup_peers.sh | cksum | tr ' ' -)"
[[ -e $stamp && -x .venv-peers/bin/python ]] && exit 0
unset PYTHONPATH PYTHONHOME
echo "setup: making .venv-peers with TRL, verl and peft"
.venv/bin/python -m venv --clear .venv-peers
site() { "$1" -c 'import site; print(site.getsitepackages()[0])'; }
.venv-peers/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement requirements/peers.txt
site .venv/bin/python >"$(site .venv-peers/bin/python)/instep.pth"
touch "$stamp"
