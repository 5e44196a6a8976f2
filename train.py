"""
Train a GPT with any positional encoding, then measure it at 1x to 8x its training length.

    python train.py config/synth_jordan.py                       # the main job: CPU, about a minute
    python train.py config/synth_jordan.py --pos=rope --seed=2   # any setting below, as a flag
    torchrun --nproc_per_node=4 train.py config/synth_paper.py --gradient_accumulation_steps=4 --batch_size=6

What is trained on lives in tasks.py, what a run leaves behind in runs.py.
"""

import os
import sys
import math
import time
import datetime
from dataclasses import asdict

from configurator import configure, typed # before torch, so that Ctrl-C prints one line

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import runs
from common import autocast, choose_device, fail, join_processes, largest, same_everywhere, seed_dropout
from model import GPT, GPTConfig
from tasks import METRICS, interval, make_task, score

# -----------------------------------------------------------------------------
# I/O
out_dir = 'out' # checkpoints and log.jsonl; relative to the shell's directory
results = '' # csv that gets a row per finished run; '' is results.csv beside out_dir
label = '' # what the row is called; '': the encoding, and its settings that are given as flags
eval_interval = 250 # iterations between evaluations, each followed by a checkpoint
log_interval = 10
eval_iters = 512 # validation rows or windows per evaluation (not batches)
eval_only = False # evaluate and exit, at every eval_lens
skip_done = False # if results.csv has this run's row, say so and exit
dry_run = False # say what would be trained, and exit
json = False # print the row of results as the last line, as one JSON object
always_save_checkpoint = True # ckpt.pt after each evaluation; if False, only when validation improved
save_best = True # best.pt beside it: the best validation loss so far
init_from = 'scratch' # or 'resume': go on from out_dir/ckpt.pt
extend = False # resume a run with more max_iters than it was started with; the row gets a hash of its own
# evaluation at the end
eval_lens: tuple[int, ...] = () # context lengths; empty: L, 2L, 4L, 8L
eval_rows = 1024 # rows or windows per length
eval_targets = 0 # text: score the same last tokens of every window at every length; 0: half of block_size
# wandb, if installed
wandb_log = False
wandb_project = 'nanojordan'
wandb_run_name = ''
# data
dataset = 'synth' # a task of tasks.py (synth, recall), or a folder of data/
kernel = 'mixed' # synth: the teacher, one of KERNELS in tasks.py, or random
omega = 10000 ** (-2 * 3 / 32) # synth: radians per token; index 3 of the grid of a head of 32
kernel_seed: int | None = None # synth, kernel=random: which; None: one for each seed
lengths: tuple[int, ...] = () # train on several lengths, one drawn for each iteration; empty: block_size
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
attn_temperature = 1.0 # 1: softmax; the larger, the closer to attention that is linear in the scores
# positional encoding; see GPTConfig in model.py
pos = 'jordan_scaled'
pos_theta = 10000.0
pos_grid = 'fast' # or 'full'
pos_order = 2
pos_gamma0: float | None = None # initial damping per token; None: the encoding's own; 0: no damping
pos_c: float | None = None # or as c/L
pos_eta0 = 1.0 # initial shear, per L
pos_eta_max = 5.0 # its bound
pos_lr_mult = 20.0 # learning rate of gamma and eta, in units of learning_rate: at 1 they could hardly move
# AdamW
learning_rate = 1e-3 # peak
max_iters = 500
weight_decay = 0.1 # of matrices; never of norms, biases, gamma, eta
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0 # of the gradient's norm; 0: off
# learning rate schedule
decay_lr = True # cosine after the warm-up; if False, constant
warmup_iters: int | None = None # None: a tenth of max_iters
lr_decay_iters: int | None = None # None: max_iters
min_lr: float | None = None # None: learning_rate / 10
# system
seed = 0 # initial weights, batches, dropout, evaluation rows: the same for every pos
device = '' # '': cuda, else mps, else cpu; or cuda:1 ...
dtype = '' # '': bfloat16 where it is fast, else float32; or float16 with a gradient scaler
compile: bool | None = None # torch.compile the model; None: on CUDA only
backend = '' # DDP: '' is nccl on CUDA, gloo on CPU
# -----------------------------------------------------------------------------
config = configure(globals(), {
    '1 <= x <= 10**6': 'eval_iters eval_rows gradient_accumulation_steps batch_size block_size mlp_ratio',
    '1 <= x <= 10**5': 'n_layer n_head n_embd pos_order',
    '1 <= x <= 10**9': 'eval_interval log_interval',
    '0 <= x <= 10**9': 'eval_targets max_iters warmup_iters lr_decay_iters seed kernel_seed',
    'x >= 0': 'weight_decay grad_clip min_lr pos_lr_mult',
    'x > 0': 'learning_rate',
    '0 < x <= 10': 'omega',
    '.001 <= x <= 10**4': 'attn_temperature',
    '0 <= x < 1': 'dropout beta1 beta2',
    "x in ('scratch', 'resume')": 'init_from',
    "x in ('', 'nccl', 'gloo')": 'backend',
    "x != ''": 'out_dir dataset pos',
    'all(2 <= n <= 10**6 for n in x)': 'eval_lens',
})

