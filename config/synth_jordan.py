# the main job: a task whose teacher is the coupled kernel K(d) = (d/L) cos(omega d), trained at L = 256, tested at L ... 8L.
# on 2 CPU cores: 4 to 6 minutes of training and 1 to 2 of testing. Expect, by README's table over 3 seeds, at L 2L 4L 8L
#   jordan_stabilized  .98 .92 .92 .93      rope  .98 .86 .87 .86
# compare with --pos=rope, rope_hi, jordan_stabilized_abs. Encodings in units of L want --pos_eta0=1 --pos_eta_max=5;
# damped ones --pos_gamma0=1e-4, or --pos_gamma0=none --pos_c=1.
out_dir = 'out-synth-jordan'
block_size = 256
n_layer = 2
n_head = 4
n_embd = 128
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
weight_decay = 1.0 # keeps the logits small: two softmax heads of opposite sign add up to sinh of the kernel, linear only near 0
