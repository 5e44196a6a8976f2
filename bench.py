"""
Speed and memory of every encoding, each against GPT-2's learned positions in the same run: ratios hold on a noisy machine, times do not.

    python bench.py                                      # training steps at T = 256 and 1024, memory at T = 8192
    python bench.py --pos=rope,jordan_scaled --T=4096 --compile=True
    python bench.py --decode=True                        # generation with the KV cache, against full forwards
    python bench.py config/bench_gpu.py                  # a GPT-2 sized model on a GPU

Correctness comes first: attend against the definition of the score, in this dtype; exit status 1 if it is off. The last line is one
JSON object. `naive` is full T x T softmax attention without positions, the textbook form, for scale.
"""

import os
import re
import sys
import json
import math
import time
import tempfile
import platform
import subprocess
import multiprocessing

from configurator import ROOT, configure, usage # before torch: it makes Ctrl-C one line

import torch
from torch.nn import functional as F

from common import COLORS, autocast, choose_device, fail, save_figure
from model import GPT, GPTConfig, NoPE, POS, make_pos

# -----------------------------------------------------------------------------
pos = '' # encodings, comma-separated; '' is all of them, rope+alibi and naive
T: tuple[int, ...] = (256, 1024) # context lengths of the training steps
batch_size = 0 # rows; 0: as many as make 24,576 tokens
reps = 5 # measurements, each next to one of `learned`
# model: the paper's synthetic one
n_layer = 3
n_head = 4
n_embd = 128
mlp_ratio = 2
vocab_size = 256
# what to measure
steps = True # forward, and forward + backward + optimiser step, at each T
memory_T = 8192 # one row's forward pass: memory beyond the idle process, as a ratio too; 0: leave it out
decode = False # instead: tokens/s of generation at context decode_T, with the KV cache and without
decode_T = 1024
batch_cost = False # instead: the data loader's share of a training run (config/synth_jordan.py, shortened)
profile = False # instead: where the time of a step goes, by operator (torch.profiler), at the last T
plot = False # time and memory against T, on log axes (needs matplotlib)
out_dir = 'out-bench' # for the picture; relative to the shell's directory
# system
device = '' # '': cuda, else mps, else cpu; or cuda:1 ...
dtype = '' # '': bfloat16 where it is fast, else float32
compile: bool | None = None # None: on CUDA only
# -----------------------------------------------------------------------------
configure(globals(), {'all(2 <= n <= 10**6 for n in x) and x': 'T', '0 <= x <= 10**6': 'batch_size', '1 <= x <= 1000': 'reps', "x != ''": 'out_dir',
                      '1 <= x <= 10**5': 'n_layer n_head n_embd mlp_ratio', '2 <= x <= 10**6': 'vocab_size decode_T', 'x == 0 or 16 <= x <= 10**6': 'memory_T'})
device, dtype, compile = choose_device(device, dtype, compile)
os.environ['TORCHINDUCTOR_FORCE_DISABLE_CACHES'] = '1' # compile times are cold ones
cuda, context = 'cuda' in device, autocast(device, dtype)

class Naive(NoPE):
    """Every score, mask and softmax in full: (B, nh, T, T)."""
    def attend(self, u, w, v, i, j, cache=None):
        return F.softmax(self.logits(u, w, i, j).masked_fill(i[:, None] < j, -math.inf), dim=-1) @ v

    def path(self, dtype):
        return 'full'

POS['naive'] = Naive

def config_of(name, T, **kw):
    return GPTConfig(pos=name, block_size=T, n_layer=n_layer, n_head=n_head, n_embd=n_embd, mlp_ratio=mlp_ratio, vocab_size=vocab_size, **kw)

def build(name, T, compiled=False):
    torch.manual_seed(0)
    model = GPT(config_of(name, T)).to(device)
    if compiled:
        for block in model.transformer.h:
            block.compile()
    return model

def path_of(model):
    return model.pos_modules()[0].path(getattr(torch, dtype))

def wait():
    if cuda:
        torch.cuda.synchronize()
    if device == 'mps':
        torch.mps.synchronize()

def seconds(f):
    wait()
    start = time.perf_counter()
    f()
    wait()
    return time.perf_counter() - start

