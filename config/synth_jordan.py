# the main job: can an encoding carry the coupled kernel K(d) = (d/L) cos(omega d) out to 8 times its training length?
# One layer whose attention is linear in its scores, so that the answer is the encoding's own: softmax saturates, and two layers or a nonlinearity
# make kernels that no encoding holds. Compare with --pos=rope, rope_hi, jordan_stabilized; for the paper's softmax --n_layer=2 --attn_temperature=1.
# README, Results, has all encodings over seeds. About a minute on one CPU core.
# gamma starts at the paper's own values (1e-4, jordan_scaled c/L) and is learned; the shear starts at 1/L per token, so that it is of order 1 at
# d = L, and may reach 5/L. Encodings in units of L want --pos_eta0=1 --pos_eta_max=5 for the same.
out_dir = 'out-synth-jordan'
block_size = 128
n_layer = 1
n_head = 4
n_embd = 128 # heads of 32, so that the grid holds omega
mlp_ratio = 2
attn_temperature = 1000
batch_size = 32
max_iters = 400
learning_rate = 1e-3
warmup_iters = 40
eval_interval = 200
pos = 'jordan_exact'
pos_eta0 = 1 / 128
pos_eta_max = 5 / 128
weight_decay = 1.0
