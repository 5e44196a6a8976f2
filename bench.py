"""
Speed and memory of every encoding, each against GPT-2's learned positions in the same run: ratios hold on a
noisy machine, times do not.

    python bench.py                                  # training steps at T = 256 and 1024, memory at T = 8192
    python bench.py --pos=rope,jordan_scaled --T=4096 --compile=True
    python bench.py --pos=rope+t5,rope+t5/masked     # a general bias by blocks, and as a mask of T x T
    python bench.py --decode=True                    # generation with the KV cache, against full forwards
    python bench.py config/bench_gpu.py              # a GPT-2 sized model on a GPU

Correctness comes first: attend against the definition, in this dtype; exit status 1 if it is off. The last
line is one JSON object. `naive` is attention without positions by T x T scores, the textbook form, for scale;
X/masked is any X with its bias as the mask of torch's attention.
"""

import os
import re
import json
import time
import platform
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from configurator import configure, typed, usage # before torch: it makes Ctrl-C one line

import torch
from torch.nn.functional import scaled_dot_product_attention

from common import COLORS, autocast, choose_device, fail, pyplot, save_figure
from model import BIASES, GPT, GPTConfig, POS, reference_attention
from runs import compile_blocks

# -----------------------------------------------------------------------------
pos = '' # encodings, comma-separated; '' is all of them, the biases on rope, and naive
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
plot = False # time and memory against T, on log axes (needs matplotlib)
out_dir = 'out-bench' # for the picture; relative to the shell's directory
# system
device = '' # '': cuda, else mps, else cpu; or cuda:1 ...
dtype = '' # '': bfloat16 where it is fast, else float32
compile: bool | None = None # None: on CUDA only
# -----------------------------------------------------------------------------
configure(globals(), {
    'x and all(2 <= n <= 10**6 for n in x)': 'T',
    '0 <= x <= 10**6': 'batch_size',
    '1 <= x <= 1000': 'reps',
    '1 <= x <= 10**5': 'n_layer n_head n_embd mlp_ratio',
    '2 <= x <= 10**6': 'vocab_size decode_T',
    'x == 0 or 16 <= x <= 10**6': 'memory_T',
    "x != ''": 'out_dir'})
device, dtype, compile = choose_device(device, dtype, compile)
os.environ['TORCHINDUCTOR_FORCE_DISABLE_CACHES'] = '1' # compile times are cold ones
cuda, context = 'cuda' in device, autocast(device, dtype)

# -----------------------------------------------------------------------------
# what is measured

def naive_attend(self, u, w, v, i, j, cache=None, temperature=1, tile=None):
    """Every score, mask and softmax in full: (B, nh, T, T)."""
    return reference_attention(self, u, w, v, i, j, temperature)

def masked_attend(self, u, w, v, i, j, cache=None, temperature=1, tile=None):
    """torch's attention on q~ and k~, with bias and causal mask as one (nh, T, T) matrix."""
    bias, self.bias, self.splits = self.bias, None, True
    q, k = self.factors(u, w, i, j, (i[0] + i[-1]) // 2)
    self.bias, self.splits = bias, False
    mask = bias(i, j).masked_fill(i[:, None] < j, -torch.inf).to(q.dtype)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.hs ** -0.5)

def config_of(name, T, **kw):
    name = 'nope' if name == 'naive' else name.removesuffix('/masked')
    return GPTConfig(pos=name, block_size=T, n_layer=n_layer, n_head=n_head, n_embd=n_embd,
                     mlp_ratio=mlp_ratio, vocab_size=vocab_size, **kw)

def build(name, T, **kw):
    torch.manual_seed(0)
    model = GPT(config_of(name, T, **kw)).to(device)
    for block in model.transformer.h:
        other = naive_attend if name == 'naive' else masked_attend if name.endswith('/masked') else None
        if other:
            block.attn.pos.attend = other.__get__(block.attn.pos)
    return model