def median(x):
    return sorted(x)[len(x) // 2]

def rows_of(T):
    return batch_size or max(1, 24576 // T)

# -----------------------------------------------------------------------------
# correctness

def check(name, n=512):
    """Largest error of attend on n random positions in this dtype, against float64's softmax of the definition on the same numbers."""
    module = make_pos(config_of(name, n))
    span = module.span(n) if getattr(module, 's', None) else 1.0
    module = make_pos(config_of(name, n, pos_eta0=2 / span, pos_eta_max=4 / span)) # a shear of 2 at the far end
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n_head, n, n_embd // n_head).to(getattr(torch, dtype)) for _ in range(3))
    i = torch.arange(n)
    want = module.double().logits(q.double(), k.double(), i, i).masked_fill(i[:, None] < i, -math.inf).softmax(dim=-1) @ v.double()
    module, q, k, v, i = (x.to(device) for x in (module.float(), q, k, v, i))
    with torch.no_grad(), context:
        got = module.attend(module.rotate(q, i), module.rotate(k, i), v, i, i)
    return (got.cpu().double() - want).abs().max().item()

# -----------------------------------------------------------------------------
# memory

def peak_mb():
    """Peak memory of this process so far (MB), where the system tells: Linux."""
    try:
        with open('/proc/self/status') as f:
            return int(re.search(r'VmHWM:\s*(\d+)', f.read())[1]) / 1024
    except (OSError, TypeError):
        return None

def memory(name, T, B, train):
    """MB that a forward pass (median of 3), or a training step, needs beyond the built model. On a CPU: of a fresh process."""
    if device == 'mps':
        return None
    if cuda:
        return memory_here(name, T, B, train)
    def fresh():
        with multiprocessing.get_context('spawn').Pool(1) as pool:
            return pool.apply(memory_here, (name, T, B, train))
    return fresh() if train else median([fresh() for _ in range(3)])       # a small number, and an allocator has its moods

def memory_here(name, T, B, train):
    model = build(name, T)
    run = step_of(model, T, B) if train else forward_of(model, T, B)
    (step_of(model, min(T, 16), 1) if train else forward_of(model, min(T, 16), 1))() # what torch loads at its first use is no part of it
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        idle = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - idle) / 2**20
    try:
        with open('/proc/self/clear_refs', 'w') as f: # peak := present
            f.write('5')
    except OSError:
        return None
    idle = peak_mb()
    run()
    return peak_mb() - idle

def too_large(name, T, B, train):
    """Would the T x T scores of naive attention leave no room?"""
    room = torch.cuda.mem_get_info()[0] if cuda else os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_AVPHYS_PAGES') if hasattr(os, 'sysconf') else 2**32
    return name == 'naive' and B * n_head * T * T * 4 * (4 * n_layer if train else 3) > room / 2

# -----------------------------------------------------------------------------
# training steps

def forward_of(model, T, B):
    x = torch.randint(vocab_size, (B, T), device=device)
    def forward():
        with torch.no_grad(), context:
            model(x, x)
    return forward

def step_of(model, T, B):
    x, y = torch.randint(vocab_size, (2, B, T), device=device)
    optimizer = model.configure_optimizers(0.1, 1e-4, (0.9, 0.95), device.split(':')[0])
    def step():
        with context:
            _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step

def measure(name, T):
    """One row of the table: a dict, times in ms, None where there is no number."""
    B = rows_of(T)
    torch.compiler.reset() # or the graphs of other encodings would count as recompilations of this one
    model = build(name, T, compile)
    row = dict(pos=name, T=T, batch_size=B, params=sum(p.numel() for p in model.parameters()), path=path_of(model))
    row |= dict.fromkeys('compile_s forward_ms step_ms tokens_per_s step_mb ratio ratio_min ratio_max'.split())
    if too_large(name, T, B, train=True):
        return row
    step, forward = step_of(model, T, B), forward_of(model, T, B)
    base = step_of(build('learned', T, compile), T, B)
    first = seconds(step)
    seconds(base)
    times = [(seconds(base), seconds(step)) for _ in range(reps)] # A B A B
    ratios = [b / a for a, b in times] if name != 'learned' else [1.0]
    step_s = median([b for _, b in times])
    seconds(forward)
    row |= dict(forward_ms=1e3 * median([seconds(forward) for _ in range(reps)]), step_ms=1e3 * step_s, tokens_per_s=B * T / step_s,
                ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios), compile_s=first - step_s if compile else None)
    del model, step, forward, base
    row['step_mb'] = memory(name, T, B, train=True)
    return row

def num(x, width, digits=0):
    return f"{'n/a':>{width}}" if x is None else f"{x:{width},.{digits}f}"

