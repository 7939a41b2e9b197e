#!/usr/bin/env bash
# A batch as a Slurm job array, on a folder that all nodes share:
#
#     submit.sh DIR PARTS [options of kernel-agent batch, --out among them]
#
# Each task does one part of the files below DIR (--part); a last job merges what they found into
# OUT/summary.json and OUT/summary.xml (JUnit), and fails where a file failed. The same command goes on
# where an earlier one was cut off, and skips what is verified. What is asked of a node (--gres, --time,
# --partition) is said by variables of sbatch: SBATCH_PARTITION and the like. Prints the number of the job
# that merges.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if (($# < 2)) || ! [[ -d $1 && $2 =~ ^[1-9][0-9]*$ ]]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
dir=$(realpath "$1") parts=$2
shift 2
out=generated
words=()
while (($#)); do
    case $1 in
        --out) out=${2:?--out wants a folder} && shift ;;
        --out=*) out=${1#--out=} ;;
        *) words+=("$1") ;;
    esac
    shift
done
mkdir -p "$out/parts"
out=$(realpath "$out")
rm -f "$out"/parts/*.json "$out"/parts/*.xml
array=$(sbatch --parsable --job-name=kernel-agent --array="1-$parts" --requeue --open-mode=append \
    --signal=B:TERM@60 --output="$out/parts/%a.log" "$here/part.sh" "$dir" "$out" "${words[@]}")
sbatch --parsable --job-name=kernel-agent-merge --dependency="afterany:$array" --output="$out/summary.log" \
    "$here/merge.sh" "$here" "$out" "$parts"
