"""
A data set on the disk: data/<name>/ holds meta.json and one file of tokens for each split, <split>.bin.

    {"kind": "stream", "vocab_size": 256, "dtype": "uint8", "encoding": "bytes", "note": "...",
     "splits": {"train": {"tokens": 900, "bytes": 900, "sha256": "..."}, "val": {...}, "test": {...}}}
    {"kind": "rows", "vocab_size": 8, "answers": 8, "asked": 1, "dtype": "uint8", "lengths": [128, 256],
     "splits": {"train": {"rows": 24000, "sha256": "..."}, "val": {...}, "test_128": {...}, ...}}

A row of length T is T + 1 tokens; train and val have the first of the lengths. Who makes rows or a stream
of their own calls write_folder, or writes these files in any other way; the sha256 may be left out.
"""

import os
import json
import hashlib

import numpy as np

from common import fail, replace_file
from configurator import ROOT

def folder_of(name):
    return os.path.join(ROOT, 'data', name)

def read_folder(name, known=()):
    """
    data/<name> as (meta, {split: (file, dtype, tokens per row)}, checksum). Every split must be what
    meta.json says: its size, its checksum, its vocabulary. The checksum returned is over all splits: the
    identity of the data.
    """
    made = os.path.exists(os.path.join(folder_of(name), 'prepare.py'))
    how = f"run python data/{name}/prepare.py" if made else "make it as data/folder.py says"
    path = os.path.join(folder_of(name), 'meta.json')
    if not os.path.exists(path):
        fail(f"dataset {name!r}: no data/{name}/meta.json; {how}, or take one of {', '.join(known)}")
    try:
        with open(path, encoding='utf-8') as f:
            meta = json.load(f)
        dtype, splits = np.dtype(meta['dtype']), meta['splits']
        row = {split: row_tokens(meta, split) for split in splits}
        numbers = [meta['vocab_size'], *(m[unit_of(meta)] for m in splits.values())]
        sound = dtype.kind == 'u' and {'train', 'val'} <= splits.keys()
        sound = sound and all(type(n) is int and n >= 1 for n in numbers)
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    except OSError as e:
        fail(f"data/{name}/meta.json cannot be read ({e.strerror})")
    if not sound:
        fail(f"dataset {name!r}: data/{name}/meta.json is damaged or of another version; {how} again")
    data, whole = {}, hashlib.sha256(json.dumps([meta['kind'], meta['vocab_size']]).encode())
    for split, m in splits.items():
        file = os.path.join(folder_of(name), f'{split}.bin')
        expected = m[unit_of(meta)] * row[split] * dtype.itemsize
        size = os.path.getsize(file) if os.path.exists(file) else None
        if size != expected:
            found = 'is missing' if size is None else f"has {size:,} bytes, its meta.json says {expected:,}"
            fail(f"data/{name}/{split}.bin {found}; {how} again")
        sha, top = digest(file, dtype)
        if m.get('sha256', sha) != sha:
            fail(f"data/{name}/{split}.bin is another file than its meta.json describes "
                 f"(by its checksum); {how} again")
        if top >= meta['vocab_size']:
            fail(f"data/{name}/{split}.bin holds token {top}, outside the vocabulary of "
                 f"{meta['vocab_size']}; {how} again")
        whole.update(f'{split}:{sha}'.encode())
        data[split] = (file, dtype, row[split])
    return meta, data, whole.hexdigest()[:16]

def unit_of(meta):
    return 'rows' if meta['kind'] == 'rows' else 'tokens'

def row_tokens(meta, split):
    """How many tokens a unit of this split has: 1 in a stream, T + 1 in rows."""
    if meta['kind'] != 'rows':
        return 1
    return 1 + (int(split[5:]) if split.startswith('test_') else meta['lengths'][0])

def digest(file, dtype):
    """sha256 of a file and its largest token, in pieces: a map would keep all of it in memory."""
    sha, top = hashlib.sha256(), 0
    try:
        with open(file, 'rb') as f:
            while block := f.read(2**22):
                sha.update(block)
                top = max(top, int(np.frombuffer(block, dtype).max()))
    except OSError as e:
        fail(f"{file} cannot be read ({e.strerror})")
    return sha.hexdigest(), top

def write_folder(name, splits, meta):
    """
    Make data/<name>: {split: iterator over arrays of tokens}, in one pass each, and meta.json. That goes
    first and comes back last, so that an interrupted run leaves a folder that is visibly unfinished.
    """
    folder, dtype, sizes = folder_of(name), np.dtype(meta['dtype']), {}
    try:
        os.makedirs(folder, exist_ok=True)
        for file in os.listdir(folder):
            if file == 'meta.json' or file.endswith('.bin'):
                os.remove(os.path.join(folder, file))
        for split, blocks in splits.items():
            sha, count = hashlib.sha256(), 0
            def write(f):
                nonlocal count
                for block in blocks:
                    block = np.asarray(block, dtype)
                    f.write(block.tobytes())
                    sha.update(block.tobytes())
                    count += block.size
            replace_file(os.path.join(folder, f'{split}.bin'), write)
            n, unit = count // row_tokens(meta, split), unit_of(meta)
            sizes[split] = {unit: n, 'sha256': sha.hexdigest()} | meta.get('splits', {}).get(split, {})
            print(f"data/{name}/{split + '.bin':14} {n:13,} {unit}", flush=True)
        text = json.dumps(meta | {'splits': sizes}, indent=1)
        replace_file(os.path.join(folder, 'meta.json'), lambda f: f.write(text.encode()))
    except OSError as e: # a full disk, a folder without permission
        fail(f"cannot write data/{name}: {e.strerror or e}; make room there (or give permission), "
             "and run this again")
