# Bach's chorales: L = 128 tokens are 8 quarter notes of four voices, two bars.
#
#     pip install music21
#     python data/music/prepare.py
#     python train.py config/music.py --pos=jordan_scaled+alibi
#     python sample.py --out_dir=out-music --start=PIECE:0 --num_samples=1     # prints it, writes MIDI
#
# The metric is bits per token, of the same targets at every length: the last 64 of each window of the 51 test
# pieces (of 72) that have 768 tokens, 200 windows. One run each (seed 0), at 128, 256, 512 and 768:
#     jordan_scaled+alibi .736 .748 .751 .754      rope .750 5.969 8.950 7.012
# A 5-gram of the same tokens has 1.430 (data/music/ngram.py). Three minutes of a quiet core (Intel Xeon).
out_dir = 'out-music'
dataset = 'music'
block_size = 128
n_layer = 3
n_head = 4
n_embd = 128
mlp_ratio = 4
batch_size = 16
learning_rate = 2e-3
max_iters = 1500
warmup_iters = 100
weight_decay = 0.1
eval_interval = 250
eval_iters = 256 # validation windows of L; there are about 190
eval_lens = (128, 256, 512, 768) # few pieces have 1,024
log_interval = 50