# what is None or empty follows from the rest, in config too
lr_decay_iters = max_iters if lr_decay_iters is None else lr_decay_iters
warmup_iters = max_iters // 10 if warmup_iters is None else warmup_iters
min_lr = learning_rate / 10 if min_lr is None else min_lr
eval_lens = eval_lens or tuple(n * block_size for n in (1, 2, 4, 8))
results = results or os.path.join(os.path.dirname(os.path.abspath(out_dir)), 'results.csv')
device, dtype, compile = choose_device(device, dtype, compile)
config |= dict(lr_decay_iters=lr_decay_iters, warmup_iters=warmup_iters, min_lr=min_lr)
config |= dict(eval_lens=eval_lens, dtype=dtype)

# refuse an impossible schedule or model before data or device are touched
model_args = runs.check_settings(config)

# processes: torchrun starts several, each with its share of the micro-batches
rank, world, device = join_processes(device, backend, gradient_accumulation_steps)
master = rank == 0
context = autocast(device, dtype, attn_temperature)

# catch signals; only the master prints
signals = runs.Signals()
say = signals.say if master else (lambda *args: None)

# the task: where batches come from, and how the model is measured
task = make_task(config)

# which run this is: settings, data and seed
run_id = runs.identity(config, task)
same_everywhere('settings or data', (run_id['config_hash'], run_id['data_checksum'], seed), world)
runs.check_results(results)
label = label.strip() or runs.label_of(config, typed())
for note in runs.without_effect(config, task, typed()):
    say(f"note: {note}")

# the lengths to measure, and the longest of them that the data have
lens, longest = runs.lengths_to_measure(config, task, say)
if skip_done:
    runs.exit_if_done(results, run_id, json, say)

# the model: new, or from the checkpoint of a run that is taken up again
iter_num = 0
best_val_loss = float('inf')
seconds_before = 0.0 # what the run had taken when it was saved
extended = [] # an entry for each time that extend=True gave it more iterations
ckpt_path = os.path.join(out_dir, 'ckpt.pt')
best_path = os.path.join(out_dir, 'best.pt')
if init_from == 'resume':
    checkpoint = runs.resume(ckpt_path, config, task, extend)
    raw_model = runs.model_of(checkpoint, ckpt_path)
    iter_num = checkpoint['iter_num']
    best_val_loss = checkpoint['best_val_loss']
    seconds_before = checkpoint['seconds']
    extended = checkpoint['extended']
    run_id = runs.identity(config, task, extended)
    say(f"resuming {ckpt_path} at iteration {iter_num} of {max_iters}")
else:
    torch.manual_seed(seed)
    raw_model = GPT(GPTConfig(**model_args, vocab_size=task.vocab_size))
raw_model.to(device)
device_name = torch.cuda.get_device_name(device) if 'cuda' in device else device

# the optimizer; float16 needs a scaler
optimizer = raw_model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2),
                                           device.split(':')[0], pos_lr_mult)
scaler = torch.amp.GradScaler(enabled=dtype == 'float16')
if init_from == 'resume':
    runs.restore(checkpoint, ckpt_path, optimizer, scaler)
    del checkpoint # free its memory