def reach_of(model, name):
    """How far q~ and k~ hold in this dtype, where attention needs no T x T and no blocks."""
    module = model.pos_modules()[0]
    if name == 'naive' or name.endswith('/masked'):
        return 'T x T'
    if not module.splits:
        return 'blocks'
    reach = module.reach(getattr(torch, dtype))
    return 'any' if reach >= 2**40 else f'{reach:,}'

def rows_of(T):
    return batch_size or max(1, 24576 // T)

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

def num(x, width, digits=0):
    return f"{'n/a':>{width}}" if x is None else f'{x:{width},.{digits}f}'

# -----------------------------------------------------------------------------
# correctness

def check(name, n=512):
    """Largest error of attend on n random positions in this dtype, against the definition in float64."""
    module = build(name, n, pos_eta0=2.0).pos_modules()[0] # a shear of order 1
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, n_head, n, n_embd // n_head).to(getattr(torch, dtype))
    i = torch.arange(n)
    with torch.no_grad():
        want = reference_attention(module.cpu().double(), q.double(), k.double(), v.double(), i, i)
        module, q, k, v, i = (x.to(device) for x in (module.float(), q, k, v, i))
        with context:
            got = module.attend(module.rotate(q, i), module.rotate(k, i), v, i, i)
    return (got.cpu().double() - want).abs().max().item()

# -----------------------------------------------------------------------------
# training steps

def start(name, T):
    """(model, its step, seconds of compilation). If that fails, a line says so, and all goes on in eager."""
    global compile
    B, model, took = rows_of(T), build(name, T), 0.0
    if compile:
        said, begin = [], time.perf_counter()
        x = torch.randint(vocab_size, (B, T), device=device)
        compile = compile_blocks(model, x, x, context, said.append)
        took = time.perf_counter() - begin
        if not compile:
            print(said[-1][:110])
            model = build(name, T)
    step = step_of(model, T, B)
    seconds(step)
    return model, step, took

def measure(name, T):
    """One row of the table: a dict, times in ms, None where there is no number."""
    B = rows_of(T)
    row = dict(pos=name, T=T, batch_size=B) | dict.fromkeys(
        'params reach compile_s forward_ms step_ms tokens_per_s step_mb ratio ratio_min ratio_max'.split())
    if too_large(name, T, B, train=True):
        return row
    torch.compiler.reset() # or the graphs of other encodings would count as recompilations of this one
    model, step, took = start(name, T)
    _, base, _ = start('learned', T)
    # A B A B: what slows the machine slows both
    times = [(seconds(base), seconds(step)) for _ in range(reps)]
    ratios = [b / a for a, b in times] if name != 'learned' else [1.0]
    step_s, forward = median([b for _, b in times]), forward_of(model, T, B)
    seconds(forward)
    row |= dict(params=sum(p.numel() for p in model.parameters()), reach=reach_of(model, name),
                compile_s=took if compile else None, step_ms=1e3 * step_s, tokens_per_s=B * T / step_s,
                forward_ms=1e3 * median([seconds(forward) for _ in range(reps)]),
                ratio=median(ratios), ratio_min=min(ratios), ratio_max=max(ratios))
    del model, step, forward, base
    row['step_mb'] = memory(name, T, B, train=True)
    return row

def steps_table(names):
    print("\na training step; ratio: its time over that of learned, the two in turns, "
          f"median (min-max) of {reps} pairs")
    print(f"{'T':>5} {'rows':>4} {'encoding':21} {'params':>9} {'reach':>7} {'fwd ms':>7} {'step ms':>7} "
          f"{'tokens/s':>8} {'MB':>6} {'compile s' if compile else ''} ratio")
    rows = []
    for t in T:
        for name in names:
            r = measure(name, t)
            rows.append(r)
            spread = ''
            if r['ratio'] and name != 'learned':
                spread = f" ({r['ratio_min']:.2f}-{r['ratio_max']:.2f})"
            print(f"{t:5} {r['batch_size']:4} {name:21} {num(r['params'], 9)} {r['reach'] or 'n/a':>7} "
                  f"{num(r['forward_ms'], 7)} {num(r['step_ms'], 7)} {num(r['tokens_per_s'], 8)} "
                  f"{num(r['step_mb'], 6)} {num(r['compile_s'], 9, 1) if compile else ''} "
                  f"{num(r['ratio'], 5, 2)}{spread}", flush=True)
    return rows

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
    """MB that a forward pass (median of 3) or a step needs beyond the model. On a CPU: of a fresh process."""
    if device == 'mps':
        return None
    if cuda:
        return memory_here(name, T, B, train)
    found = []
    for _ in range(1 if train else 3): # a forward pass needs little, and an allocator has its moods
        with ProcessPoolExecutor(1, mp_context=get_context('spawn')) as pool:
            try:
                mb = pool.submit(memory_here, name, T, B, train).result()
            except BrokenProcessPool: # it was killed: no memory was left
                mb = None
        if mb is None:
            return None
        found.append(mb)
    return median(found)

def memory_here(name, T, B, train):
    model, work = build(name, T), step_of if train else forward_of
    work(model, min(T, 16), 1)() # what torch loads at its first use is no part of it
    run = work(model, T, B)
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
    """Would T x T scores leave no room?"""
    if name != 'naive' and not name.endswith('/masked'):
        return False
    room = 2**32
    if cuda:
        room = torch.cuda.mem_get_info()[0]
    elif hasattr(os, 'sysconf'):
        room = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_AVPHYS_PAGES')
    return B * n_head * T * T * 4 * (4 * n_layer if train else 3) > room / 2

def memory_table(names):
    print(f"\na forward pass of one row of {memory_T}: memory beyond the idle "
          f"{'model' if cuda else 'process'}, and its ratio to learned's")
    base, rows = memory('learned', memory_T, 1, train=False), []
    for name in names:
        mb = base
        if name != 'learned':
            mb = None if too_large(name, memory_T, 1, train=False) else memory(name, memory_T, 1, train=False)
        rows.append(dict(pos=name, T=memory_T, mb=mb, ratio=mb / base if mb and base else None))
        print(f"{name:22} {num(mb, 8)} MB {num(rows[-1]['ratio'], 6, 2)}", flush=True)
    return rows

# -----------------------------------------------------------------------------
# generation

def decode_table(names, n=32):
    """The n-th part of generate's extra time for n tokens more, against a full forward pass per token."""
    B, rows = batch_size or 8, []
    print(f"\ngeneration at context {decode_T}, {B} rows, median of {reps}: ms per token with full\n"
          f"forwards, with the cache; same: equal greedy tokens\n{'encoding':22} {'reach':>8} {'full ms':>8} "
          f"{'cached ms':>9} {'tokens/s':>9} {'faster':>8} {'same':>8}")
    for name in names:
        if name == 'naive' or name.endswith('/masked'):
            continue # no cache
        model = build(name, decode_T + n).eval()
        x = torch.randint(vocab_size, (B, decode_T), device=device)
        def generate(n):
            with context:
                return model.generate(x, n, temperature=0)
        def full():
            with torch.no_grad(), context:
                return model(x)[0]
        # one full forward over the text gives what full forwards would have said at every position
        text = generate(n)
        with torch.no_grad(), context:
            logits = model(text[:, :-1], text[:, -n:])[0]
        same = (logits.argmax(dim=-1) == text[:, -n:]).sum().item()
        cached = lambda: (seconds(lambda: generate(n + 1)) - seconds(lambda: generate(1))) / n
        times = [(seconds(full), cached()) for _ in range(reps)]
        faster = median([a / b for a, b in times])
        a, b = (median(t) for t in zip(*times))
        rows.append(dict(pos=name, batch_size=B, reach=reach_of(model, name), full_ms=1e3 * a,
                         cached_ms=1e3 * b, tokens_per_s=B / b, faster=faster, same=same, of=n * B))
        print(f"{name:22} {rows[-1]['reach']:>8} {1e3 * a:8.1f} {1e3 * b:9.2f} {B / b:9,.0f} {faster:7.1f}x "
              f"{same:4}/{n * B}", flush=True)
    return rows

# -----------------------------------------------------------------------------

def draw(rows):
    plt = pyplot()
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout='constrained')
    for ax, key, title in ((axes[0], 'step_ms', 'Time of a training step (ms)'),
                           (axes[1], 'step_mb', 'Memory of a step, beyond the idle model (MB)')):
        for name in dict.fromkeys(r['pos'] for r in rows):
            points = [(r['T'], r[key]) for r in rows if r['pos'] == name and r[key]]
            if points:
                first, _, bias = name.partition('+')
                ax.loglog(*zip(*points), marker='.', label=name, color=COLORS.get(bias or first, '#bbbbbb'),
                          linestyle='--' if bias or name == 'naive' else '-')
        ax.set_title(title, loc='left')
        ax.set_xlabel('context length T (tokens)')
        ax.set_xticks(T, map(str, T))
        ax.minorticks_off()
    fig.legend(*axes[0].get_legend_handles_labels(), loc='outside right upper', frameon=False, fontsize=8)
    path = os.path.join(out_dir, 'bench.png')
    save_figure(fig, path)
    print(f"\nfigure: {path}")

