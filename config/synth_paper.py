# the synthetic task at the paper's own scale (section 6: L = 1024, 3 layers, 1200 steps), for a GPU:
#   python train.py config/synth_paper.py --pos=jordan_scaled --pos_c=0.1
#   torchrun --nproc_per_node=4 train.py config/synth_paper.py --gradient_accumulation_steps=4 --batch_size=6
# published accuracies at 1024 and 8192 (3 seeds, 96 rows in all, so Wilson intervals of +-.07): rope .969 .781, damped .938 .865,
# stabilised .969 .906 (that is jordan_stabilized_abs here), scaled c=.1 .958 .865, scaled c=1 .958 .521. Ours: 1,024 rows a length.
# one step on 2 CPU cores takes about 2 s: 40 minutes and more. GPU times are not measured yet.
out_dir = 'out-synth-paper'
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
pos_gamma0 = None # the paper's own: 1e-4, jordan_scaled c/L