def steps_table(names):
    print(f"\na training step; ratio: its time over that of learned, the two in turns, median (min-max) of {reps} pairs")
    print(f"{'T':>5} {'rows':>4} {'encoding':21} {'params':>10} {'path':>8} {'fwd ms':>7} {'step ms':>7} {'tokens/s':>8} {'MB':>6}" + ' compile s' * compile + ' ratio')
    rows = []
    for t in T:
        for name in names:
            r = measure(name, t)
            rows.append(r)
            spread = f" ({r['ratio_min']:.2f}-{r['ratio_max']:.2f})" if r['ratio'] and name != 'learned' else ''
            print(f"{t:5} {r['batch_size']:4} {name:21} {r['params']:10,} {r['path']:>8} {num(r['forward_ms'], 7)} {num(r['step_ms'], 7)} "
                  f"{num(r['tokens_per_s'], 8)} {num(r['step_mb'], 6)}" + (num(r['compile_s'], 10, 1) if compile else '') + f" {num(r['ratio'], 5, 2)}{spread}", flush=True)
    return rows

def memory_table(names):
    print(f"\na forward pass of one row of {memory_T}: memory beyond the idle {'model' if cuda else 'process'}, and its ratio to learned's")
    base, rows = memory('learned', memory_T, 1, train=False), []
    for name in names:
        mb = None if too_large(name, memory_T, 1, train=False) else base if name == 'learned' else memory(name, memory_T, 1, train=False)
        rows.append(dict(pos=name, T=memory_T, mb=mb, ratio=mb / base if mb and base else None))
        print(f"{name:22} {num(mb, 8)} MB {num(rows[-1]['ratio'], 6, 2)}", flush=True)
    return rows

# -----------------------------------------------------------------------------
# generation

def decode_table(names, n=32):
    """The n-th part of generate's extra time for n tokens more, against a full forward pass per token."""
    B = batch_size or 8
    print(f"\ngeneration at context {decode_T}, {B} rows, median of {reps}: ms per token with full forwards, with the cache; same: equal greedy tokens")
    print(f"{'encoding':22} {'path':>8} {'full ms':>8} {'cached ms':>9} {'tokens/s':>9} {'faster':>8} {'same':>8}")
    rows = []
    for name in names:
        if name == 'naive':
            continue # no cache of its own
        model = build(name, decode_T + n).eval()
        x = torch.randint(vocab_size, (B, decode_T), device=device)
        def generate(n):
            with context:
                return model.generate(x, n, temperature=0)
        def full():
            with torch.no_grad(), context:
                return model(x)[0]
        text = generate(n)
        with torch.no_grad(), context: # teacher-forced: one full forward gives what full forwards would have said at every position
            logits = model(text[:, :-1], text[:, -n:])[0]
        same = (logits.argmax(dim=-1) == text[:, -n:]).sum().item()
        times = [(seconds(full), (seconds(lambda: generate(n + 1)) - seconds(lambda: generate(1))) / n) for _ in range(reps)]
        ratio = median([a / b for a, b in times])
        a, b = (median(t) for t in zip(*times))
        rows.append(dict(pos=name, batch_size=B, path=path_of(model), full_ms=1e3 * a, cached_ms=1e3 * b, tokens_per_s=B / b, faster=ratio, same=same, of=n * B))
        print(f"{name:22} {rows[-1]['path']:>8} {1e3 * a:8.1f} {1e3 * b:9.2f} {B / b:9,.0f} {ratio:7.1f}x {same:4}/{n * B}", flush=True)
    return rows

# -----------------------------------------------------------------------------
# where time goes

def loader_share():
    """train.py under cProfile: seconds in get_batch over seconds in its whole loop."""
    import pstats
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, 'profile')
        flags = ['--max_iters=30', '--eval_lens=256', '--eval_rows=8', '--eval_iters=8', '--log_interval=30', f'--out_dir={folder}/run']
        run = subprocess.run([sys.executable, '-m', 'cProfile', '-o', out, os.path.join(ROOT, 'train.py'), 'config/synth_jordan.py', *flags], capture_output=True, text=True)
        if run.returncode:
            fail(f"train.py failed: {run.stderr.strip()[-300:]}")
        in_batches = next(t for (_, _, f), (_, _, _, t, _) in pstats.Stats(out).stats.items() if f == 'get_batch')
        total = json.loads(run.stdout.splitlines()[-1])['train_seconds']
    print(f"\ndata loader: {in_batches:.2f} s of {total:.1f} s of training, {in_batches / total:.1%} (30 iterations of config/synth_jordan.py)")
    return dict(seconds=in_batches, total=total, share=in_batches / total)

