#!/usr/bin/env bash
# On a GPU box without -dev packages: unpack the tarball of `make dist` and run the verdict over examples and pairs there.
#   scripts/gpu_box.sh TARBALL OUT_DIR BUDGET_SECONDS [file or folder inside the tarball ...]
set -euo pipefail
tarball=$1 out=$2 budget=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
python=$(command -v python3)
work=$(mktemp -d)
tar -C "$work" -xzf "$tarball"
cd "$work"/*/
program=$PWD/bin/kernel-agent
export KA_STORE=$PWD/pairs.db
"$program" doctor --python "$python" >"$out/doctor.txt" || true
tail -n 30 "$out/doctor.txt"
mapfile -t files < <(find "${@:-examples dataset}" -name '*.py' ! -name '__init__.py' | sort)
"$python" "$here/check_all.py" --program "$program" --out "$out/checks.json" --runs "$work/runs" --device cuda \
    --python "$python" --jobs "${JOBS:-6}" --deadline 120 --budget "$budget" ${DTYPE:+--dtype "$DTYPE"} ${SWEEPS:+--sweeps "$SWEEPS"} "${files[@]}" || true
