#!/usr/bin/env bash
# The last job: merge.sh FOLDER-OF-SCRIPTS OUT PARTS. Slurm runs a copy of this file, elsewhere.
exec python3 "$1/merge.py" "$2" "$3"
