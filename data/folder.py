"""
A data set on the disk: data/<name>/ holds meta.json and one file of tokens for each split, <split>.bin.

    {"kind": "stream", "vocab_size": 256, "dtype": "uint8", "encoding": "bytes", "note": "my text",
     "splits": {"train": {"tokens": 900, "bytes": 900, "sha256": "..."}, "val": {...}, "test": {...}}}
    {"kind": "rows", "vocab_size": 8, "answers": 8, "asked": 1, "dtype": "uint8", "lengths": [128, 256],
     "splits": {"train": {"rows": 24000, "sha256": "..."}, "val": {...}, "test_128": {...}, ...}}

A row of length T is T + 1 tokens, the last `asked` of them are targets, and the first `answers` of the
vocabulary may be an answer. train and val have the first of the lengths. A stream whose tokens are no bytes
has token_bytes.npy beside it: how many bytes each token stands for. Who makes rows or a stream of their own
calls write_folder, or writes these files in any other way; note and sha256 may be left out.
"""

import os
import json
import hashlib

import numpy as np

from common import fail, replace_file
from configurator import ROOT, usage

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
        check_meta(meta)
    except OSError as e:
        fail(f"data/{name}/meta.json cannot be read ({e.strerror})")
    except ValueError as e: # no JSON, or not as it should be
        fail(f"data/{name}/meta.json: {e}; {how}")
    dtype, data = np.dtype(meta['dtype']), {}
    whole = [meta[key] for key in ('kind', 'vocab_size', 'answers', 'asked') if key in meta]
    whole = hashlib.sha256(json.dumps(whole).encode())
    for split, m in meta['splits'].items():
        # its size, before its content
        file, row = os.path.join(folder_of(name), f'{split}.bin'), row_tokens(meta, split)
        expected = m[unit_of(meta)] * row * dtype.itemsize
        size = os.path.getsize(file) if os.path.exists(file) else None
        if size is None:
            fail(f"data/{name}/{split}.bin is missing; {how}")
        if size != expected:
            fail(f"data/{name}/{split}.bin has {size:,} bytes, its meta.json says {expected:,}; {how}")
        # its content
        sha, top = digest(file, dtype)
        if m.get('sha256', sha) != sha:
            fail(f"data/{name}/{split}.bin is another file than its meta.json describes (by its checksum); "
                 f"{how}")
        if top >= meta['vocab_size']:
            fail(f"data/{name}/{split}.bin holds token {top}, outside the vocabulary of "
                 f"{meta['vocab_size']}; {how}")
        whole.update(f'{split}:{sha}'.encode())
        data[split] = (file, dtype, row)
    return meta, data, whole.hexdigest()[:16]

KEYS = 'kind vocab_size dtype encoding note splits answers asked lengths'.split() # of meta.json

def must(holds, words):
    if not holds:
        raise ValueError(words)

def check_meta(meta):
    """A ValueError that says what is missing or wrong, if anything is."""
    def count(of, key, default=None, where=''):
        n = of.get(key, default)
        must(n is not None, f"{where}{key} is missing")
        must(type(n) is int and n >= 1, f"{where}{key} must be a whole number from 1 on, not {n!r}")
        return n

    must(type(meta) is dict, "it must be an object {...}")
    kind, dtype, splits = meta.get('kind'), meta.get('dtype'), meta.get('splits')
    must(type(kind) is str, "kind must be 'stream' or 'rows'")
    try:
        unsigned = np.dtype(dtype).kind == 'u'
    except (TypeError, ValueError):
        unsigned = False
    must(unsigned, f"dtype must be unsigned, as uint8 or uint16 is, not {dtype!r}")
    must(type(meta.get('note', '')) is str, "note must be a text")
    vocab_size = count(meta, 'vocab_size')
    must(vocab_size - 1 <= np.iinfo(dtype).max, f"vocab_size={vocab_size} is too much for dtype={dtype}")
    # the splits and their sizes
    must(type(splits) is dict and {'train', 'val'} <= splits.keys(), "splits must have train and val")
    for split, m in splits.items():
        must(type(m) is dict, f"splits: {split} must be an object {{...}}")
        count(m, unit_of(meta), where=f"splits: {split}: ")
    if kind == 'stream':
        encoding = meta.get('encoding')
        must(type(encoding) is str, "encoding must be 'bytes', where a token is one, or a name, as 'gpt2' is")
        must(encoding != 'bytes' or vocab_size <= 256, f"vocab_size={vocab_size} is too much for bytes")
        count(splits['train'], 'bytes', where="splits: train: ")
    if kind == 'rows':
        lengths = meta.get('lengths')
        must(type(lengths) is list and lengths and all(type(T) is int and T >= 1 for T in lengths),
             f"lengths must be a list of row lengths, that of train first, not {lengths!r}")
        for split in splits:
            known = ['train', 'val', *(f'test_{T}' for T in lengths)]
            must(split in known, f"splits: {split} is none of {', '.join(known)}")
        must(len(splits) > 2, f"splits must have test_{lengths[0]}, or that of another of the lengths")
        answers, asked = count(meta, 'answers', vocab_size), count(meta, 'asked', 1)
        must(answers <= vocab_size, f"answers={answers} is more than vocab_size={vocab_size}")
        must(asked <= min(lengths), f"asked={asked} is more than a row of length {min(lengths)} has")

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

