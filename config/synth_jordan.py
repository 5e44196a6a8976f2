# the main job: which encoding reaches the coupled kernel K(d) = (d/L) cos(omega d), out to 8 times its
# training length?
#
#     python train.py config/synth_jordan.py             # about a minute of one CPU core
#     python train.py config/synth_jordan.py --pos=rope  # or rope_hi, direct_sum, jordan_stabilized ...
#
# One layer whose attention is linear in its scores, so that the answer is the encoding's own: softmax
# saturates, and two layers or a nonlinearity make kernels that no encoding has. For the paper's
# softmax: --n_layer=2 --attn_temperature=1. gamma starts at the paper's own values (1e-4 per token,
# jordan_scaled c/L), the shear at 1/L; both are learned.
out_dir = 'out-synth-jordan'
pos = 'jordan_exact'
block_size = 128
n_layer = 1
n_head = 4
n_embd = 128 # heads of 32, so that the grid holds omega
mlp_ratio = 2
attn_temperature = 1000
batch_size = 32
max_iters = 600
learning_rate = 1e-3
eval_interval = 200
weight_decay = 1.0
