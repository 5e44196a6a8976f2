"""
Text from a checkpoint:

    python sample.py --out_dir=out --start="The sea" --max_new_tokens=300
    python sample.py --out_dir=out --start=FILE:prompt.txt --temperature=0

Relative encodings go on past block_size, with a KV cache. Of a checkpoint of the synthetic task it shows num_samples rows of every
test length, the model's answer beside the right one, and counts.
"""

import os
import sys
import signal

from configurator import configure, usage # before torch: it makes Ctrl-C one line

import numpy as np
import torch

from common import autocast, check_tokens, choose_device, fail, gpt2_bpe, load_checkpoint, load_meta, load_tokens, model_of

# -----------------------------------------------------------------------------
out_dir = 'out' # where train.py wrote the checkpoint
checkpoint = 'ckpt.pt' # or best.pt
start = '\n' # the prompt, or FILE:path; '' is a newline, since something has to come first
num_samples = 5 # texts, or synthetic rows per length
max_new_tokens = 500
temperature = 0.8 # below 1 likelier, above 1 wilder, 0: always the likeliest token
top_k = 200 # draw from the likeliest only; 0: from all
seed = 0
device = '' # '': cuda, else mps, else cpu; or cuda:1 ...
dtype = '' # '': bfloat16 where it is fast, else float32
# -----------------------------------------------------------------------------
configure(globals(), {'1 <= x <= 10**6': 'num_samples max_new_tokens', '0 <= x <= 10**9': 'top_k seed', 'x == 0 or 0.001 <= x <= 1000': 'temperature', "x != ''": 'out_dir checkpoint'})
device, dtype, _ = choose_device(device, dtype, False) # compiling would take longer than sampling
signal.signal(signal.SIGINT, lambda *_: (print('interrupted', file=sys.stderr), sys.exit(130)))
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(errors='replace') # a console that cannot print a character shows ?

path = os.path.join(out_dir, checkpoint)
saved = load_checkpoint(path)
model = model_of(saved, path).to(device).eval()
config, dataset = model.config, saved['config']['dataset']
context = autocast(device, dtype, config.attn_temperature)
encoding = saved.get('encoding')
if encoding is None: # an older file; its data set still knows
    meta = load_meta(dataset)
    encoding = 'bits' if meta['kind'] == 'rows' else meta.get('encoding', 'bytes')
if encoding not in ('bytes', 'gpt2', 'bits'):
    fail(f"{path}: its tokens are {encoding!r}, which this sample.py does not know; expected bytes, gpt2 or bits")
torch.manual_seed(seed)

# -----------------------------------------------------------------------------
# the synthetic task

@torch.no_grad()
def answers(rows):
    """P(answer is 1) of rows (n, T + 1)."""
    chances = []
    for row in rows: # one at a time: 8L tokens are enough for a forward pass
        x = torch.from_numpy(row[None, :-1].astype(np.int64)).to(device)   # (1, T)
        with context:
            logits = model(x)[0][0, -1, :2].float()                        # (2)
        chances.append(torch.softmax(logits, dim=-1)[1].item())
    return np.array(chances)

def show_rows():
    meta = load_meta(dataset)
    if saved.get('data') != (meta.get('checksums') or {}).get('train', ''):
        print(f"note: data/{dataset} is not what this model was trained with, it was made again since")
    lengths = [T for T in meta.get('test_lens', ()) if config.pos != 'learned' or T <= config.block_size]
    if not lengths:
        fail(f"data/{dataset}: no test length that this model can take; run its prepare.py again")
    counts = []
    for T in lengths:
        model.choose_paths(T)
        check_tokens(dataset, f'test_{T}', meta)
        rows = load_tokens(dataset, f'test_{T}', meta, T + 1)
        rows = rows[np.sort(np.random.default_rng([seed, T]).permutation(len(rows))[:num_samples])]
        chances, truth = answers(rows), rows[:, -1]
        print(f"\nT = {T} ({T / config.block_size:g} L)\n{'the last 40 bits':>44} ?  P(1)  model  right")
        for row, p, y in zip(rows, chances, truth):
            bits = ''.join(map(str, row[max(0, T - 41):T - 1]))
            print(f"{'...' * (T > 41) + bits:>44} ? {p:5.3f}  {int(p > 0.5):5}  {y:5}{'' if (p > 0.5) == y else '  wrong'}")
        counts.append(f"{((chances > 0.5) == truth).sum()} of {len(rows)} at {T}")
    print(f"\nright: {', '.join(counts)}")

# -----------------------------------------------------------------------------
# text

def prompt_bytes():
    if not start.startswith('FILE:'):
        return start.encode('utf-8', 'surrogateescape') or b'\n' # bytes of the command line that are no UTF-8 included
    try:
        with open(start[5:], 'rb') as f:
            return f.read() or b'\n'
    except OSError as e:
        usage(f"start={start}: {e.strerror}")

def readable(data):
    """Bytes as text for any console: what is no UTF-8 or no printable character becomes U+FFFD."""
    text = data.decode('utf-8', errors='replace').replace('\r\n', '\n')
    return ''.join(c if c.isprintable() or c in '\n\t' else '\ufffd' for c in text)

def show_text():
    data = prompt_bytes()
    if encoding == 'gpt2':
        bpe = gpt2_bpe()
        tokens, decode = bpe.encode_ordinary(data.decode('utf-8', errors='replace')), bpe.decode_bytes
    else:
        tokens, decode = list(data), bytes
    if max(tokens) >= config.vocab_size:
        usage(f"start: holds the token {max(tokens)}, outside the model's vocabulary of {config.vocab_size}")
    x = torch.tensor([tokens], device=device)                              # (1, T)
    for _ in range(num_samples):
        with context:
            y = model.generate(x, max_new_tokens, temperature=temperature, top_k=top_k)
        print(readable(decode(y[0].tolist())))
        print('---------------', flush=True)

show_rows() if encoding == 'bits' else show_text()
