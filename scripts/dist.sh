#!/usr/bin/env bash
# dist/kernel-agent-<version>-<arch>.tar.gz: programs, their shared libraries, the Python package, prompts and
# pairs. The programs find the libraries beside themselves; the machine needs only a libc as new as the one
# here, and a Python with torch.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
version=$("$build/kernel-agent" --version | awk '{print $2}')
name=kernel-agent-$version-$(uname -m)
root=dist/$name
rm -rf "$root"
mkdir -p "$root/bin" "$root/lib"

# Libraries of the C runtime and the loader stay the machine's own.
system='^(linux-vdso|ld-linux.*|libc|libm|libpthread|libdl|librt|libresolv)\.so'
for program in kernel-agent ka-jail libka_jail.so; do
    install -m 755 "$build/$program" "$root/bin/"
    ldd "$build/$program" | awk '$3 ~ /^\// {print $1, $3}' | while read -r soname path; do
        [[ $soname =~ $system ]] || cp -L "$path" "$root/lib/$soname"
    done
done

cp -r prompts sandbox dataset examples LICENSE THIRD_PARTY_LICENSES.md README.md "$root/"
# scripts/gpu.py and what it runs
mkdir -p "$root/tests/python" "$root/bench"
cp -r scripts "$root/"
cp -r tests/jail tests/attacks "$root/tests/"
cp -r tests/python/kernels "$root/tests/python/"
cp -r bench/gpu bench/gpu_sweeps.json "$root/bench/"
find "$root" -name __pycache__ -prune -exec rm -rf {} +
cp "$build/pairs.db" "$root/pairs.db"
tar -C dist -czf "dist/$name.tar.gz" "$name"
echo "dist/$name.tar.gz"
