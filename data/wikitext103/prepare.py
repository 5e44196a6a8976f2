"""
WikiText-103 as bytes: the raw text, vocabulary 256, uint8.

    python data/wikitext103/prepare.py              # download 192 MB, check, extract 543 MB
    python data/wikitext103/prepare.py --src=PATH   # no network: the zip, or a folder with its wiki.*.raw
    python data/wikitext103/prepare.py --train_member=valid --subset=True # small: 90% of the valid text

Writes train.bin, val.bin, test.bin and meta.json into data/<name>. A download that was cut goes on where it
stopped; the zip stays there, so that a second run downloads nothing. What is not the whole published text
(another train member, a shorter one, a missing split) needs --subset=True, and the note in meta.json, which
goes into every row of results, says what it was. Where wiki.valid.raw is missing or is the train member,
val.bin is the end of the train member.
"""

import os
import re
import sys
import time
import zlib
import hashlib
import zipfile
from functools import partial

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from configurator import configure, usage # first: it makes Ctrl-C one line while torch loads
from common import fail
from data.folder import folder_of, write_folder

# -----------------------------------------------------------------------------
src = '' # zip or folder, relative to the shell's directory; '': download
train_member = 'train' # wiki.<train_member>.raw is the train split: train, valid, or one of your own
subset = False # accept less than the whole published text
val_fraction = 0.1 # of the train member, held out at its end where wiki.valid.raw cannot serve
name = 'wikitext103' # the folder under data/
# download
urls: tuple[str, ...] = ( # tried in turn
    'https://wikitext.smerity.com/wikitext-103-raw-v1.zip',
    'https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/'
    '3555105b17ae31cc619a136fac72dbe2865c3738/wikitext-103-raw-v1.zip')
timeout = 30.0 # seconds without a connection, or without a byte
tries = 4 # of one address in a row that bring nothing new
wait = 1.0 # seconds before the second of them, then doubled
# the published files; the train text's sha256 is not published, the zip's stands for it
zip_bytes = 191984949
zip_sha256 = '91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794'
train_bytes = 540568191
valid_sha256 = '4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7'
test_sha256 = '173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08'
# -----------------------------------------------------------------------------
published = [zip_bytes, zip_sha256, train_bytes, valid_sha256, test_sha256]
configure(globals(), {
    'x > 0': 'timeout zip_bytes train_bytes',
    'x >= 0': 'wait',
    'x >= 1': 'tries',
    '0 < x < 1': 'val_fraction',
    "x and all(c.isalnum() or c in '-_' for c in x)": 'name',
})
published = published == [zip_bytes, zip_sha256, train_bytes, valid_sha256, test_sha256]
if train_member == 'test':
    usage("train_member='test': the test text is not to be trained on")
if train_member != 'train' and not subset:
    usage(f"train_member={train_member!r} is not WikiText-103's own train split: say --subset=True")

zip_name = 'wikitext-103-raw-v1.zip'
zip_path = os.path.join(folder_of(name), zip_name)
part_path = zip_path + '.part' # an unfinished download
BY_HAND = (f"By hand: put {zip_name} ({zip_bytes:,} bytes, sha256 {zip_sha256}) into data/{name}/ and run "
           "this again, or keep it elsewhere and give --src=PATH")

def size_of(path):
    return os.path.getsize(path) if os.path.exists(path) else 0

def sha256_of(path):
    sha = hashlib.sha256()
    with open(path, 'rb') as f:
        while block := f.read(2**20):
            sha.update(block)
    return sha.hexdigest()

# -----------------------------------------------------------------------------
# download

class Again(Exception):
    """Another try of this address may help."""

class Useless(Exception):
    """This address will not do."""

def reason(e):
    """What lies at the bottom of requests' nested exceptions: ConnectionRefusedError, say."""
    while e.__cause__ or e.__context__:
        e = e.__cause__ or e.__context__
    return f"timed out after {timeout:g} s" if 'timed out' in str(e) else f"{type(e).__name__}: {e}"

