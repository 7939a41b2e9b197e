#!/usr/bin/env bash
# Which layer of the jail does the CUDA driver not survive? cuInit and a first launch under every single layer
# and without each.
#   scripts/gpu_jail_probe.sh path/to/ka-jail
set -u
jail=$1
python=$(command -v python3)
code='
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
rc = cuda.cuInit(0)
print("cuInit", rc)
if rc == 0 and len(sys.argv) > 1:
    import torch
    print("sum", float(torch.ones(1000, device="cuda").sum()))
'
try() {
    local scratch
    scratch=$(mktemp -d)
    printf '%-44s ' "$*"
    timeout 60 "$jail" --scratch "$scratch" --profile gpu --require none "$@" -- \
        "$python" -c "$code" torch 2>&1 | tail -n 2 | tr '\n' ' '
    echo
    rm -rf "$scratch"
}
all="limits caps pid mount net landlock seccomp"
try --without none
try --without "${all// /+}"
for layer in $all; do
    try --without "$layer"
    others=$(tr ' ' '\n' <<<"$all" | grep -v "^$layer$" | paste -sd+)
    try --without "$others"
done
