"""
See what a checkpoint does. Of a text model, texts; of a synthetic task, rows, with the model's answers.

    python sample.py --out_dir=out --start="The sea" --max_new_tokens=300
    python sample.py --out_dir=out --start=FILE:prompt.txt --temperature=0
    python sample.py --out_dir=out --score=FILE        # bits per byte of a text

Relative encodings go on past block_size, with a KV cache.
"""

import os
from types import SimpleNamespace

from configurator import configure, typed, usage # before torch: it makes Ctrl-C one line

import torch

from common import autocast, choose_device, fail
from runs import load, model_of
from tasks import make_task

# -----------------------------------------------------------------------------
out_dir = 'out' # where train.py wrote the checkpoint
checkpoint = 'ckpt.pt' # or best.pt
num_samples = 5 # texts, or rows of each length
seed = 0
# text
start = '\n' # the prompt, or FILE:path; '' is a newline, since something has to come first
max_new_tokens = 500
temperature = 0.8 # below 1 likelier, above 1 wilder, 0: always the likeliest token
top_k = 200 # draw from the likeliest only; 0: from all
stop = '' # end a text before this string
score = '' # instead: the bits per byte of this file
# system
device = '' # '': cuda, else mps, else cpu; or cuda:1 ...
dtype = '' # '': bfloat16 where it is fast, else float32
# -----------------------------------------------------------------------------
config = configure(globals(), {
    '1 <= x <= 10**6': 'num_samples max_new_tokens',
    '0 <= x <= 10**9': 'top_k seed',
    'x == 0 or 0.001 <= x <= 1000': 'temperature',
    "x != ''": 'out_dir checkpoint',
})
device, dtype, _ = choose_device(device, dtype, False) # compiling would take longer than sampling

# the model, and the task that it was trained on
path = os.path.join(out_dir, checkpoint)
saved = load(path)
model = model_of(saved, path).to(device).eval()
task = make_task(saved['config'])
dataset = saved['config']['dataset']
if task.vocab_size != model.config.vocab_size:
    usage(f"{path}: has {model.config.vocab_size} tokens, dataset={dataset} now has {task.vocab_size}")
if saved['data'] != (task.checksum or task.note):
    print(f"note: dataset={dataset} is not what this model was trained with; it was made again since")
used = ['score'] if score and 'score' in task.uses else task.uses
for flag in dict.fromkeys(typed()):
    if flag not in (*used, 'out_dir', 'checkpoint', 'device', 'dtype'):
        where = 'beside score' if flag in task.uses else f'on dataset={dataset}'
        print(f"note: {flag} has no effect {where}")

# how to show it is the task's business
torch.manual_seed(seed)
context = autocast(device, dtype, model.config.attn_temperature)
how = SimpleNamespace(**config | dict(device=device, context=context))
try:
    task.show(model, how)
except (ValueError, ArithmeticError) as e: # of generate: probabilities that are none, say
    fail(f"{path}: {e}")
