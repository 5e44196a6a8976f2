"""
Train a GPT with any positional encoding, then measure it at 1x to 8x its training length.

    python train.py config/synth_jordan.py                       # the main job: CPU, minutes
    python train.py config/synth_jordan.py --pos=rope --seed=2   # any setting below, as a flag
    torchrun --nproc_per_node=4 train.py config/synth_paper.py   # DDP

Prints a line per log_interval, saves ckpt.pt and best.pt into out_dir, appends a row to results.csv, and prints that row as one
JSON object on its last line.
"""

import os
import re
import sys
import json
import math
import time
import signal
import datetime
import contextlib
from dataclasses import asdict, fields

from configurator import configure, usage # before torch: it makes Ctrl-C one line

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from common import (append_row, autocast, bootstrap, check_tokens, choose_device, config_hash, data_dir, fail, git_commit,
                    find_row, load_checkpoint, load_meta, load_tokens, lock, make_synth, model_of, pack, read_rows, reference_accuracies, replace_file, save_checkpoint,
                    score_rows, score_windows, wilson)
from model import GPT, GPTConfig

# -----------------------------------------------------------------------------
# I/O
out_dir = 'out' # checkpoints and log.jsonl; relative to the shell's directory
results = '' # csv that gets a row per finished run; '' is results.csv beside out_dir
eval_interval = 250 # iterations between evaluations, each followed by a checkpoint
log_interval = 10
eval_iters = 512 # validation rows or windows per evaluation, of block_size tokens (not batches: batch_size must not change a result)
eval_only = False # evaluate and exit, at every eval_lens
skip_done = False # if results.csv has this run's row, print it and exit (ablate.py uses this)
always_save_checkpoint = True # ckpt.pt after each evaluation; if False, only when validation improved
save_best = True # best.pt beside it: the best validation loss so far
init_from = 'scratch' # or 'resume': go on from out_dir/ckpt.pt
# evaluation at the end
eval_lens: tuple[int, ...] = () # context lengths; empty: L, 2L, 4L, 8L (for pos=learned, which has no other, L)
eval_rows = 1024 # test rows (synthetic) or windows (text) per length
eval_targets = 0 # text: score the same last tokens of every window at every length; 0: half of block_size
# wandb logging, if it is installed
wandb_log = False
wandb_project = 'nanojordan'
wandb_run_name = ''
# data
dataset = 'synth' # a folder of data/
gradient_accumulation_steps = 1 # micro-batches per iteration, shared out over the DDP processes
batch_size = 48 # rows or windows per micro-batch
block_size = 256 # L, the training length
# model
n_layer = 2
n_head = 4
n_embd = 128
mlp_ratio = 4
dropout = 0.0
bias = False # in Linears and LayerNorms
attn_temperature = 1.0 # 1: softmax; the larger, the closer to attention that is linear in the scores, at twice its cost
# positional encoding; see GPTConfig in model.py
pos = 'jordan_stabilized'
pos_theta = 10000.0
pos_grid = 'fast' # or 'full'
pos_order = 2
pos_gamma0: float | None = None # initial damping per token; None: the encoding's own; 0: no damping
pos_c: float | None = None # or as c/L
pos_eta0 = 0.0 # initial shear, per token, or per L for encodings in units of L
pos_eta_max = 0.1 # its bound
pos_lr_mult = 20.0 # learning rate of gamma and eta, in units of learning_rate: at 1 they could hardly leave their initial values
# AdamW
learning_rate = 1e-3 # peak
max_iters = 500
weight_decay = 0.1 # of matrices; never of norms, biases, gamma, eta
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0 # of the gradient's norm; 0: off
# learning rate schedule
decay_lr = True # cosine after the warm-up; if False, constant
warmup_iters = 50
lr_decay_iters: int | None = None # None: max_iters
min_lr: float | None = None # None: learning_rate / 10
# system
seed = 0 # initial weights, batches and dropout; the evaluation rows are the same for every seed
device = '' # '': cuda, else mps, else cpu; or cuda:1 ...
dtype = '' # '': bfloat16 where it is fast, else float32; or float16 with a gradient scaler
compile: bool | None = None # torch.compile the model; None: on CUDA only
backend = '' # DDP: '' is nccl on CUDA, gloo on CPU
# -----------------------------------------------------------------------------
config = configure(globals(), {
    '1 <= x <= 10**6': 'eval_iters eval_rows gradient_accumulation_steps batch_size block_size n_layer n_head n_embd mlp_ratio pos_order',
    '1 <= x <= 10**9': 'eval_interval log_interval', '0 <= x <= 10**9': 'eval_targets max_iters warmup_iters lr_decay_iters seed',
    'x >= 0': 'weight_decay grad_clip min_lr pos_lr_mult', 'x > 0': 'learning_rate', '.001 <= x <= 10**4': 'attn_temperature', '0 <= x < 1': 'dropout beta1 beta2',
    'x > 1': 'pos_theta', '0 <= x <= 10**3': 'pos_gamma0', '0 <= x <= 10**6': 'pos_c', '0 < x <= 10**3': 'pos_eta_max',
    "x in ('scratch', 'resume')": 'init_from', "x in ('fast', 'full')": 'pos_grid', "x in ('', 'nccl', 'gloo')": 'backend',
    "x != ''": 'out_dir dataset pos', 'all(2 <= n <= 10**6 for n in x)': 'eval_lens'})
