#!/usr/bin/env bash
# Music: in Bach's chorales distance and period meet. Who carries them to six times the training length?
# 90 runs and 16 to tune, of about four minutes of a core each: three and a half hours on two. A run that
# results/music.csv has is not made again, so this may be stopped and started.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
test -f data/music/meta.json || python data/music/prepare.py
python data/music/ngram.py --n=6

# the phase alone, and with a bias for what is near
pos=rope,rope_hi,rope+alibi
# damping without a shear, on the grid of both orders; +alibi
pos+=,damped:pos_c=.5,damped:pos_c=1,damped:pos_order=3:pos_c=.5,damped:pos_order=3:pos_c=1
pos+=,damped+alibi:pos_c=.5,damped+alibi:pos_c=1
pos+=,damped+alibi:pos_order=3:pos_c=.5,damped+alibi:pos_order=3:pos_c=1
# with a shear. The paper's order three has c = .5
pos+=,jordan_scaled,jordan_scaled:pos_order=3,jordan_scaled:pos_order=3:pos_c=.5
pos+=,jordan_scaled+alibi,jordan_scaled+alibi:pos_order=3,jordan_scaled+alibi:pos_order=3:pos_c=.5
pos+=,jordan_stabilized+alibi
python ablate.py config/music.py --jobs=2 --seeds=0,1,2,3,4 --pos="$pos" \
    --out_dir=out-music-study --results=results/music.csv

# does each have the learning rate that suits it? Tuned by validation loss on seed 1000, then the same seeds
python ablate.py config/music.py --jobs=2 --seeds=0,1,2,3,4 --pos=rope,jordan_scaled \
    --learning_rate=1e-3,2e-3,4e-3 --out_dir=out-music-tuned --results=results/music_tuned.csv

# what the models lose with eta set to 0 after training: the shear's own share
python probe.py --placebo=True --temperatures=1 --ckpt="$(ls out-music-study/jordan*/ckpt.pt | paste -sd,)" \
    > results/music_placebo.txt

# does a head use distance times the period of a bar?
python data/music/kernel.py --plot=True --ckpt="$(ls -d out-music-study/jordan_scaled+alibi_s0*)/ckpt.pt" \
    > results/music_kernel.txt

# to look at: a piece that goes on, beside the original
python sample.py --out_dir="$(ls -d out-music-study/jordan_scaled+alibi_s0*)" --start=PIECE:0 --num_samples=1
