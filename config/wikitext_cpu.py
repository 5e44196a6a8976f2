# WikiText bytes on a laptop: 0.3M parameters, 1M training bytes a run, of a text that anyone with the
# zip can make:
#
#     python data/wikitext103/prepare.py --train_member=valid --subset=True [--src=PATH]
#     python train.py config/wikitext_cpu.py
#
# It trains on the first 90% of wiki.valid.raw, validates on the rest and measures on wiki.test.raw:
# 0.2% of the train text of WikiText-103, so its numbers compare encodings with each other, not with
# those published on the whole. An interpolated Witten-Bell trigram of the same training bytes has 3.01:
# what is not well below that at L is a run too short. A minute and a half of one CPU core (AMD EPYC),
# measurement included. Larger, 6 minutes: --block_size=256 --n_layer=3 --mlp_ratio=4 --batch_size=8
# --max_iters=1200
out_dir = 'out-wikitext-cpu'
dataset = 'wikitext103'
pos = 'rope+alibi'
block_size = 128
n_layer = 2
n_head = 4
n_embd = 128
mlp_ratio = 2
batch_size = 16 # many small steps: the run is as long as its number of tokens
learning_rate = 2e-3 # high for this size, so that the cosine has something to cool from
max_iters = 500
weight_decay = 0.1
eval_interval = 250
eval_iters = 128 # windows of L
eval_rows = 256 # test windows per length
log_interval = 50
