#!/usr/bin/env bash
# 5. Placebo: every softmax checkpoint of softmax.sh at other temperatures; eta as learned, 0, and shuffled. No training
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
python probe.py --placebo=True --ckpt=$(ls out-softmax/*/ckpt.pt out-softmax-3/*/ckpt.pt | paste -sd,) > results/placebo.txt
