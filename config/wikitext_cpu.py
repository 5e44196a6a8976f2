# WikiText bytes on a laptop: 0.6M parameters, 2.5M training bytes a run (2.4 epochs), 1 MB of text that anyone with the zip can make:
#
#     python data/wikitext103/prepare.py --train_member=valid --subset=True [--src=PATH]
#     python train.py config/wikitext_cpu.py --pos=jordan_scaled+alibi
#
# It trains on the first 90% of wiki.valid.raw, validates on the rest and measures on wiki.test.raw: 0.2% of WikiText-103's train text,
# so its numbers compare encodings with each other, not with those published on the whole.
# Expect, --pos=rope --seed=0: validation loss 1.811 nats; 2.475 bits/byte at L, then 2.840, 3.295, 4.028 at 2L, 4L, 8L (+-.04).
# An interpolated Witten-Bell trigram of the same training bytes has 3.01: whatever is not well below that at L is a run too short.
# 6 minutes of one CPU core (AMD EPYC), measurement included; jordan_stabilized, which has no fused attention, takes longer.
out_dir = 'out-wikitext-cpu'
dataset = 'wikitext103'
block_size = 256
n_layer = 3
n_head = 4
n_embd = 128
batch_size = 8 # many small steps: the run is as long as its number of tokens
learning_rate = 2e-3 # high for this size, so that the cosine has something to cool from
max_iters = 1200
warmup_iters = 100
weight_decay = 0.1
eval_interval = 400
eval_iters = 128 # windows of L
eval_rows = 256 # test windows per length: a minute for all four
log_interval = 50