lr_decay_iters = max_iters if lr_decay_iters is None else lr_decay_iters
min_lr = learning_rate / 10 if min_lr is None else min_lr
results = results or os.path.join(os.path.dirname(os.path.abspath(out_dir)), 'results.csv')
eval_lens = eval_lens or ((block_size,) if pos == 'learned' else tuple(n * block_size for n in (1, 2, 4, 8)))
if pos == 'learned' and max(eval_lens) > block_size:
    usage(f"eval_lens={max(eval_lens)}: pos=learned has no positions beyond block_size={block_size}")
ckpt_path, best_path, log_path = (os.path.join(out_dir, f) for f in ('ckpt.pt', 'best.pt', 'log.jsonl'))
try: # what the model cannot be is said before data or device are touched
    model_args = {f.name: config[f.name] for f in fields(GPTConfig) if f.name != 'vocab_size'}
    GPTConfig(**model_args)
except ValueError as e:
    usage(e)

# distributed: torchrun sets RANK; every process computes on its own device
ddp = int(os.environ.get('RANK', -1)) != -1
rank, world = (int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])) if ddp else (0, 1)
if gradient_accumulation_steps % world:
    usage(f"gradient_accumulation_steps={gradient_accumulation_steps}: expected a multiple of the {world} processes")
device, dtype, compile = choose_device(device, dtype, compile)
if ddp:
    if device == 'cuda':
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group(backend or ('nccl' if 'cuda' in device else 'gloo'))
master = rank == 0
say = (lambda *args: print(*args, flush=True)) if master else (lambda *args: None)
context = autocast(device, dtype, attn_temperature)

checkpoint = load_checkpoint(ckpt_path) if init_from == 'resume' else None

# data. The synthetic task makes itself when it is missing or was made for other sizes
locked = lock(dataset) if dataset == 'synth' and master else None # until its files are open, or another run might make it anew
if locked:
    new_rows = max_iters * batch_size * gradient_accumulation_steps # a resumed run keeps the rows it began with
    make_synth(block_size, eval_lens, checkpoint.get('train_rows', 1) if checkpoint else max(1, new_rows), eval_iters, eval_rows)
if ddp:
    dist.barrier()
meta = load_meta(dataset)
is_rows = meta['kind'] == 'rows'
row_len = block_size + 1 if is_rows else None
if is_rows and meta['row_len'] != row_len:
    fail(f"data set {dataset!r} has rows of {meta['row_len']} tokens, but block_size={block_size} needs {row_len}: "
         f"python data/synth/prepare.py --name={dataset} --L={block_size}, or --block_size={meta['row_len'] - 1}")
test_split = 'test' if os.path.exists(os.path.join(data_dir(dataset), 'test.bin')) else 'val' # of a text
if is_rows: # mapped once: another run may make other sizes meanwhile
    rows = {split: load_tokens(dataset, split, meta, row_len) for split in ('train', 'val')}
    rows |= {T: load_tokens(dataset, f'test_{T}', meta, T + 1) for T in eval_lens}
    for T in eval_lens:
        check_tokens(dataset, f'test_{T}', meta)
sizes = {split: check_tokens(dataset, split, meta) for split in ('train', 'val')}
if is_rows and (sizes['train'], sizes['val']) != (meta['train_rows'], meta['val_rows']):
    fail(f"data/{dataset} has {sizes['train']} and {sizes['val']} rows, not the {meta['train_rows']} and {meta['val_rows']} of its meta.json: "
         f"run python data/synth/prepare.py --name={dataset} again")
