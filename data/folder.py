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

def check_meta(meta):
    """A ValueError that says what is missing or wrong, if anything is."""
    def must(holds, words):
        if not holds:
            raise ValueError(words)
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
    # the splits and their sizes
    must(type(splits) is dict and {'train', 'val'} <= splits.keys(), "splits must have train and val")
    for split, m in splits.items():
        must(type(m) is dict, f"splits: {split} must be an object {{...}}")
        count(m, unit_of(meta), where=f"splits: {split}: ")
    if kind == 'stream':
        must(type(meta.get('encoding')) is str, "encoding must be 'bytes', where a token is one, or 'gpt2'")
        count(splits['train'], 'bytes', where="splits: train: ")
    if kind == 'rows':
        lengths = meta.get('lengths')
        must(type(lengths) is list and lengths and all(type(T) is int and T >= 1 for T in lengths),
             f"lengths must be a list of row lengths, that of train first, not {lengths!r}")
        for split in splits:
            known = ['train', 'val', *(f'test_{T}' for T in lengths)]
            must(split in known, f"splits: {split} is none of {', '.join(known)}")
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
    Make data/<name>: {split: iterator over arrays of tokens}, in one pass each, and meta.json. That goes
    first and comes back last, so that an interrupted run leaves a folder that is visibly unfinished.
    token_bytes: for tokens that are no bytes, how many bytes of text each of the vocabulary stands for.
    """
    from tasks import TASKS # here, since tasks.py imports this file
    if name in TASKS:
        usage(f"name={name}: dataset={name} is a task whose rows are made in memory; give another name")
    # what read_folder would refuse, before anything is written; the sizes are not known yet
    of_bytes = meta.get('encoding') == 'bytes' # a token is a byte: nobody needs to count them
    some = dict(rows=1, tokens=1) | (dict(bytes=1) if of_bytes else {})
    given = meta.get('splits', {})
    try:
        check_meta(meta | {'splits': {split: some | given.get(split, {}) for split in splits}})
    except ValueError as e:
        usage(f"write_folder({name!r}): in its meta, {e}")
    folder, sizes = folder_of(name), {}
    try:
        # away with what was there
        os.makedirs(folder, exist_ok=True)
        for file in os.listdir(folder):
            if file in ('meta.json', 'token_bytes.npy') or file.endswith('.bin'):
                os.remove(os.path.join(folder, file))
        # a file for each split
        for split, blocks in splits.items():
            n, sha = write_tokens(os.path.join(folder, f'{split}.bin'), blocks, meta)
            n //= row_tokens(meta, split)
            print(f"data/{name}/{split + '.bin':14} {n:13,} {unit_of(meta)}", flush=True)
            sizes[split] = {unit_of(meta): n, 'sha256': sha} | given.get(split, {})
            if of_bytes:
                sizes[split]['bytes'] = n
        if token_bytes is not None:
            array = np.asarray(token_bytes, np.uint16)
            replace_file(os.path.join(folder, 'token_bytes.npy'), lambda f: np.save(f, array))
        # and what they are
        text = json.dumps(meta | {'splits': sizes}, indent=1)
        replace_file(os.path.join(folder, 'meta.json'), lambda f: f.write(text.encode()))
    except OSError as e: # a full disk, a folder without permission
        fail(f"cannot write data/{name}: {e.strerror or e}; make room there (or give permission), "
             "and run this again")

def write_tokens(path, blocks, meta):
    """The blocks as one file: (number of tokens, sha256)."""
    count, sha = 0, hashlib.sha256()
    def write(f):
        nonlocal count
        for block in blocks:
            block = np.asarray(block)
            if block.size and not 0 <= block.min() <= block.max() < meta['vocab_size']:
                raise ValueError(f"{path}: tokens must lie in 0 ... {meta['vocab_size'] - 1}")
            data = block.astype(meta['dtype']).tobytes()
            f.write(data)
            sha.update(data)
            count += block.size
    replace_file(path, write)
    return count, sha.hexdigest()
