"""
What several scripts share and model.py should not hold: device choice, data sets, scoring, checkpoint and results files.
"""

import os
import re
import sys
import csv
import json
import base64
import math
import hashlib
import subprocess
from contextlib import nullcontext
from dataclasses import fields, replace

import numpy as np
import torch

from configurator import ROOT, usage
from model import GPT, GPTConfig, make_pos

def fail(message):
    """One line on stderr, exit status 1: something outside the command line is wrong."""
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
    sys.exit(1)

csv.field_size_limit(2**31 - 1) # the scores of many rows are a long cell

# -----------------------------------------------------------------------------
# device

def choose_device(device, dtype, compile):
    """
    Fill in what is '' or None: cuda, else mps, else cpu; bfloat16 where it is fast, else float32; compile on CUDA only.
    Returns (device, dtype, compile); asking for what this machine has not is a usage error.
    """
    mps = torch.backends.mps.is_available()
    device = device or ('cuda' if torch.cuda.is_available() else 'mps' if mps else 'cpu')
    kind = device.split(':')[0]
    if kind not in ('cuda', 'mps', 'cpu') or kind != 'cuda' and device != kind:
        usage(f"device={device!r}: expected cpu, cuda, cuda:N or mps")
    if kind == 'cuda' and not torch.cuda.is_available() or kind == 'mps' and not mps:
        usage(f"device={device!r}: this torch ({torch.__version__}) sees no {kind} device; leave out --device to let it choose")
    if kind == 'cuda' and ':' in device and device not in [f'cuda:{n}' for n in range(torch.cuda.device_count())]:
        usage(f"device={device!r}: this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    bf16 = kind == 'cuda' and torch.cuda.is_bf16_supported()
    dtype = dtype or ('bfloat16' if bf16 else 'float32')
    if dtype not in ('float32', 'bfloat16', 'float16'):
        usage(f"dtype={dtype!r}: expected float32, bfloat16 or float16")
    if dtype == 'float16' and kind != 'cuda':
        usage(f"dtype='float16' on {kind}: it needs CUDA and its gradient scaler; use float32 or bfloat16")
    return device, dtype, (kind == 'cuda' if compile is None else compile)

def autocast(device, dtype, attn_temperature=1):
    """Context of a forward pass in this dtype; float32 means float32, TF32 included only beside half precision, and not where small differences count."""
    torch.set_float32_matmul_precision('highest' if dtype == 'float32' or attn_temperature != 1 else 'high')
    kind = device.split(':')[0]
    return nullcontext() if dtype == 'float32' else torch.autocast(kind, dtype=getattr(torch, dtype))

# -----------------------------------------------------------------------------
# data sets: data/<name>/ holds train.bin, val.bin, meta.json, perhaps test.bin or test_<T>.bin

def data_dir(name):
    return os.path.join(ROOT, 'data', name)

def load_meta(name):
    """meta.json of a data set as a dict, or one line that says how to make it."""
    folder = data_dir(name)
    how = f"run python data/{name}/prepare.py" if os.path.exists(os.path.join(folder, 'prepare.py')) else 'see data/*/prepare.py'
    path = os.path.join(folder, 'meta.json')
    if not os.path.exists(path):
        fail(f"data set {name!r}: no {os.path.join('data', name, 'meta.json')}; {how}")
    try:
        with open(path, encoding='utf-8') as f:
            meta = json.load(f)
        ok = meta['kind'] in ('stream', 'rows') and meta['dtype'] in ('uint8', 'uint16', 'uint32') and type(meta['vocab_size']) is int
        ok = ok and meta['vocab_size'] >= 1 and isinstance(meta.get('checksums', {}), dict)
        if meta['kind'] == 'rows':
            ok = ok and all(type(meta[k]) is int for k in ('L', 'row_len', 'train_rows', 'val_rows', 'test_rows', 'data_seed'))
            ok = ok and all(type(T) is int for T in meta['test_lens']) and meta['kernel'] in KERNELS and 0 < meta['omega'] < math.inf
    except (ValueError, KeyError, TypeError, OSError):
        ok = False
    if not ok:
        fail(f"data set {name!r}: data/{name}/meta.json is damaged; {how} again")
    return meta

def load_tokens(name, split, meta, row_len=None):
    """Tokens of a split as a read-only memory map: flat (N,), or (rows, row_len) for rows. Opened anew at each call: a map kept
    open would count every page it ever touched as this process's memory."""
    path = os.path.join(data_dir(name), f'{split}.bin')
    dtype = np.dtype(meta['dtype'])
    size = os.path.getsize(path) if os.path.exists(path) else -1
    unit = dtype.itemsize * (row_len or 1)
    if size <= 0 or size % unit:
        state = 'is missing' if size < 0 else f'has {size:,} bytes, no whole number of {unit}-byte units' if size else 'is empty'
        fail(f"data/{name}/{split}.bin {state}; run its prepare.py again")
    tokens = np.memmap(path, dtype=dtype, mode='r')
    return tokens.reshape(-1, row_len) if row_len else tokens

def check_tokens(name, split, meta):
    """Once at start: every token of the split lies inside the vocabulary. Returns the number of tokens, or of rows."""
    tokens, top = load_tokens(name, split, meta), 0
    with open(os.path.join(data_dir(name), f'{split}.bin'), 'rb') as f: # in pieces: a map would keep the whole file in memory
        while len(piece := np.fromfile(f, dtype=meta['dtype'], count=2**22)):
            top = max(top, int(piece.max()))
    if top >= meta['vocab_size']:
        fail(f"data/{name}/{split}.bin holds token {top}, outside the vocabulary of {meta['vocab_size']}; run its prepare.py again")
    return len(tokens) // meta.get('row_len', 1)

def lock(name):
    """An open file that no other run has until it is closed: who makes or opens the data set is alone with it."""
    try:
        f = open(os.path.join(data_dir(name), '.lock'), 'w')
    except OSError: # a folder that cannot be written is a folder that nobody changes
        return open(os.devnull)
    hold(f)
    return f

def hold(f):
    """Wait until no other process holds this open file; closing it lets go."""
    try:
        import fcntl
        fcntl.flock(f, fcntl.LOCK_EX)
    except ImportError: # Windows
        pass

def make_synth(L, lengths, train_rows, val_rows, test_rows):
    """
    Run data/synth/prepare.py unless what lies there will do: this L, these test lengths, at least so many rows. Rows are made in
    steps of 24,000, so that small runs share a data set, and no more than 240,000: a longer run sees them again in another order.
    """
    train_rows = min(math.ceil(train_rows / 24000), 10) * 24000
    val_rows, test_rows = max(val_rows, 1024), max(test_rows, 1024)
    path = os.path.join(data_dir('synth'), 'meta.json')
    old = load_meta('synth') if os.path.exists(path) else {}
    files = ['train', 'val', *(f'test_{T}' for T in lengths)]
    if (old.get('L') == L and set(lengths) <= set(old['test_lens']) and old['train_rows'] >= train_rows and old['val_rows'] >= val_rows
            and old['test_rows'] >= test_rows and all(os.path.exists(os.path.join(data_dir('synth'), f'{f}.bin')) for f in files)):
        return
    if old.get('L') == L: # keep what others use
        lengths = sorted({*lengths, *old['test_lens']})
        train_rows, val_rows, test_rows = (max(n, old[k]) for n, k in ((train_rows, 'train_rows'), (val_rows, 'val_rows'), (test_rows, 'test_rows')))
    args = dict(L=L, test_lens=','.join(map(str, lengths)), train_rows=train_rows, val_rows=val_rows, test_rows=test_rows)
    args |= {k: old[k] for k in ('kernel', 'omega', 'data_seed') if k in old} # a teacher chosen before stays
    print('making data/synth' + (' again: it was made for other sizes' if old else ''), flush=True)
    if subprocess.run([sys.executable, os.path.join(data_dir('synth'), 'prepare.py')] + [f'--{k}={v}' for k, v in args.items()]).returncode:
        fail('data/synth/prepare.py did not finish')

def write_stream(name, splits, meta):
    """
    Make data/<name> from {split: iterator over blocks of tokens as bytes}: <split>.bin in one pass each, and meta.json, which goes
    first and comes back last, so that an interrupted run leaves a data set that is visibly unfinished. Splits of before are removed.
    """
    folder, dtype = data_dir(name), np.dtype(meta['dtype'])
    tokens, sums = {}, {}
    try:
        os.makedirs(folder, exist_ok=True)
        for f in ('meta.json', 'train.bin', 'val.bin', 'test.bin'):
            if os.path.exists(os.path.join(folder, f)):
                os.remove(os.path.join(folder, f))
        for split, blocks in splits.items():
            sha, size = hashlib.sha256(), 0
            def write(f):
                nonlocal size
                for block in blocks:
                    f.write(block)
                    sha.update(block)
                    size += len(block)
            replace_file(os.path.join(folder, f'{split}.bin'), write)
            tokens[split], sums[split] = size // dtype.itemsize, sha.hexdigest()[:16]
            print(f"data/{name}/{split + '.bin':9} {tokens[split]:13,} tokens, {meta['bytes'][split]:13,} bytes of text", flush=True)
        meta = meta | dict(tokens=tokens, tokens_per_byte={s: n / meta['bytes'][s] for s, n in tokens.items()}, checksums=sums)
        replace_file(os.path.join(folder, 'meta.json'), lambda f: f.write(json.dumps(meta, indent=1).encode()))
    except OSError as e: # a full disk, a folder without permission
        fail(f"cannot write data/{name}: {e.strerror or e}; make room there (or give permission) and run this again")

def gpt2_bpe():
    """tiktoken's GPT-2 encoding; its vocabulary is fetched from the network once and then kept."""
    import tiktoken
    try:
        return tiktoken.get_encoding('gpt2')
    except Exception as e: # of requests, or of a damaged cache
        fail(f"tiktoken could not fetch its GPT-2 vocabulary ({type(e).__name__}): run this once with a network, or point "
             f"TIKTOKEN_CACHE_DIR to a copy of another machine's; bytes need none")

# -----------------------------------------------------------------------------
# the synthetic teacher: answer = 1 iff sum_d K(d) (2 bit_d - 1) > 0, d = 1 .. T-1; x = d/L, w = omega, w2 two steps down the grid

def grid_step(omega):
    """omega of the frequency index two further on, for the default omega = theta^(-2*3/32): index 5."""
    return omega ** (5 / 3)

KERNELS = {
    'mixed':       lambda d, L, w: d / L * np.cos(w * d),
    'phase':       lambda d, L, w: np.cos(w * d),
    'linear':      lambda d, L, w: -d / L,
    'damped_wave': lambda d, L, w: np.exp(-1e-4 * d) * (np.cos(w * d) + .75 * d / L * np.sin(w * d)),
    'phase_drift': lambda d, L, w: np.cos(w * (1 + 5e-5) * d),
    'seasonal':    lambda d, L, w: (.35 + .9 * d / L) * np.cos(w * d) + .25 * np.sin(w * d),
    'rhythm':      lambda d, L, w: (.25 + .85 * d / L) * (.65 * np.cos(w * d) + .35 * np.sin(grid_step(w) * d)),
    'motif':       lambda d, L, w: d / L / (1 + .25 * d / L) * (.7 * np.cos(grid_step(w) * d) - .3 * np.sin(grid_step(w) * d)),
    'decay':       lambda d, L, w: np.exp(-d / L) * np.cos(w * d),
    'jet_2':       lambda d, L, w: (d / L) ** 2 * np.cos(w * d),
    'jet_3':       lambda d, L, w: (d / L) ** 3 * np.cos(w * d),
    'high_jet_1':  lambda d, L, w: d / L * np.exp(-.1 * d / L) * np.cos(w * d),
    'high_jet_2':  lambda d, L, w: (d / L) ** 2 * np.exp(-.1 * d / L) * np.cos(w * d),
    'high_jet_3':  lambda d, L, w: (d / L) ** 3 * np.exp(-.1 * d / L) * np.cos(w * d),
}

def accuracy_of_kernel(kernel, teacher):
    """1 - arccos(rho)/pi: accuracy of a linear readout with this kernel, rho its cosine with the teacher's, both by lag."""
    rho = abs(kernel @ teacher) / max(np.linalg.norm(kernel) * np.linalg.norm(teacher), 1e-300)
    return 1 - math.acos(min(rho, 1.0)) / math.pi

def reference_accuracies(config, meta, lengths):
    """
    {T: accuracy} of a linear readout with the best single kernel of this encoding at the teacher's frequency, as the last query of
    T positions sees it; best at the training length. A reference line, no bound: a trained model mixes kernels. {} for `learned`.
    """
    hs, omega, L = 4 * config.pos_order, meta['omega'], meta['L']
    if config.pos == 'learned' or not 0 < omega < 1:
        return {}
    name = config.pos if config.pos == 'alibi' else config.pos.partition('+')[0]
    pos = make_pos(replace(config, pos=name, n_head=1, n_embd=hs, block_size=L, pos_theta=omega ** (-hs / 2), pos_grid='fast',
                           pos_eta0=config.pos_eta_max / 2)).double() # two blocks; the second turns by omega per token
    units = torch.eye(hs, dtype=torch.float64)
    def kernels(T): # (hs * hs, T - 1) by lag 1 .. T-1: every pair of unit vectors as query and key
        q, k = units.repeat_interleave(hs, 0)[:, None, None], units.repeat(hs, 1)[:, None, None]
        with torch.no_grad():
            g = pos.logits(q, k.expand(-1, -1, T, -1), torch.tensor([T - 1]), torch.arange(T))
        return g[:, 0, 0, :-1].flip(-1).numpy()
    teacher = lambda T: KERNELS[meta['kernel']](np.arange(1, T), L, omega)
    best = max(range(hs * hs), key=lambda n, g=kernels(L), t=teacher(L): accuracy_of_kernel(g[n], t))
    return {T: accuracy_of_kernel(kernels(T)[best], teacher(T)) for T in lengths}

# -----------------------------------------------------------------------------
# scoring. Rows and windows are fixed: they do not depend on the seed, the encoding or the batch size

TOKENS_PER_FORWARD = 16384 # bounds the memory of an evaluation

@torch.no_grad()
def score_rows(model, rows, device, context):
    """rows (N, T+1) whose last token is the answer -> (loss in nats (N,), was the likelier of the two bits right (N,))."""
    losses, right = [], []
    n = max(1, TOKENS_PER_FORWARD // rows.shape[1])
    for a in range(0, len(rows), n):
        x = torch.from_numpy(rows[a:a + n].astype(np.int64)).to(device)
        with context:
            logits = model(x[:, :-1])[0][:, -1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, x[:, -1], reduction='none'))
        right.append(logits[:, :2].argmax(dim=-1) == x[:, -1])
    return torch.cat(losses).cpu().numpy(), torch.cat(right).cpu().numpy()

@torch.no_grad()
def score_windows(model, tokens, ends, T, K, device, context):
    """Loss in nats of the last K targets of the T-token contexts that end before each of `ends`: (windows, K)."""
    losses = []
    n = max(1, min(TOKENS_PER_FORWARD // T, TOKENS_PER_FORWARD * 4096 // (K * model.config.vocab_size))) # and of its logits
    for a in range(0, len(ends), n):
        x = torch.from_numpy(np.stack([tokens[e - T - 1:e] for e in ends[a:a + n]]).astype(np.int64)).to(device)
        with context:
            logits, _ = model(x[:, :-1], x[:, -K:])
        loss = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), x[:, -K:], reduction='none')
        losses.append(loss.cpu())
    return torch.cat(losses).numpy()

def wilson(k, n, z=1.959964):
    """95% Wilson interval of k right out of n: (lo, hi)."""
    p, c = k / n, z * z / n
    half = z * math.sqrt(p * (1 - p) / n + c / (4 * n))
    return (p + c / 2 - half) / (1 + c), (p + c / 2 + half) / (1 + c)

def bootstrap(values, n=2000, seed=0):
    """95% percentile interval of the mean over windows: (lo, hi)."""
    values = np.asarray(values)
    means = values[np.random.default_rng(seed).integers(0, len(values), (n, len(values)))].mean(axis=1)
    return tuple(np.quantile(means, [.025, .975]))

def pack(scores):
    """An array of booleans or floats as a short string for a csv cell; unpack reads it."""
    scores = np.asarray(scores)
    if scores.dtype == bool:
        return f'bool:{len(scores)}:' + base64.b64encode(np.packbits(scores)).decode()
    return f'float32:{len(scores)}:' + base64.b64encode(scores.astype('<f4')).decode()

def unpack(text):
    kind, n, data = text.split(':')
    data = base64.b64decode(data)
    return np.unpackbits(np.frombuffer(data, np.uint8))[:int(n)].astype(bool) if kind == 'bool' else np.frombuffer(data, '<f4')

# -----------------------------------------------------------------------------
# checkpoints: tensors and plain Python types only, so torch.load(weights_only=True) reads them

def replace_file(path, write):
    """Write a file so that a kill or a full disk at any instant leaves the old one intact: temporary name, flush, rename."""
    tmp = f"{path}.{os.getpid()}.tmp"
    try:
        with open(tmp, 'wb') as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    finally:
        if os.path.exists(tmp):
            os.remove(tmp)

def save_checkpoint(path, checkpoint):
    try:
        replace_file(path, lambda f: torch.save(checkpoint, f))
    except OSError as e:
        fail(f"{path}: cannot be written ({e.strerror}); what was there before is intact")
    except RuntimeError as e: # how torch reports a write that failed
        fail(f"{path}: cannot be written ({str(e).splitlines()[0]}); what was there before is intact")

def load_checkpoint(path):
    """The dict that train.py saved, on the CPU; one line if the file is missing, damaged or of another kind."""
    if not os.path.exists(path):
        fail(f"{path}: no checkpoint there; train.py writes one to its out_dir at every evaluation")
    try:
        checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except Exception as e: # zip, pickle and key errors of many kinds: all mean the same to the user
        fail(f"{path}: damaged or no checkpoint ({type(e).__name__}); delete it, or use another one")
    parts = ('model', 'model_args', 'config')
    if not isinstance(checkpoint, dict) or not all(isinstance(checkpoint.get(p), dict) and all(type(k) is str for k in checkpoint[p]) for p in parts):
        fail(f"{path}: not a checkpoint of this project's train.py")
    prefixes = ('_orig_mod.', 'module.') # what torch.compile and DDP put before names
    state = checkpoint['model']
    while any(k.startswith(prefixes) for k in state):
        state = {next((k[len(p):] for p in prefixes if k.startswith(p)), k): v for k, v in state.items()}
    checkpoint['model'] = state
    return checkpoint

def model_of(checkpoint, path):
    """The model of a loaded checkpoint. A GPTConfig field that the file lacks has its default."""
    known = {f.name for f in fields(GPTConfig)}
    unknown = checkpoint['model_args'].keys() - known
    if unknown:
        fail(f"{path}: has model settings that this model.py does not know: {', '.join(sorted(unknown))}")
    try:
        model = GPT(GPTConfig(**checkpoint['model_args']))
        model.load_state_dict(checkpoint['model'])
    except (RuntimeError, ValueError, TypeError) as e:
        fail(f"{path}: its settings or weights do not fit this model.py ({' '.join(str(e).split())[:200]})")
    if not all(p.isfinite().all() for p in model.parameters()):
        fail(f"{path}: its weights are not finite; use another checkpoint")
    return model

# -----------------------------------------------------------------------------
# results: one row per run

def config_hash(config, ignore):
    """12 hex digits over the settings that can change a result, the same at every commit and for every seed."""
    kept = {k: v for k, v in sorted(config.items()) if k not in ignore}
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:12]

