#!/usr/bin/env bash
# An execution environment for Triton's Python models, its stub, and the proof that they fit:
#
#   env/build_env.sh --target 26.06 --python 3.12 --out build/env     for NVIDIA's container
#   env/build_env.sh --engine venv --out build/env                    beside the embedded server
#
# It is `shoal env build` in a Python environment that has what that needs; `--help` shows every option, and
# docs/environments.md which one to choose.
set -euo pipefail
export PYTHONNOUSERSITE=1 # packages of this user's own would be taken for the environment's

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
for python in "$root/.venv/bin/python" "$root/build/tools/bin/python"; do
    if [ -x "$python" ] && "$python" -c 'import conda_pack, elftools, rattler, shoal, yaml' 2>/dev/null; then break; fi
done
if ! "$python" -c 'import conda_pack, elftools, rattler, shoal, yaml' 2>/dev/null; then
    echo "Installing shoal's tools into $root/build/tools ..." >&2
    "${PYTHON:-python3}" -m venv "$root/build/tools"
    "$python" -m pip install --quiet --editable "$root[env]"
fi
exec "$(dirname "$python")/shoal" env build "$@"