if not is_rows:
    sizes[test_split] = check_tokens(dataset, test_split, meta)
    for split, setting, need in (('train', 'block_size', block_size), ('val', 'block_size', block_size), (test_split, 'eval_lens', max(eval_lens))):
        if sizes[split] <= need:
            fail(f"data/{dataset}/{split}.bin has {sizes[split]:,} tokens, but a window of {need} and its target need {need + 1:,}: "
                 f"use a longer text or a smaller {setting}")

if ddp:
    dist.barrier()
if locked:
    locked.close()

# what identifies this run's row in results.csv: the settings that can change a number, at any commit; the data; the seed
ignore = ('out_dir results seed init_from eval_only skip_done log_interval wandb_log wandb_project wandb_run_name always_save_checkpoint save_best '
          'eval_interval device compile backend').split()
if os.path.isdir(results):
    usage(f"results={results!r} is a folder: name a csv file")
read_rows(results) # a damaged one is said before hours of training
run_id = dict(config_hash=config_hash(config, ignore), data_checksum=(meta.get('checksums') or {}).get('train', ''), seed=seed)
if skip_done and (done := find_row(results, **run_id)):
    say('this run is in the results already')
    say(json.dumps(done | json.loads(done['metrics']) | {'val_loss': float(done['val_loss']), 'metrics': None, 'scores': None}))
    sys.exit()