def profile_table(names):
    t = T[-1]
    tops = {}
    for name in names:
        if too_large(name, t, rows_of(t), train=True):
            continue
        step = step_of(build(name, t, compile), t, rows_of(t))
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda) as p:
            step()
            wait()
        cost = lambda e: e.self_device_time_total if cuda else e.self_cpu_time_total
        events = sorted(p.key_averages(), key=cost, reverse=True)
        total = sum(map(cost, events))
        tops[name] = {e.key[:60]: round(cost(e) / total, 4) for e in events[:12]}
        print(f"\n{name}, T={t}: {total / 1e3:.0f} ms in operators")
        for key, share in tops[name].items():
            print(f"    {share:6.1%}  {key}")
    return tops

def draw(rows):
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    for ax, key, label in ((axes[0], 'step_ms', 'ms per training step'), (axes[1], 'step_mb', 'MB of a step, beyond the idle model')):
        for name in dict.fromkeys(r['pos'] for r in rows):
            xy = [(r['T'], r[key]) for r in rows if r['pos'] == name and r[key]]
            style = dict(color=COLORS.get(name.removesuffix('+alibi'), '#bbbbbb'), linestyle='--' if name.endswith('+alibi') or name == 'naive' else '-')
            ax.loglog(*zip(*xy), marker='.', label=name, **style) if xy else None
        ax.set_xlabel('context length T (tokens)')
        ax.set_ylabel(label)
        ax.set_xticks(T, map(str, T))
        ax.minorticks_off()
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter('{x:,.0f}')
    axes[1].legend(frameon=False, fontsize=8, loc='upper left', bbox_to_anchor=(1, 1))
    path = os.path.join(out_dir, 'bench.png')
    save_figure(fig, path, bbox_inches='tight')
    print(f"\n{path}")

def cpu_name():
    try:
        with open('/proc/cpuinfo') as f:
            return re.search(r'model name\s*:\s*(.*)', f.read())[1]
    except (OSError, TypeError):
        return platform.processor() or platform.machine()

def main():
    names = [n for n in pos.split(',') if n] or ['learned', *(n for n in POS if n not in ('learned', 'naive')), 'rope+alibi', 'naive']
    try:
        for name in names:
            config_of(name, T[0])
    except ValueError as e:
        usage(e)
    if 'naive+alibi' in names:
        usage('naive+alibi: naive has no bias; leave it out')
    if plot:
        try: # what is missing is said now, not after the tables
            import matplotlib # noqa
            os.makedirs(out_dir, exist_ok=True)
        except OSError as e:
            fail(f"out_dir={out_dir!r} cannot be written ({e.strerror}): give another --out_dir")
        except ImportError:
            usage('plot=True needs matplotlib: pip install matplotlib, or leave out --plot')
    start = time.time()
    card = dict(machine=torch.cuda.get_device_name() if cuda else cpu_name(), device=device, dtype=dtype, compile=compile, threads=torch.get_num_threads(), torch=torch.__version__,
                n_layer=n_layer, n_head=n_head, n_embd=n_embd, mlp_ratio=mlp_ratio, vocab_size=vocab_size)
    for keys in ('machine device dtype compile threads torch', 'n_layer n_head n_embd mlp_ratio vocab_size'):
        print(('bench: ' if 'machine' in keys else '       ') + ' '.join(f"{k}={card[k]}" for k in keys.split()))

    limit = 3e-4 if dtype == 'float32' else 0.05
    errors = {name: check(name) for name in names}
    print(f"\nlargest error of attend against the definition, T = 512, {dtype}, limit {limit:g}:\n" + '\n'.join(f"{n:22} {e:.1e}" for n, e in errors.items()), flush=True)
    out = dict(card=card, errors=errors)
    if decode:
        out['decode'] = decode_table(names)
    elif batch_cost:
        out['loader'] = loader_share()
    elif profile:
        out['profile'] = profile_table(names)
    else:
        if steps:
            out['steps'] = steps_table(names)
            draw(out['steps']) if plot else None
        if memory_T:
            out['memory'] = memory_table(names)
    out['seconds'] = round(time.time() - start, 1)
    print(json.dumps(json.loads(json.dumps(out), parse_float=lambda x: float(f'{float(x):.5g}'))))
    if wrong := [n for n, e in errors.items() if not e <= limit]:
        fail(f"attend of {', '.join(wrong)} is further than {limit:g} from the definition: do not trust the rest")

if __name__ == '__main__':
    main()