def write_folder(name, splits, meta, token_bytes=None):
    """
    Make data/<name>: {split: iterator over arrays of integers}, in one pass each, and meta.json. The arrays
    of a stream are (n), of rows (n, T + 1). What read_folder would refuse is refused here. meta.json goes
    first and comes back last, so that an interrupted run leaves a folder that is visibly unfinished.
    token_bytes: of a stream whose tokens are no bytes, how many bytes each of the vocabulary stands for.
    """
    from tasks import FOLDERS, TASKS # here, since tasks.py imports this file
    if name in TASKS:
        usage(f"name={name}: dataset={name} is a task whose rows are made in memory; give another name")
    given = meta.get('splits', {})
    try:
        must(meta.get('kind') in FOLDERS, f"kind must be one of {', '.join(FOLDERS)}")
        for key in meta:
            must(key in KEYS, f"{key!r} is no key, which are {', '.join(KEYS)}")
        # the sizes are not known yet
        sizes = {split: dict(rows=1, tokens=1, bytes=1) | given.get(split, {}) for split in splits}
        check_meta(meta | {'splits': sizes})
        if meta['kind'] == 'stream' and meta['encoding'] != 'bytes':
            must(token_bytes is not None and len(token_bytes) == meta['vocab_size'],
                 f"encoding={meta['encoding']!r} needs token_bytes, a number for each of the vocabulary")
        else:
            must(token_bytes is None, "token_bytes is for a stream of another encoding than 'bytes'")
    except ValueError as e:
        usage(f"write_folder({name!r}): {e}")

    folder, sizes = folder_of(name), {}
    try:
        # away with what was there
        os.makedirs(folder, exist_ok=True)
        for file in os.listdir(folder):
            if file in ('meta.json', 'token_bytes.npy') or file.endswith('.bin'):
                os.remove(os.path.join(folder, file))
        # a file for each split
        for split, blocks in splits.items():
            path, row = os.path.join(folder, f'{split}.bin'), row_tokens(meta, split)
            count, size, sha = write_tokens(path, blocks, meta, row, token_bytes)
            sizes[split] = {unit_of(meta): count // row, 'sha256': sha} | given.get(split, {})
            if meta['kind'] == 'stream':
                sizes[split]['bytes'] = size
            print(f"data/{name}/{split + '.bin':14} {count // row:13,} {unit_of(meta)}", flush=True)
        if token_bytes is not None:
            array = np.asarray(token_bytes, np.uint16)
            replace_file(os.path.join(folder, 'token_bytes.npy'), lambda f: np.save(f, array))
        # and what they are
        text = json.dumps(meta | {'splits': sizes}, indent=1)
        replace_file(os.path.join(folder, 'meta.json'), lambda f: f.write(text.encode()))
    except OSError as e: # a full disk, a folder without permission
        fail(f"cannot write data/{name}: {e.strerror or e}; make room there (or give permission), "
             "and run this again")
    except ValueError as e: # tokens that cannot be
        fail(f"data/{name}: {e}")

def write_tokens(path, blocks, meta, row, token_bytes=None):
    """The blocks as one file, rows of `row` tokens: (tokens, bytes that they stand for, sha256)."""
    split, vocab_size = os.path.basename(path), meta['vocab_size']
    count, size, sha = 0, 0, hashlib.sha256()
    def write(f):
        nonlocal count, size
        for block in map(np.asarray, blocks):
            if not block.size:
                continue
            must(block.dtype.kind in 'iu', f"{split}: tokens must be integers, not {block.dtype}")
            must(row == 1 or block.shape[1:] == (row,), f"{split}: a row of length {row - 1} is {row} tokens "
                 f"with its targets: expected arrays (n, {row}), not {block.shape}")
            must(0 <= block.min() <= block.max() < vocab_size,
                 f"{split}: tokens must lie in 0 ... {vocab_size - 1}")
            data = block.astype(meta['dtype']).tobytes()
            f.write(data)
            sha.update(data)
            count += block.size
            size += block.size if token_bytes is None else int(np.take(token_bytes, block).sum())
        must(count, f"{split}: would be empty")
    replace_file(path, write)
    return count, size, sha.hexdigest()