def attempt(url):
    """One request, from the end of the partial file on. If all is well, the zip is in its place."""
    import requests # only here: --src needs no network
    have = size_of(part_path)
    # Python's own agent is answered 403; what is compressed on its way could not be resumed
    headers = {'User-Agent': 'Mozilla/5.0 (compatible; nanoJordan)', 'Accept-Encoding': 'identity'}
    if have:
        headers['Range'] = f'bytes={have}-'
    try:
        with requests.get(url, headers=headers, stream=True, timeout=timeout) as answer:
            have = check_answer(answer, have)
            receive(answer.iter_content(2**16), have)
    except (requests.TooManyRedirects, ValueError) as e: # ValueError: no address at all
        raise Useless(str(e))
    except requests.RequestException as e:
        raise Again(f"{reason(e)}, after {size_of(part_path):,} of {zip_bytes:,} bytes")
    if size_of(part_path) < zip_bytes:
        raise Again(f"it ended after {size_of(part_path):,} of {zip_bytes:,} bytes")
    if wrong := accept():
        # what was resumed may have begun as another file
        raise Again(wrong) if have else Useless(wrong)

def check_answer(answer, have):
    """Is this the rest of the zip, or the zip? Returns how many of the bytes that we have go before it."""
    status = answer.status_code
    starts = answer.headers.get('Content-Range', '').startswith(f'bytes {have}-')
    if have and (status == 416 or status == 206 and not starts):
        os.remove(part_path)
        raise Again(f"status {status} for the range from byte {have:,}")
    if status in (408, 425, 429) or status >= 500:
        raise Again(f"status {status} {answer.reason}")
    if status not in (200, 206):
        raise Useless(f"status {status} {answer.reason}")
    if status == 200: # the whole file, whatever was asked for
        have = 0
    length = answer.headers.get('Content-Length', '')
    if 'text/html' in answer.headers.get('Content-Type', ''): # a login page, with status 200
        raise Useless("a page of text/html, no zip")
    if length.isdigit() and have + int(length) != zip_bytes:
        raise Useless(f"a file of {have + int(length):,} bytes, not {zip_bytes:,}")
    return have

def receive(blocks, have):
    """Write what comes behind the bytes that we have, and tell how it goes."""
    start, said, first = time.monotonic(), time.monotonic(), have
    with open(part_path, 'ab' if have else 'wb') as f:
        for block in blocks:
            f.write(block)
            have += len(block)
            if have > zip_bytes: # an answer without an end
                break
            now = time.monotonic()
            if now - said > 5:
                said, speed = now, (have - first) / (now - start)
                print(f"{have / 1e6:8.1f} of {zip_bytes / 1e6:.1f} MB, {speed / 1e6:.1f} MB/s, "
                      f"{(zip_bytes - have) / speed:,.0f} s left", flush=True)

def accept():
    """Move a whole partial file into place: '', or what is wrong with it. A wrong one is removed."""
    size, sha = size_of(part_path), sha256_of(part_path)
    if sha != zip_sha256:
        os.remove(part_path)
        return f"{size:,} bytes with sha256 {sha[:16]}..., not {zip_sha256[:16]}..."
    os.replace(part_path, zip_path)
    return ''

def download():
    """Leave the verified zip at zip_path: every address in turn, each several times; or one line."""
    os.makedirs(folder_of(name), exist_ok=True)
    if size_of(part_path) >= zip_bytes and not accept(): # an earlier run ended just before this
        return
    said = []
    for url in urls:
        failures = most = 0
        while failures < tries:
            had = size_of(part_path)
            print(f"downloading {url}" + (f" from byte {had:,} on" if had else ''), flush=True)
            try:
                attempt(url)
                return
            except Useless as e:
                words, failures = str(e), tries
            except Again as e:
                # a try that got further than any before starts the count again
                words, failures = str(e), 0 if size_of(part_path) > most else failures + 1
                most = max(most, size_of(part_path))
            print(f"  {words}", flush=True)
            if failures < tries:
                time.sleep(wait * 2 ** max(failures - 1, 0))
        said.append(f"{url}: {words}")
    fail(f"no zip. {'; '.join(said)}. {BY_HAND}")

# -----------------------------------------------------------------------------
# members: {'valid': (size, function that opens it)}

def find_members(path):
    """wiki.*.raw in a zip, in a folder, or in its folder wikitext-103-raw."""
    members = {}
    try:
        if os.path.isdir(path):
            inner = os.path.join(path, 'wikitext-103-raw')
            path = inner if os.path.isdir(inner) else path
            entries = [(file, os.path.join(path, file)) for file in os.listdir(path)]
            entries = [(file, os.path.getsize(file_path), partial(open, file_path, 'rb'))
                       for file, file_path in entries]
        else:
            z = zipfile.ZipFile(path)
            entries = [(os.path.basename(i.filename), i.file_size, partial(z.open, i)) for i in z.infolist()]
    except zipfile.BadZipFile:
        fail(f"{path}: no zip, or a truncated one ({size_of(path):,} bytes). {BY_HAND}")
    except OSError as e:
        fail(f"{path}: {e.strerror}")
    for file, size, open_member in entries:
        if found := re.fullmatch(r'wiki\.(.+)\.raw', file):
            members[found[1]] = size, open_member
    return members

