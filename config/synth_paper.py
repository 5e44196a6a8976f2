# the synthetic task at the paper's own scale (section 6: L = 1024, 3 layers with softmax, 1,200 steps)
#
#     python train.py config/synth_paper.py --pos=jordan_stabilized_abs
#     torchrun --nproc_per_node=4 train.py config/synth_paper.py --batch_size=6 \
#         --gradient_accumulation_steps=4
#
# Published accuracies at 1024 and 8192 (3 seeds, 96 rows in all, so Wilson intervals of +-.07): rope
# .969 .781, damped .938 .865, stabilised .969 .906 (jordan_stabilized_abs here), scaled c = .1 .958
# .865, c = 1 .958 .521. The shear starts at 0, as the paper's. Its bound is .1 per token, here 102.4
# per L, for the exact and stabilised forms; for jordan_scaled, real_jordan and direct_sum it is .1 per
# L: add --pos_eta_max=.1 for these three. A step takes 1.0 to 1.5 s on two CPU cores: 25 minutes a run
# and more. Not run on a GPU yet.
out_dir = 'out-synth-paper'
pos = 'jordan_stabilized_abs'
pos_eta0 = 0.0
pos_eta_max = 102.4
block_size = 1024
n_layer = 3
n_head = 4
n_embd = 128
mlp_ratio = 2
batch_size = 24
max_iters = 1200
learning_rate = 5e-4
decay_lr = False # constant
warmup_iters = 0
weight_decay = 0.01
beta2 = 0.999