def get_batch(it, micro):
    """
    Micro-batch `micro` of iteration `it`: x, and the targets of its last positions (a row's answer; all of a window's).
    A pure function of (seed, it, micro): any encoding sees the same batches, a resumed run goes on with the next, and the
    micro-batches can be shared out over processes. Rows come in a shuffled order, none twice within an epoch.
    """
    if is_rows:
        n, N = (it * gradient_accumulation_steps + micro) * batch_size + np.arange(batch_size), len(rows['train'])
        order = {epoch: np.random.default_rng([seed, 1, epoch]).permutation(N) for epoch in set(n // N)}
        batch, targets = rows['train'][[order[k // N][k % N] for k in n]], 1
    else:
        tokens, targets = load_tokens(dataset, 'train', meta), block_size
        starts = np.random.default_rng([seed, 1, it, micro]).integers(0, len(tokens) - block_size, batch_size)
        batch = np.stack([tokens[s:s + block_size + 1] for s in starts])
    batch = torch.from_numpy(batch.astype(np.int64))
    if 'cuda' in device:
        batch = batch.pin_memory().to(device, non_blocking=True)
    batch = batch.to(device)
    return batch[:, :-1], batch[:, -targets:]

def evaluate():
    """Validation loss in nats over the first eval_iters rows, or as many windows spread evenly over the text."""
    model.eval()
    raw_model.choose_paths(block_size)
    if is_rows:
        losses, _ = score_rows(model, rows['val'][:eval_iters], device, context)
    else:
        n = min(eval_iters, (sizes['val'] - 1) // block_size)
        ends = np.linspace(block_size + 1, sizes['val'], n).astype(np.int64)
        losses = score_windows(model, load_tokens(dataset, 'val', meta), ends, block_size, block_size, device, context)
    model.train()
    return float(losses.mean())

def evaluate_lengths():
    """The final measurement at every eval_lens: metrics as a flat dict, a table on stdout, and each row's or window's score."""
    metrics, scores = {}, {}
    raw_model.eval()
    raw_model.choose_paths(max(eval_lens))
    if is_rows:
        reference = reference_accuracies(raw_model.config, meta, eval_lens) if 'kernel' in meta else {}
        say(f"\n{'T':>6} {'T/L':>5} {'accuracy':>9}  {'95% interval':>12} {'rows':>6}   single-kernel reference")
        for T in eval_lens:
            _, right = score_rows(raw_model, rows[T][:eval_rows], device, context)
            lo, hi = wilson(right.sum(), len(right))
            metrics |= {f'acc_{T}': right.mean(), f'acc_{T}_lo': lo, f'acc_{T}_hi': hi}
            scores[f'acc_{T}'] = right
            metrics |= {f'ref_{T}': reference[T]} if T in reference else {}
            ref = f'{reference[T]:.3f}' if T in reference else 'n/a'
            say(f"{T:6} {T / block_size:5g} {right.mean():9.3f}  {lo:.3f}-{hi:.3f} {len(right):7,}   {ref}")
    else: # windows end at the same places for every length, so that the same targets are scored
        tokens, longest = load_tokens(dataset, test_split, meta), max(eval_lens)
        K = min(eval_targets or block_size // 2, *eval_lens)
        n = max(1, min(eval_rows, (len(tokens) - 1 - longest) // K + 1))
        ends = np.linspace(longest + 1, len(tokens), n).astype(np.int64)
        bits = meta.get('tokens_per_byte', {}).get(test_split, 1) / math.log(2) # nats per token -> bits per byte
        say(f"\n{'T':>6} {'T/L':>5} {'bits/byte':>9}  {'95% interval':>12} {'windows':>8}   of the same last {K} targets, {test_split}.bin")
        for T in eval_lens:
            losses = score_windows(raw_model, tokens, ends, T, T if T == longest else K, device, context)
            bpb = losses[:, -K:].mean(axis=1) * bits
            lo, hi = bootstrap(bpb)
            metrics |= {f'bpb_{T}': bpb.mean(), f'bpb_{T}_lo': lo, f'bpb_{T}_hi': hi}
            scores[f'bpb_{T}'] = bpb
            say(f"{T:6} {T / block_size:5g} {bpb.mean():9.4f}  {lo:.3f}-{hi:.3f} {len(bpb):9,}")
        buckets = [(2 ** b - 1, min(2 ** (b + 1) - 1, longest)) for b in range(longest.bit_length()) if 2 ** b - 1 < longest]
        for a, b in buckets: # by position in the longest window; these targets differ from bucket to bucket
            metrics[f'bpb_pos_{a}_{b - 1}'] = losses[:, a:b].mean() * bits
        say(f"bits/byte by position in windows of {longest}: " + '  '.join(f"{a}-{b - 1}: {losses[:, a:b].mean() * bits:.3f}" for a, b in buckets))
    return {k: round(float(v), 6) for k, v in metrics.items()}, scores

def get_lr(it):
    """Learning rate of iteration it: linear warm-up, then cosine to min_lr at lr_decay_iters, then min_lr."""
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if not decay_lr:
        return learning_rate
    if it >= lr_decay_iters:
        return min_lr
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)

# model: from scratch, or from the checkpoint to resume
iter_num, best_val_loss, seconds_before = 0, float('inf'), 0.0
if init_from == 'resume':
    lacks = {'optimizer', 'scaler', 'iter_num', 'best_val_loss', 'seconds', 'data'} - checkpoint.keys()
    if lacks:
        fail(f"{ckpt_path}: holds no {', '.join(sorted(lacks))}, so it cannot be resumed; start from scratch, or use it with sample.py")
    saved = {f.name: f.default for f in fields(GPTConfig)} | checkpoint['config'] | checkpoint['model_args'] | {'training data': checkpoint['data']}
    now = config | {'vocab_size': meta['vocab_size'], 'training data': run_id['data_checksum']}
    free = {*ignore, 'eval_iters', 'eval_lens', 'eval_rows', 'eval_targets', 'max_iters', 'dtype'} - {'seed'}
    for key in now.keys() - free: # everything that shapes the rest of the run must be what it was
        if key in saved and saved[key] != now[key]:
            usage(f"--init_from=resume: {key} is {saved[key]!r} in {ckpt_path}, but {now[key]!r} now; "
                  f"resume with the same settings and data, or start from scratch")
    raw_model = model_of(checkpoint, ckpt_path)
    iter_num, best_val_loss, seconds_before = checkpoint['iter_num'], checkpoint['best_val_loss'], checkpoint['seconds']
    say(f"resuming {ckpt_path} at iteration {iter_num}")
else:
    torch.manual_seed(seed)
    raw_model = GPT(GPTConfig(**model_args, vocab_size=meta['vocab_size']))
raw_model.to(device)
optimizer = raw_model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device.split(':')[0], pos_lr_mult)
scaler = torch.amp.GradScaler(enabled=dtype == 'float16')
if init_from == 'resume':
    try:
        optimizer.load_state_dict(checkpoint['optimizer'])
        scaler.load_state_dict(checkpoint['scaler'])
    except (ValueError, KeyError, TypeError, RuntimeError) as e:
        fail(f"{ckpt_path}: its optimizer state does not fit ({' '.join(str(e).split())[:200]}); start from scratch")
    checkpoint = None # free its memory
if compile: # block by block: as fast as the whole model, compiled in a fraction of the time
    t0 = time.time()
    try: # try it out: a missing compiler shows at the first step
        for block in raw_model.transformer.h:
            block.compile()
        with context:
            raw_model(*get_batch(0, rank))[1].backward()
        say(f"compiled in {time.time() - t0:.0f} s")
    except Exception as e:
        say(f"torch.compile failed ({type(e).__name__}: {str(e).strip().splitlines()[0]}); going on in eager mode")
        torch.compiler.set_stance('force_eager')
        compile = False
    raw_model.zero_grad(set_to_none=True)
model = DDP(raw_model, device_ids=[device] if 'cuda' in device else None) if ddp else raw_model

n_params = sum(p.numel() for p in raw_model.parameters())
n_pos = sum(p.numel() for name, p in raw_model.named_parameters() if '.pos.' in name or '.wpe.' in name)
say(f"device={device} dtype={dtype} compile={compile} processes={world} torch={torch.__version__} threads={torch.get_num_threads()}")
say(raw_model.describe(getattr(torch, dtype)))
say(f"{n_params:,} parameters; " + ', '.join(f"{g['name']}: {sum(p.numel() for p in g['params']):,} at weight decay {g['weight_decay']:g}, "
                                             f"lr x{g['lr_mult']:g}" for g in optimizer.param_groups))
accumulation = gradient_accumulation_steps // world
tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
say(f"data/{dataset}: {sizes['train']:,} {'rows' if is_rows else 'tokens'} to train on; {tokens_per_iter:,} tokens per iteration")
if max_iters == 0 and not eval_only:
    say('note: max_iters=0: nothing is trained and no checkpoint is written')

if master:
    try:
        os.makedirs(out_dir, exist_ok=True)
        for f in os.listdir(out_dir): # what a killed run was writing
            if f.startswith(('ckpt.pt.', 'best.pt.', 'log.jsonl.')) and f.endswith('.tmp'):
                os.remove(os.path.join(out_dir, f))
        open(log_path, 'a').close()
    except OSError as e:
        fail(f"out_dir={out_dir!r} cannot be written ({e.strerror}): give another --out_dir")
    kept = []
    if init_from == 'resume': # drop what the log holds beyond the checkpoint
        with open(log_path, encoding='utf-8', errors='replace') as f:
            kept = [line for line in f if (m := re.match(r'\{"iter": (\d+), .*\}\n', line)) and int(m[1]) < iter_num]
    if not eval_only:
        replace_file(log_path, lambda f: f.write(''.join(kept).encode()))
    if wandb_log:
        import wandb
        wandb.init(project=wandb_project, name=wandb_run_name or None, config=config)

def log(**values):
    """A line of log.jsonl, and of wandb."""
    if master:
        with open(log_path, 'a', encoding='utf-8') as f:
            f.write(json.dumps(values) + '\n')
        if wandb_log:
            wandb.log(values, step=values['iter'])

def save(path):
    """Everything that the rest of the run depends on. Batches and dropout are functions of (seed, iteration): no RNG state."""
    if master:
        save_checkpoint(path, dict(
            model=raw_model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(), model_args=asdict(raw_model.config),
            config=config, iter_num=iter_num, best_val_loss=best_val_loss,
            seconds=seconds_before + time.time() - start, train_rows=sizes['train'], data=run_id['data_checksum'], encoding='bits' if is_rows else meta.get('encoding', 'bytes')))

def stop_if_not_finite(what, value):
    if not math.isfinite(value):
        fail(f"{what} is {value} at iteration {iter_num} (lr {lr:g}, dtype {dtype}); no checkpoint was written over. "
             f"Try a smaller learning_rate, a grad_clip, or dtype=float32")

# SIGINT and SIGTERM finish the iteration, save, and end the run with the usual status
caught = []
def on_signal(number, frame):
    if caught: # a second one ends it at once
        sys.exit(128 + number)
    caught.append(number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, on_signal)

def stop_asked():
    """Has any process caught a signal? All must leave at the same iteration."""
    flag = torch.tensor(len(caught), device=device)
    if ddp:
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return flag.item() > 0 if ddp else bool(caught)

start = time.time()
val_loss = lr = float('nan')
t0, it0 = time.time(), iter_num
model.train()
while not eval_only:
    raw_model.choose_paths(block_size) if iter_num % log_interval == 0 else None
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group['lr'] = lr * group['lr_mult']

    # validate and save
    last = iter_num >= max_iters
    if iter_num % eval_interval == 0 or last:
        val_loss = evaluate()
        stop_if_not_finite('validation loss', val_loss)
        say(f"iter {iter_num}: val loss {val_loss:.4f}")
        log(iter=iter_num, val_loss=val_loss, lr=lr)
        if iter_num > 0: # an untrained model is no result to keep
            improved, best_val_loss = val_loss < best_val_loss, min(val_loss, best_val_loss)
            if always_save_checkpoint or improved:
                save(ckpt_path)
            if save_best and improved:
                save(best_path)
        t0, it0 = time.time(), iter_num # an evaluation is no part of the iteration times
    if last:
        break

    # forward, backward, update; each process takes every world-th micro-batch
    for step in range(accumulation):
        micro = step * world + rank
        x, y = get_batch(iter_num, micro)
        torch.manual_seed(int(np.random.SeedSequence([seed, 2, iter_num, micro]).generate_state(1)[0])) # dropout
        sync = contextlib.nullcontext() if not ddp or step == accumulation - 1 else model.no_sync()
        with sync:
            with context:
                _, loss = model(x, y)
            scaler.scale(loss / accumulation).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    # log
    if iter_num % log_interval == 0 or iter_num == max_iters - 1:
        value = loss.item() # of the last micro-batch; waits for the device
        stop_if_not_finite('training loss', value)
        if dtype != 'float16': # its scaler meets infinite gradients, and skips them
            stop_if_not_finite('gradient norm', norm.item())
        dt = (time.time() - t0) / (iter_num + 1 - it0)
        tokens_per_s = tokens_per_iter / dt
        mfu = raw_model.estimate_mfu(tokens_per_s / world, torch.cuda.get_device_name(), dtype) if 'cuda' in device else None
        eta = datetime.timedelta(seconds=round(dt * (max_iters - iter_num - 1)))
        say(f"iter {iter_num}: loss {value:.4f}, {dt * 1e3:.0f} ms, {tokens_per_s:,.0f} tokens/s, ETA {eta}" + (f", MFU {mfu:.1%}" if mfu else ''))
        log(iter=iter_num, loss=value, lr=lr, ms=round(dt * 1e3, 1), tokens_per_s=round(tokens_per_s))
        t0, it0 = time.time(), iter_num + 1
    iter_num += 1
    if stop_asked():
        stop_if_not_finite('training loss', loss.item())
        save(ckpt_path)
        say(f"stopped by {signal.Signals(caught[0]).name} after iteration {iter_num - 1}; {ckpt_path} is saved, --init_from=resume goes on")
        sys.exit(128 + caught[0] if caught else 0)

# measure at every length; the row of results.csv
if master:
    if eval_only:
        val_loss = evaluate()
    train_seconds = seconds_before + time.time() - start
    with torch.compiler.set_stance('force_eager'): # no compilation per length
        metrics, scores = evaluate_lengths()
    c = raw_model.config
    row = dict(time=datetime.datetime.now().isoformat(timespec='seconds'), commit=git_commit(), **run_id, dataset=dataset, note=meta.get('note', ''))
    row |= {f.name: getattr(c, f.name) for f in fields(c) if f.name.startswith('pos')} # read back from the model
    row |= dict(pos_lr_mult=pos_lr_mult, n_layer=c.n_layer, attn_temperature=c.attn_temperature, block_size=c.block_size, params=n_params, pos_params=n_pos, iters=iter_num,
                learning_rate=learning_rate, weight_decay=weight_decay, tokens_per_s=round(iter_num * tokens_per_iter / max(train_seconds, 1e-9)),
                device=torch.cuda.get_device_name() if 'cuda' in device else device, dtype=dtype, torch=torch.__version__,
                train_seconds=round(train_seconds, 1), wall_seconds=round(seconds_before + time.time() - start, 1), val_loss=round(val_loss, 6))
    again = init_from == 'resume' and find_row(results, **run_id, iters=iter_num)
    if not again and not eval_only: # a finished run that is resumed has its row
        say(f"appending a row to {results}")
    print(json.dumps(row | metrics), flush=True) # whatever becomes of the csv
    if not again and not eval_only:
        append_row(results, row | dict(metrics=json.dumps(metrics), scores=json.dumps({k: pack(v) for k, v in scores.items()})))
if ddp:
    dist.destroy_process_group()
