#!/usr/bin/env bash
# One task of the array: part.sh DIR OUT [options]. submit.sh calls it.
set -euo pipefail
dir=$1 out=$2
shift 2
part=$SLURM_ARRAY_TASK_ID
echo "part $part of $SLURM_ARRAY_TASK_COUNT on $(hostname), job $SLURM_JOB_ID" >&2
program=${KERNEL_AGENT:-kernel-agent}
# The signal before the end of the node's time goes to this shell: the program is told of it, and what it
# began is gone on with by the next submission.
"$program" batch "$dir" --part "$part/$SLURM_ARRAY_TASK_COUNT" --out "$out" --json \
    --junit "$out/parts/$part.xml" "$@" >"$out/parts/$part.json.new" &
child=$!
trap 'kill -TERM $child' TERM INT
code=0
wait "$child" || code=$?
while kill -0 "$child" 2>/dev/null; do # the signal ended the wait, not the program
    code=0
    wait "$child" || code=$?
done
mv "$out/parts/$part.json.new" "$out/parts/$part.json"
exit "$code"