def git_commit():
    """Short hash of the commit that ran, with + where the tree was changed; '' outside git."""
    run = lambda *args: subprocess.run(['git', *args], cwd=ROOT, capture_output=True, text=True)
    try:
        head, dirty = run('rev-parse', '--short', 'HEAD'), run('status', '--porcelain', '-uno')
    except OSError:
        return ''
    return head.stdout.strip() + '+' * bool(dirty.stdout.strip()) if head.returncode == 0 else ''

def read_rows(path):
    """The complete rows of a results csv as dicts, [] if there is no file. A row that a crash cut short is left out, and said."""
    if not os.path.exists(path):
        return []
    try:
        with open(path, newline='', encoding='utf-8') as f:
            rows = list(csv.DictReader(f))
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        fail(f"{path}: cannot be read as a csv of results ({type(e).__name__}: {e}); move it away or name another file")
    whole = [r for r in rows if None not in r and None not in r.values() and is_json(r.get('metrics', '')) and is_json(r.get('scores', ''))]
    if len(whole) < len(rows):
        print(f"note: {path}: {len(rows) - len(whole)} rows are damaged and left out", file=sys.stderr)
    return whole

def is_json(text):
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False

def find_row(path, **cells):
    """The last row of the csv with these values, or None."""
    return next((r for r in reversed(read_rows(path)) if all(r.get(k) == str(v) for k, v in cells.items())), None)

