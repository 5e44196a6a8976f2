# the studies of README: the synthetic task at a size that lets a grid of encodings x seeds finish on two cores, about a minute a run and core.
#
#     python ablate.py config/synth_study.py --pos=rope,rope_hi,jordan_stabilized --seeds=0,1,2,3,4 --jobs=2
#
# gamma starts at the paper's own values (1e-4, jordan_scaled c/L) and is learned; the shear starts at 1/L per token, so that it is of order 1 at
# d = L, and may reach 5/L. Encodings in units of L want --pos_eta0=1 --pos_eta_max=5 for the same (after a colon in ablate.py's --pos).
out_dir = 'out-synth-study'
block_size = 128
n_layer = 2
n_head = 4
n_embd = 128 # heads of 32, so that the grid holds omega
mlp_ratio = 2
batch_size = 32
max_iters = 400
learning_rate = 1e-3
warmup_iters = 40
eval_interval = 200
pos = 'jordan_stabilized'
pos_eta0 = 1 / 128
pos_eta_max = 5 / 128
weight_decay = 1.0
