#!/usr/bin/env bash
# Makes .venv in the clone with the pinned packages. A second call installs nothing (it compares a stamp).
# PYTHON=/path/to/python3.12 chooses the interpreter; 3.11 to 3.13 work.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stamp=".venv/.instep-$(cat requirements/{cpu,dev,ray}.txt pyproject.toml scripts/setup_venv.sh | cksum | tr ' ' -)"
[[ -e $stamp && -x .venv/bin/python ]] && exit 0

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}
unset PYTHONPATH PYTHONHOME # packages from there would count as installed
python=${PYTHON:-python3}
command -v "$python" >/dev/null || fail "no '$python' here" "remedy: install Python 3.11, 3.12 or 3.13, or set PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' ||
    fail "'$python' is $("$python" --version 2>&1), but instep needs Python 3.11, 3.12 or 3.13" "remedy: set PYTHON=/path/to/one of these"

start=$SECONDS
if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
    echo "setup: making .venv with $("$python" --version 2>&1)"
    "$python" -m venv --clear .venv ||
        fail "'$python -m venv' failed" "remedy: install its venv module (Debian, Ubuntu: apt-get install python3-venv)"
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

torch=$(grep '^torch==' requirements/cpu.txt)
# torch first, whatever build the index has for this machine (a CUDA build brings libraries that are not pinned here).
echo "setup: installing $torch and what it needs (once; takes minutes where it is a CUDA build)"
pip install --quiet --no-compile --constraint requirements/cpu.txt "$torch"
echo "setup: installing the other pinned packages"
# The pins are complete, so nothing needs resolving.
pip install --quiet --no-compile --no-deps --requirement requirements/cpu.txt --requirement requirements/dev.txt \
    --requirement requirements/ray.txt
pip install --quiet --no-deps --no-build-isolation --editable .
echo "setup: compiling" # here, on all cores, rather than at the first start of each of a run's processes
.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null || true # some packages ship files for other Pythons
rm -f .venv/.instep-*
touch "$stamp"
echo "setup: done in $((SECONDS - start)) s"
