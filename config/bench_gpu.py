# bench.py at GPT-2's size, for one GPU with 24 GB or more (the largest step, 24,576 tokens, holds about
# 20 GB):
#
#     python bench.py config/bench_gpu.py
#     python bench.py config/bench_gpu.py --decode=True --compile=False
#
# Not run on a GPU yet. Compilation takes most of the time: a graph per encoding and length, about 6
# minutes on a guess. A smaller card: --batch_size=1, or --T=1024.
# --pos=learned,rope,jordan_scaled,jordan_stabilized is the short list.
T = (1024, 4096, 8192)
n_layer = 12
n_head = 12
n_embd = 768
mlp_ratio = 4
reps = 5
dtype = 'bfloat16'
device = 'cuda'
compile = True
