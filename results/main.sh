#!/usr/bin/env bash
# the main job of the README, and rope beside it, over five seeds
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python ablate.py config/synth_jordan.py --jobs=2 --seeds=0,1,2,3,4 --out_dir=out-main \
    --results=results/main.csv --pos=jordan_exact,rope