# one iteration, all processes together
rows_per_iter = gradient_accumulation_steps * batch_size
tokens_per_iter = round(rows_per_iter * sum(task.lengths) / len(task.lengths)) # on average

# compile the model; DDP if there are several processes
if compile:
    x, y = task.batch(seed, 0, batch_size)
    compile = runs.compile_blocks(raw_model, x.to(device).long(), y.to(device).long(), context, say)
model = DDP(raw_model, device_ids=[device] if 'cuda' in device else None) if world > 1 else raw_model

# what runs, read back from the model and the optimizer
say(f"device={device} dtype={dtype} compile={compile} processes={world} torch={torch.__version__} "
    f"threads={torch.get_num_threads()}")
say(raw_model.describe(getattr(torch, dtype)))
say(runs.describe_groups(optimizer))
say(f"{dataset}: {task.note}; {tokens_per_iter:,} tokens per iteration")
if dry_run:
    sys.exit()
if master and not eval_only:
    lock = runs.open_out_dir(out_dir, init_from == 'resume', say) # kept until the end
log = runs.Log(out_dir, iter_num, config, silent=eval_only or not master)

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

def evaluate():
    """Mean loss of the validation rows at L, in nats per asked target. The same rows each time."""
    # on every process: all must agree on which is the best
    model.eval()
    x, y = task.examples('val', block_size, eval_iters, seed, longest=block_size, k=block_size)
    nats, _ = score(raw_model, x, y, task.answers, device, context)
    model.train()
    return float(nats.sum()) / (y >= 0).sum().item()

def save(path):
    """Everything that the rest of the run depends on. Batches are functions of the seed and the iteration."""
    if master:
        runs.save(path, dict(
            model=raw_model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(),
            model_args=asdict(raw_model.config), config=config, data=task.checksum or task.note,
            iter_num=iter_num, best_val_loss=best_val_loss, extended=extended,
            seconds=time.perf_counter() - start))

def stop_if_not_finite(what, value):
    if not math.isfinite(value):
        fail(f"{what} is {value} at iteration {iter_num} (lr {lr:g}, dtype {dtype}); no checkpoint was "
             f"written over. Try a smaller learning_rate, a grad_clip, or dtype=float32")

# from here on a signal ends the run between two iterations, with a checkpoint
signals.after_iteration()

