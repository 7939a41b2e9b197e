#!/usr/bin/env bash
# compute-sanitizer over the backward of one pair on a GPU box: memory errors with the kernel's line.
#   scripts/gpu_memcheck.sh PAIR.py STUB 'DIMS as Python' [tool]
set -euo pipefail
pair=$1 stub=$2 dims=$3 tool=${4:-memcheck}
cat >/tmp/gpu_memcheck.py <<PY
import importlib.util, torch
spec = importlib.util.spec_from_file_location("pair", "$pair")
m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
made = m.make_args($dims, device="cuda")
args, kwargs = made if isinstance(made[0], tuple) else (made, {})
args = tuple(a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
out = m.${stub}_autograd(*args, **kwargs)
torch.cuda.synchronize(); print("forward done")
out.sum().backward()
torch.cuda.synchronize(); print("backward done", [None if getattr(a, "grad", None) is None else float(a.grad.double().norm()) for a in args])
PY
PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --print-limit 3 python3 /tmp/gpu_memcheck.py 2>&1 | grep -vE "Host Frame|^frame|^$" | head -n 60
