# Your own text, as bytes, in minutes on a CPU:
#
#     python data/text/prepare.py FILE...
#     python train.py config/text.py
#     python sample.py --out_dir=out-text
#
# A megabyte or two is enough for words and short phrases. Validation loss that rises again means too
# little text for max_iters: best.pt (sample.py --checkpoint=best.pt) is the model before that. Six
# minutes of one CPU core (AMD EPYC).
out_dir = 'out-text'
dataset = 'text'
pos = 'damped+alibi' # better than rope+alibi at 8 L; so is jordan_scaled+alibi (results/README.md)
pos_c = 1.0          # damping starts at 1 per L
block_size = 256
n_layer = 3
n_head = 4
n_embd = 128
batch_size = 8
learning_rate = 2e-3 # with few steps a high peak and a cosine go furthest
max_iters = 1200
eval_interval = 200
eval_iters = 128
eval_rows = 256
log_interval = 50