# the loop
start = time.perf_counter() - seconds_before # a resumed run goes on counting
last_log = time.perf_counter()
iters_since_log = 0
while not eval_only:

    # set the learning rate of this iteration
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group['lr'] = lr * group['lr_mult']

    # every now and then, and at the end, measure the validation loss and save
    if iter_num % eval_interval == 0 or iter_num >= max_iters:
        val_loss = evaluate()
        stop_if_not_finite('validation loss', val_loss)
        say(f"iter {iter_num}: val loss {val_loss * task.per_nat:.4f} {task.unit}")
        log(iter=iter_num, val_loss=val_loss, lr=lr)
        improved = iter_num > 0 and val_loss <= best_val_loss # equal: a resumed run measures again
        if improved:
            best_val_loss = val_loss
        if iter_num > 0 and (always_save_checkpoint or improved):
            save(ckpt_path)
        if improved and save_best:
            save(best_path)
        last_log = time.perf_counter() # the evaluation is not timed
        iters_since_log = 0
    if iter_num >= max_iters:
        break

    # all rows of this iteration, in every process: x (rows, T), y (rows, k), -1 where nothing is asked
    x, y = task.batch(seed, iter_num, rows_per_iter)
    n_targets = (y >= 0).sum().item()

    # forward and backward on every world-th micro-batch. Its loss is the mean over its own targets. Weighted
    # by their share of all targets, the losses add up to the mean over the iteration
    for micro in range(rank, gradient_accumulation_steps, world):
        rows = slice(micro * batch_size, (micro + 1) * batch_size)
        share = (y[rows] >= 0).sum().item() / n_targets
        seed_dropout(seed, iter_num, micro)
        if world > 1:
            # gradients are exchanged once an iteration, in the last backward pass
            model.require_backward_grad_sync = micro + world >= gradient_accumulation_steps
        with context:
            _, loss = model(x[rows].to(device).long(), y[rows].to(device).long())
        # DDP takes the mean over processes, we want the sum: times world
        scaler.scale(loss * (share * world)).backward()

    # clip the gradient, and step
    scaler.unscale_(optimizer)
    # at inf it clips nothing, but returns the norm
    norm = torch.nn.utils.clip_grad_norm_(raw_model.parameters(), grad_clip or math.inf)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iters_since_log += 1

    # print the last micro-batch's loss, the time of an iteration and the time left
    if iter_num % log_interval == 0 or iter_num == max_iters - 1:
        loss_now = loss.item() # waits for the device
        stop_if_not_finite('training loss', loss_now)
        if dtype != 'float16': # its scaler meets infinite gradients, and skips them
            stop_if_not_finite('gradient norm', norm.item())
        now = time.perf_counter()
        dt = max((now - last_log) / iters_since_log, 1e-9)
        tokens_per_s = tokens_per_iter / dt
        left = datetime.timedelta(seconds=round(dt * (max_iters - iter_num - 1)))
        mfu = raw_model.estimate_mfu(tokens_per_s / world, device_name, dtype)
        say(f"iter {iter_num}: loss {loss_now * task.per_nat:.4f} {task.unit}, {dt * 1e3:.0f} ms, "
            f"{tokens_per_s:,.0f} tokens/s, ETA {left}" + (f", MFU {mfu:.1%}" if mfu else ''))
        log(iter=iter_num, loss=loss_now, lr=lr, ms=round(dt * 1e3, 1), tokens_per_s=round(tokens_per_s))
        last_log = now
        iters_since_log = 0
    iter_num += 1

    # a signal ends the run here, where everything can be taken up again
    if number := largest(signals.caught or 0, world, device):
        stop_if_not_finite('training loss', loss.item())
        save(ckpt_path)
        say(f"stopped by signal {number} after iteration {iter_num - 1}; {ckpt_path} is saved, "
            "--init_from=resume goes on")
        sys.exit(128 + number)

# measure at every length, with the same rows or targets for every encoding
if master:
    signals.at_once(f"stopped during the measurement; --init_from=resume measures {ckpt_path} again")
    train_seconds = time.perf_counter() - start
    if eval_only: # else it is the loop's last
        val_loss = evaluate()
        say(f"val loss {val_loss * task.per_nat:.4f} {task.unit}")
    raw_model.eval()
    # of a text the same last k tokens are scored at every T, so that only their context differs
    k = min(eval_targets or block_size // 2, *eval_lens)
    metrics = {} # T: [mean, low, high, n]
    say(f"\n{'T':>6} {'T/L':>5} {METRICS[task.metric][0]:>14} {'95% interval':>15} {'n':>7}")
    for T in lens:
        x, y = task.examples('test', T, eval_rows, seed, longest=longest, k=k)
        with torch.compiler.set_stance('force_eager'): # no compilation per length
            nats, hits = score(raw_model, x, y, task.answers, device, context)
        if not np.isfinite(nats).all():
            say(f"note: at T = {T} the loss is not finite; this length is left out")
            continue
        values = task.values(nats, hits, y.numpy())
        mean = float(values.mean())
        n = len(values)
        low, high = interval(values)
        metrics[T] = [round(mean, 6), round(low, 6), round(high, 6), n]
        say(f"{T:6} {T / block_size:5g} {mean:14.4f} {low:8.4f}-{high:.4f} {n:7,}")

    # one row for a run: none with eval_only, no second one when a finished run is resumed
    wall_seconds = time.perf_counter() - start
    row = runs.describe_run(config, run_id | dict(label=label), task, raw_model, iter_num,
                            (train_seconds, wall_seconds), device_name, val_loss, metrics)
    has_row = init_from == 'resume' and runs.find(results, **run_id)
    if not (eval_only or has_row):
        runs.append(results, row)
        say(f"\na row is in {results}")
    say(f"next: python sample.py --out_dir={out_dir}; python probe.py --ckpt={ckpt_path}")
    if json:
        say(runs.as_json(row))
if world > 1:
    torch.distributed.destroy_process_group()
