#!/bin/bash
# The cells of a recipe as a Slurm array, one a task, in one run folder that every node sees:
#
#   cells=$(preproj probe recipe.yaml --out runs/mine --dry-run | grep -c '/seed')
#   sbatch --array=0-$((cells - 1)) slurm-array.sh recipe.yaml runs/mine
#
# A task that is stopped and requeued goes on from its last checkpoint. Afterwards: preproj report runs/mine
#SBATCH --job-name=preproj
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
#SBATCH --mem=32G
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --output=%x-%A-%a.out
set -euo pipefail

recipe=$1
run=$2
list=$(preproj probe "$recipe" --out "$run" --dry-run)
mapfile -t cells < <(awk '$1 ~ /\/seed[0-9]+$/ {print $1}' <<<"$list")
preproj probe "$recipe" --out "$run" --cell "${cells[$SLURM_ARRAY_TASK_ID]}"