def append_row(path, row):
    """Append a dict to a csv file, with its header if the file is new. Safe for runs that end at the same time."""
    try:
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
        with open(path, 'a+', newline='', encoding='utf-8') as f:
            hold(f)
            f.seek(0)
            text = f.read()
            header = next(csv.reader(text.splitlines()), None)
            if header not in (None, list(row)):
                fail(f"{path}: its columns are not this version's, so the row above was not appended; move it away or give another --results")
            if text and not text.endswith('\n'): # a crash cut the last row short; inside a quoted cell or not
                f.write('"\r\n' if text.count('"') % 2 else '\r\n')
            writer = csv.DictWriter(f, fieldnames=list(row))
            if header is None:
                writer.writeheader()
            writer.writerow(row)
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        fail(f"{path}: cannot be written ({type(e).__name__}: {e}); give another --results")

def row_label(rows):
    """
    For each csv row the name of its encoding, with its damping and order and those other pos_ settings in which rows of that encoding differ,
    unless at the default, and of its run: those other settings in which the rows differ at all, '' if in none. Rows of one run name can be
    compared with each other; what differs in a setting that the csv does not hold is told apart by its config hash.
    """
    rows = [r | {'params': int(r['params']) - int(r['pos_params'] or 0)} if r.get('params', '').isdigit() and r.get('pos_params', '').isdigit() else r for r in rows]
    of_run = [k for k in rows[0] if k in ('dataset', 'note', 'n_layer', 'attn_temperature', 'block_size', 'iters', 'weight_decay', 'data_checksum') and len({r[k] for r in rows}) > 1]
    if len({(*(r[k] for k in of_run), r.get('params')) for r in rows}) > len({tuple(r[k] for k in of_run) for r in rows}):
        of_run.append('params') # a width or a number of heads, which have no column
    labels, hashes, default = [], {}, {f.name: str(f.default) for f in fields(GPTConfig)} | {'pos_lr_mult': '20.0'}
    number = lambda text: f'{float(text):g}' if not str(text).isdigit() and re.fullmatch(r'-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?', str(text)) else text
    for r in rows:
        base, others = r['pos'].partition('+')[0], [o for o in rows if o['pos'] == r['pos']]
        rates = {o.get('learning_rate') for o in others if all(o[k] == r[k] for k in of_run)} # one in a run: it was tuned, and is no variant
        always = [] if base in ('nope', 'learned', 'alibi', 'rope') else ['pos_order'] if base == 'rope_hi' else ['pos_order', 'pos_gamma0', 'pos_c']
        differ = [k for k in r if (k in always or k.startswith('pos_') and k != 'pos_params' and len({o[k] for o in others}) > 1 or k == 'learning_rate' and len(rates) > 1)
                  and r[k] not in ('', 'None', default.get(k))]
        name = lambda keys: ' '.join(f"{k.removeprefix('pos_')}={number(r[k])}" if k != 'data_checksum' else f'data={r[k][:4]}' for k in keys)
        labels.append((f"{r['pos']} {name(differ)}".strip(), name(of_run)))
        hashes.setdefault(labels[-1], set()).add(r.get('config_hash'))
    return [(e, f"{run} config={r.get('config_hash', '')[:4]}".strip()) if len(hashes[e, run]) > 1 else (e, run) for r, (e, run) in zip(rows, labels)]

def save_figure(fig, path, **kw):
    try:
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
        fig.savefig(path, dpi=120, **kw)
    except OSError as e:
        fail(f"{path} cannot be written ({e.strerror}): give another folder")

# one colour per encoding in every figure of the project
COLORS = {
    'nope': '#999999', 'learned': '#666666', 'alibi': '#b8860b', 'rope': '#000000', 'rope_hi': '#56b4e9', 'rope+alibi': '#e69f00', 'damped': '#0072b2',
    'real_jordan': '#8c564b', 'direct_sum': '#cc79a7', 'jordan_exact': '#7b3294', 'jordan_scaled': '#009e73',
    'jordan_stabilized': '#d62728', 'jordan_stabilized_abs': '#ff9896',
}