def cpu_name():
    try:
        with open('/proc/cpuinfo') as f:
            return re.search(r'model name\s*:\s*(.*)', f.read())[1]
    except (OSError, TypeError):
        return platform.processor() or platform.machine()

def main():
    names = [n for n in pos.split(',') if n]
    names = names or ['learned', *(n for n in POS if n != 'learned'), *(f'rope+{b}' for b in BIASES), 'naive']
    try:
        for name in names:
            config_of(name, T[0])
    except ValueError as e:
        usage(e)
    for name in names:
        if name.endswith('/masked') and name.removesuffix('/masked').split('+')[-1] not in BIASES:
            usage(f"{name}: /masked takes an encoding with a bias, such as rope+t5/masked")
    if plot:
        pyplot() # what is missing is said now, not after the tables
    unused, where = ['decode_T'], 'without decode=True'
    if decode:
        unused, where = 'T steps memory_T plot out_dir compile'.split(), 'with decode=True'
    elif not steps:
        unused, where = 'T plot out_dir compile decode_T'.split(), 'with steps=False'
    for flag in dict.fromkeys(typed()):
        if flag in unused:
            print(f"note: {flag} has no effect {where}")
    begin = time.perf_counter()
    card = dict(device=device, dtype=dtype, compile=compile, threads=torch.get_num_threads(),
                torch=torch.__version__)
    sizes = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, mlp_ratio=mlp_ratio, vocab_size=vocab_size)
    machine = torch.cuda.get_device_name() if cuda else cpu_name()
    print(f'bench: {machine}')
    for words in (card, sizes):
        print('       ' + ' '.join(f'{k}={v}' for k, v in words.items()))

    limit = 3e-4 if dtype == 'float32' else 0.05
    errors = {name: check(name) for name in names}
    print(f"\nlargest error of attend against the definition, T = 512, {dtype}, limit {limit:g}:")
    for name, error in errors.items():
        print(f'{name:22} {error:.1e}', flush=True)
    out = dict(card=dict(machine=machine) | card | sizes, errors=errors)
    if decode:
        out['decode'] = decode_table(names)
    else:
        if steps:
            out['steps'] = steps_table(names)
        if steps and plot:
            draw(out['steps'])
        if memory_T:
            out['memory'] = memory_table(names)
    out['seconds'] = time.perf_counter() - begin
    print(json.dumps(json.loads(json.dumps(out), parse_float=lambda x: float(f'{float(x):.5g}'))))
    if wrong := [n for n, e in errors.items() if not e <= limit]:
        fail(f"attend of {', '.join(wrong)} is off by more than {limit:g}: do not trust the rest")

if __name__ == '__main__':
    main()
