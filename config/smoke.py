# does everything run? A tiny model on short rows: about 10 seconds on 2 CPU cores.
# expect: val loss about 0.7 (a coin, nats), accuracies near 0.5: far too short to learn anything.
out_dir = 'out-smoke'
pos = 'jordan_scaled'
block_size = 64
n_layer = 2
n_head = 2
n_embd = 64
batch_size = 16
max_iters = 30
eval_interval = 15
eval_iters = 256
eval_rows = 256
