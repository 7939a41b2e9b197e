#!/usr/bin/env bash
# Brings a machine to where `make` works: Debian packages and .venv. Idempotent; when nothing is missing it
# does nothing and needs no network. KA_PIP_ARGS is passed to pip (an index, a cache); PYTHON3 names the
# interpreter for .venv.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*"; }
packages() { sed -e 's/#.*//' -e '/^[[:space:]]*$/d' scripts/packages.txt | awk '{print $1}'; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif command -v sudo >/dev/null; then sudo "$@"
    else say "needs root for: $*"; exit 2
    fi
}

install_packages() {
    if ! command -v dpkg-query >/dev/null; then
        local missing=()
        for lib in libuv libcurl libmicrohttpd jansson sqlite3 openblas libcrypto cmocka; do
            pkg-config --exists "$lib" 2>/dev/null || missing+=("$lib")
        done
        [ ${#missing[@]} -eq 0 ] && return
        say "this is no Debian; install these libraries with their headers, then run make again:" \
            "${missing[*]}"
        say "(what Debian calls them: $(packages | tr '\n' ' '))"
        exit 2
    fi
    local wanted=()
    for name in $(packages); do
        dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || wanted+=("$name")
    done
    [ ${#wanted[@]} -eq 0 ] && return
    say "installing ${wanted[*]}"
    as_root apt-get update -q
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${wanted[@]}"
}

install_python() {
    local stamp want
    stamp=.venv/kernel-agent.stamp
    want=$(cat scripts/requirements.txt scripts/requirements-dev.txt | sha256sum)
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && return
    local python=${PYTHON3:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        { say "$python is older than 3.11; set PYTHON3"; exit 2; }
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    say "installing the pinned Python packages into .venv"
    local pip=(.venv/bin/python -m pip install -q --disable-pip-version-check)
    local torch
    torch=$(grep '^torch==' scripts/requirements.txt)+cpu
    # shellcheck disable=SC2086
    "${pip[@]}" ${KA_PIP_ARGS:-} --no-deps "$torch" 2>/dev/null ||
        "${pip[@]}" --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
    # shellcheck disable=SC2086
    "${pip[@]}" ${KA_PIP_ARGS:-} -r scripts/requirements.txt -r scripts/requirements-dev.txt
    .venv/bin/python -m pip check
    printf '%s' "$want" >"$stamp"
}

# What runs in the jail may write nothing: without this every start of the program compiles the package anew.
compile_package() {
    .venv/bin/python -m compileall -q sandbox/kernel_agent
}

install_packages
install_python
compile_package
