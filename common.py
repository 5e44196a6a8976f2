"""
What several scripts need and no story should stop for: one-line failures, device, processes, files, figures.
"""

import os
from contextlib import nullcontext

import numpy as np
import torch

from configurator import usage

def fail(message):
    """One line on stderr, exit status 1: something outside the command line is wrong."""
    usage(message, status=1)

# -----------------------------------------------------------------------------
# device and processes

def choose_device(device, dtype, compile):
    """
    Fill in what is '' or None: cuda, else mps, else cpu; bfloat16 where it is fast, else float32; compile
    on CUDA only. Returns (device, dtype, compile); asking for what this machine has not is a usage error.
    """
    mps = torch.backends.mps.is_available()
    device = device or ('cuda' if torch.cuda.is_available() else 'mps' if mps else 'cpu')
    kind = device.split(':')[0]
    if kind not in ('cuda', 'mps', 'cpu') or kind != 'cuda' and device != kind:
        usage(f"device={device!r}: expected cpu, cuda, cuda:N or mps")
    if kind == 'cuda' and not torch.cuda.is_available() or kind == 'mps' and not mps:
        usage(f"device={device!r}: this torch ({torch.__version__}) sees no {kind} device; "
              "leave out --device to let it choose")
    if ':' in device and device not in [f'cuda:{n}' for n in range(torch.cuda.device_count())]:
        usage(f"device={device!r}: this machine has cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    bf16 = kind == 'cuda' and torch.cuda.is_bf16_supported()
    dtype = dtype or ('bfloat16' if bf16 else 'float32')
    if dtype not in ('float32', 'bfloat16', 'float16'):
        usage(f"dtype={dtype!r}: expected float32, bfloat16 or float16")
    if dtype == 'float16' and kind != 'cuda':
        usage(f"dtype='float16' on {kind}: it needs CUDA and its gradient scaler; use float32 or bfloat16")
    return device, dtype, (kind == 'cuda' if compile is None else compile)

def autocast(device, dtype, attn_temperature=1):
    """Context of a forward pass in this dtype. float32 means float32: TF32 comes with half precision only."""
    exact = dtype == 'float32' or attn_temperature != 1
    torch.set_float32_matmul_precision('highest' if exact else 'high')
    if dtype == 'float32':
        return nullcontext()
    return torch.autocast(device.split(':')[0], dtype=getattr(torch, dtype))

def join_processes(device, backend, micro_batches):
    """(rank, world, device) of this process. torchrun sets RANK and its like; without them there is one."""
    if 'RANK' not in os.environ:
        return 0, 1, device
    numbers = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_PORT')
    lacking = [k for k in numbers if not os.environ.get(k, '').isdigit()]
    if lacking or 'MASTER_ADDR' not in os.environ:
        usage(f"RANK is set, {', '.join(lacking) or 'MASTER_ADDR'} not or to no number: start with torchrun, "
              "or unset RANK for one process")
    rank, world, port = (int(os.environ[k]) for k in ('RANK', 'WORLD_SIZE', 'MASTER_PORT'))
    if rank >= world or port > 65535:
        usage(f"RANK={rank} of WORLD_SIZE={world} at MASTER_PORT={port}: expected a rank below the number of "
              "processes and a port below 65536; torchrun sets them")
    if micro_batches % world:
        usage(f"gradient_accumulation_steps={micro_batches}: expected a multiple of {world}, the number of "
              "processes")
    if backend == 'nccl' and 'cuda' not in device:
        usage(f"backend='nccl' needs CUDA, and this is device={device}: use gloo")
    if device == 'cuda':
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        if int(os.environ['LOCAL_RANK']) >= torch.cuda.device_count():
            usage(f"a process for {device}, but this machine has {torch.cuda.device_count()} of them: "
                  "start fewer with --nproc_per_node")
        torch.cuda.set_device(device)
    try:
        torch.distributed.init_process_group(backend or ('nccl' if 'cuda' in device else 'gloo'))
    except torch.distributed.DistError as e: # a port that is taken, a host that does not answer
        usage(f"the processes cannot meet at {os.environ['MASTER_ADDR']}:{port} "
              f"({str(e).splitlines()[0][:120]}): try another --master_port")
    return rank, world, device

def same_everywhere(what, value, world):
    """All processes must have this value, or their machines would train on different things."""
    if world == 1:
        return
    values = [None] * world
    torch.distributed.all_gather_object(values, value)
    if len(set(values)) > 1:
        fail(f"the processes differ in {what} ({', '.join(map(str, values))}): give all machines the same")

def largest(number, world, device):
    """The largest of a whole number over all processes: what one of them was told, all of them know."""
    if world > 1:
        number = torch.tensor(number, device=device)
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
        number = number.item()
    return number

def seed_dropout(seed, iter_num, micro):
    """
    Dropout depends on the seed, the iteration and the micro-batch alone: a run that is resumed, or one on
    more processes, drops the same units.
    """
    sequence = np.random.SeedSequence([seed, 0, iter_num, micro]) # 0: no stream of tasks.py
    torch.manual_seed(int(sequence.generate_state(1)[0]))

# -----------------------------------------------------------------------------
# files and figures

def replace_file(path, write):
    """Write a file so that a kill or a full disk at any instant leaves the old one intact."""
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

def pyplot():
    """matplotlib.pyplot, drawing into files whatever backend a notebook has named in the environment."""
    os.environ['MPLBACKEND'] = 'Agg'
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        usage("a figure needs matplotlib: pip install matplotlib, or leave out --plot")
    return plt

def save_figure(fig, path, **kw):
    try:
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
        fig.savefig(path, dpi=120, **kw)
    except OSError as e:
        fail(f"{path} cannot be written ({e.strerror}): give another folder")

# one colour per encoding in every figure of the project
COLORS = {
    'nope': '#999999', 'learned': '#666666', 'rope': '#000000', 'rope_hi': '#56b4e9', 'rope+alibi': '#e69f00',
    'alibi': '#b8860b', 't5': '#a6761d', 'kerple': '#66a61e', 'fire': '#e7298a',
    'damped': '#0072b2', 'real_jordan': '#8c564b', 'direct_sum': '#cc79a7', 'jordan_exact': '#7b3294',
    'jordan_scaled': '#009e73', 'jordan_stabilized': '#d62728', 'jordan_stabilized_abs': '#ff9896',
}

def kind_of(label):
    """'damped c=0.1' -> 'damped': the encoding of a label."""
    return (label.split() or [''])[0]
