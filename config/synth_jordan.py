# the main job: a task whose teacher is the coupled kernel K(d) = (d/L) cos(omega d), trained at L = 256, tested at L ... 8L.
# Compare with --pos=rope, rope_hi, jordan_stabilized_abs; what to expect stands in README, over 3 seeds.
# Encodings in units of L want --pos_eta0=1 --pos_eta_max=5; damped ones --pos_gamma0=1e-4, or --pos_gamma0=none --pos_c=1.
out_dir = 'out-synth-jordan'
block_size = 256
n_layer = 2
n_head = 4
n_embd = 128 # heads of 32, so that the grid holds omega
mlp_ratio = 2
batch_size = 48
max_iters = 500
learning_rate = 1e-3
warmup_iters = 50
eval_interval = 250
pos = 'jordan_stabilized'
pos_gamma0 = 0.0 # no damping: the shear alone
pos_eta0 = 0.004 # per token, so that the shear is of order 1 at d = L
pos_eta_max = 0.02
weight_decay = 3.0 # strong: it keeps the logits small, where two softmax heads of opposite sign add up to a linear readout, and favours few frequencies