def read(member, start=0, end=None):
    """Bytes start..end of a member, a megabyte at a time."""
    size, open_member = members[member]
    try:
        with open_member() as f:
            f.seek(start)
            left = (size if end is None else end) - start
            while left:
                block = f.read(min(2**20, left))
                if not block:
                    raise EOFError('it ends early')
                left -= len(block)
                yield np.frombuffer(block, np.uint8)
            f.read(1) # past the end of a zip's member its CRC is checked
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as e: # RuntimeError: encrypted
        fail(f"{path}, wiki.{member}.raw: cannot be read ({type(e).__name__}: {e}). {BY_HAND}")

def check(member):
    """A published member is what it should be; any other is accepted with --subset=True."""
    size, expected = members[member][0], {'valid': valid_sha256, 'test': test_sha256}.get(member)
    where, sha = f"{path}, wiki.{member}.raw: {size:,} bytes", hashlib.sha256()
    for block in read(member): # all of it, also of the train text: a damaged file shows before one is written
        sha.update(block)
    if expected and sha.hexdigest() != expected:
        fail(f"{where} with sha256 {sha.hexdigest()}, not {expected}: not the published file. {BY_HAND}")
    if member == 'train' and size != train_bytes and not subset:
        fail(f"{where}, not {train_bytes:,}: give --subset=True to train on a part of the text. {BY_HAND}")

# -----------------------------------------------------------------------------

# the zip or folder
path = os.path.expanduser(src) if src else zip_path
if src and not os.path.exists(path):
    usage(f"src={src!r}: no such file or folder")
if not src and os.path.exists(zip_path) and sha256_of(zip_path) != zip_sha256:
    fail(f"data/{name}/{zip_name}: {size_of(zip_path):,} bytes, another sha256 than the published file's; "
         f"delete it to download it anew. {BY_HAND}")
if not os.path.exists(path):
    try:
        download()
    except OSError as e: # of the disk: those of the network are dealt with above
        fail(f"cannot write data/{name}/{zip_name}.part: {e.strerror}; make room for "
             f"{(zip_bytes + train_bytes) / 1e6:,.0f} MB there and run this again: it goes on from there")

# its members
members = find_members(path)
if train_member not in members:
    there = ', '.join(f'wiki.{member}.raw' for member in sorted(members)) or 'other files'
    fail(f"{path}: no wiki.{train_member}.raw there, only {there}. {BY_HAND}")
missing = [f'wiki.{member}.raw' for member in ('valid', 'test') if member not in members]
if missing and not subset:
    fail(f"{path}: no {' and no '.join(missing)} there: give --subset=True to do without. {BY_HAND}")
for member in dict.fromkeys((train_member, 'valid', 'test')):
    if member in members:
        check(member)

# split: (member, first byte, end, word for the note)
size, word = members[train_member][0], train_member
if train_member == 'train' and size != train_bytes:
    word = f'train({size} bytes)'
if train_member != 'valid' and 'valid' in members:
    parts = {'train': (train_member, 0, size, word), 'val': ('valid', 0, members['valid'][0], 'valid')}
else:
    cut, percent = round(size * (1 - val_fraction)), f'{100 * (1 - val_fraction):g}%'
    parts = {'train': (train_member, 0, cut, f'{word}[:{percent}]'),
             'val': (train_member, cut, size, f'{word}[{percent}:]')}
if 'test' in members:
    parts['test'] = ('test', 0, members['test'][0], 'test')
note = ' '.join(['wikitext103', *(f'{split}={word}' for split, (_, _, _, word) in parts.items())])
if not published:
    note = note.replace('wikitext103', 'wikitext103 (unpublished files)')
for split, (member, start, end, _) in parts.items():
    if end - start < 2:
        fail(f"{path}, wiki.{member}.raw: {members[member][0]:,} bytes are too few to learn from")

write_folder(name, {split: read(*part[:3]) for split, part in parts.items()}, dict(
    kind='stream', vocab_size=256, dtype='uint8', encoding='bytes', note=note))
print(note)
