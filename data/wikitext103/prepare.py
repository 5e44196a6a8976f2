"""
WikiText-103 as bytes: the raw text, vocabulary 256, uint8.

    python data/wikitext103/prepare.py                  # download 192 MB, check, extract 543 MB
    python data/wikitext103/prepare.py --src=PATH       # no network: the zip, or a folder that holds wiki.train.raw, .valid, .test
    python data/wikitext103/prepare.py --train_member=valid --subset=True     # small: the first 90% of the valid text to train on

Writes train.bin, val.bin, test.bin and meta.json into data/<name>. A download that was cut goes on where it stopped; the zip stays
there, so that a second run downloads nothing. What is not the whole published text (another train member, a shorter one, a missing
split) needs --subset=True, and the note in meta.json, which goes into every row of results, says what it was. Where wiki.valid.raw
is missing or is the train member, val.bin is the end of the train member.
"""

import os
import re
import sys
import time
import zlib
import signal
import hashlib
import zipfile

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
from configurator import configure, usage # first: it makes Ctrl-C one line while torch loads
from common import fail
from data.folder import folder_of, write_folder

# -----------------------------------------------------------------------------
src = '' # zip or folder, relative to the shell's directory; '': download
train_member = 'train' # wiki.<train_member>.raw is the train split: train, valid, or one of your own in the folder
subset = False # accept less than the whole published text
val_fraction = 0.1 # of the train member, held out at its end where wiki.valid.raw cannot serve
name = 'wikitext103' # the folder under data/
# download
urls: tuple[str, ...] = ( # tried in turn
    'https://wikitext.smerity.com/wikitext-103-raw-v1.zip',
    'https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/3555105b17ae31cc619a136fac72dbe2865c3738/wikitext-103-raw-v1.zip')
timeout = 30.0 # seconds without a connection, or without a byte
tries = 4 # of one address in a row that bring nothing new
wait = 1.0 # seconds before the second of them, then doubled
# the published files; 0 or '' is not checked
zip_bytes = 191984949
zip_sha256 = '91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794'
train_bytes = 540568191 # its sha256 is not published: the zip's stands for it
valid_sha256 = '4cd0f6876d07a413aa911261ff6d363c72d757d47f0fdd6015702014c89cb9c7' # 1,146,846 bytes
test_sha256 = '173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08' # 1,290,590 bytes
# -----------------------------------------------------------------------------
published = [zip_bytes, zip_sha256, train_bytes, valid_sha256, test_sha256]
configure(globals(), {'x > 0': 'timeout', 'x >= 0': 'wait zip_bytes train_bytes', 'x >= 1': 'tries', '0 < x < 1': 'val_fraction',
                      "x and all(c.isalnum() or c in '-_' for c in x)": 'name',
                      "x == '' or len(x) == 64 and all(c in '0123456789abcdef' for c in x)": 'zip_sha256 valid_sha256 test_sha256'})
published = published == [zip_bytes, zip_sha256, train_bytes, valid_sha256, test_sha256]
if train_member == 'test':
    usage("train_member='test': the test text is not to be trained on")
if train_member != 'train' and not subset:
    usage(f"train_member={train_member!r} is not WikiText-103's own train split: say --subset=True")
folder = folder_of(name)
zip_name = 'wikitext-103-raw-v1.zip'
zip_path = os.path.join(folder, zip_name)
part_path = zip_path + '.part' # an unfinished download

def on_interrupt(number, frame):
    kept = size_of(part_path)
    print('interrupted' + (f"; data/{name}/{zip_name}.part is kept, and another run goes on from there" if kept else ''), file=sys.stderr)
    sys.exit(130)
signal.signal(signal.SIGINT, on_interrupt)

# -----------------------------------------------------------------------------
# download

BY_HAND = (f"By hand: put {zip_name} ({zip_bytes:,} bytes, sha256 {zip_sha256}) into data/{name}/ and run this again, "
           f"or keep it elsewhere and give --src=PATH")

def size_of(path):
    return os.path.getsize(path) if os.path.exists(path) else 0

def sha256_of(path):
    sha = hashlib.sha256()
    with open(path, 'rb') as f:
        while block := f.read(2**20):
            sha.update(block)
    return sha.hexdigest()

def innermost(e):
    """What lies at the bottom of requests' nested exceptions, e.g. 'ConnectionRefusedError: [Errno 111] Connection refused'."""
    while e.__cause__ or e.__context__:
        e = e.__cause__ or e.__context__
    return f"{type(e).__name__}: {e}"

def progress(have, start, t0, last=[time.monotonic()]):
    """MB so far, MB/s and the time left: a line that overwrites itself on a terminal, one every 10 s elsewhere."""
    now, tty = time.monotonic(), sys.stdout.isatty()
    if now - last[0] >= (0.5 if tty else 10):
        last[0], speed = now, (have - start) / max(now - t0, 1e-3)
        left = f"{(zip_bytes - have) / max(speed, 1):,.0f} s left" if zip_bytes else ''
        print(f"{have / 1e6:8.1f} of {zip_bytes / 1e6:.1f} MB, {speed / 1e6:.1f} MB/s, {left}  ", end='\r' if tty else '\n', flush=True)

def verified():
    """Move a partial file that has become the zip into place; '' or what is wrong with it. A wrong one is removed."""
    sha = sha256_of(part_path)
    if zip_sha256 and sha != zip_sha256:
        size = size_of(part_path)
        os.remove(part_path)
        return f"{size:,} bytes with sha256 {sha[:16]}..., not {zip_sha256[:16]}..."
    os.replace(part_path, zip_path)
    return ''

def attempt(url):
    """
    One request, from the end of the partial file on. Returns (what, words): 'done'; 'again' where another try may help; 'never' where
    this address will not do. Nothing that is not the zip reaches the partial file, unless only its checksum can tell.
    """
    import requests # only here: --src needs no network
    have = start = size_of(part_path)
    headers = {'User-Agent': 'Mozilla/5.0 (compatible; nanoJordan)', 'Accept-Encoding': 'identity'} # Python's own is answered 403
    if have:
        headers['Range'] = f'bytes={have}-'
    try:
        with requests.get(url, headers=headers, stream=True, timeout=timeout) as r:
            code, kind = r.status_code, r.headers.get('Content-Type', 'unknown type')
            at = f" at {r.url}" if r.url != url else ''
            if have and (code == 416 or code == 206 and not r.headers.get('Content-Range', '').startswith(f'bytes {have}-')):
                os.remove(part_path) # no such range: begin anew
                return 'again', f"status {code} for the range from byte {have:,}{at}"
            if code not in (200, 206):
                return ('again' if code in (408, 425, 429) or code >= 500 else 'never'), f"status {code} {r.reason}{at}"
            if code == 200: # the whole file, whatever was asked for
                have = start = 0
            blocks = r.iter_content(2**16)
            block = next(blocks, b'')
            if not have and block and not block.startswith(b'PK\3\4'):
                return 'never', f"no zip{at}, but {kind} that begins with {block[:24]!r}"
            length = r.headers.get('Content-Length', '')
            if zip_bytes and length.isdigit() and have + int(length) != zip_bytes:
                return 'never', f"a file of {have + int(length):,} bytes{at}, not {zip_bytes:,}"
            t0 = time.monotonic()
            with open(part_path, 'ab' if have else 'wb') as f:
                while block:
                    f.write(block)
                    have += len(block)
                    progress(have, start, t0)
                    if zip_bytes and have > zip_bytes:
                        break # an answer without an end
                    block = next(blocks, b'')
    except requests.RequestException as e: # comes before OSError, which it is one of
        at = f" at {e.request.url}" if getattr(e, 'request', None) and e.request.url != url else ''
        words = innermost(e)
        words = f"timed out: nothing came for {timeout:g} s" if 'timed out' in words else words
        words = 'the connection ended' if words.startswith('IncompleteRead') else words
        hopeless = isinstance(e, (ValueError, requests.TooManyRedirects)) # ValueError: no address at all
        return ('never' if hopeless else 'again'), f"{words}{at}" + (f", after {have:,} of {zip_bytes:,} bytes" if have else '')
    if zip_bytes and have < zip_bytes:
        return 'again', f"it ended after {have:,} of {zip_bytes:,} bytes"
    wrong = verified()
    return ('again' if wrong and start else 'never' if wrong else 'done'), wrong # what was resumed may have begun as another file

def download():
    """Leave the verified zip at zip_path: every address in turn, each several times; one line if none has it."""
    os.makedirs(folder, exist_ok=True)
    if zip_bytes and size_of(part_path) >= zip_bytes and not verified(): # an earlier run ended just before this
        return
    said, most = [], 0
    for url in urls:
        failures = 0
        while failures < tries:
            had = size_of(part_path)
            print(f"downloading {url}" + (f" from byte {had:,} on" if had else ''), flush=True)
            what, words = attempt(url)
            if what == 'done':
                return
            print('\n' * sys.stdout.isatty() + f"  {words}", flush=True)
            # a try that got further than any before starts the count again
            failures, most = (0 if size_of(part_path) > most else failures + 1), max(most, size_of(part_path))
            if what == 'never':
                break
            if failures < tries:
                time.sleep(wait * 2 ** max(failures - 1, 0))
        said.append(f"{url}: {words}")
    fail(f"no zip. {'; '.join(said)}. {BY_HAND}")

# -----------------------------------------------------------------------------
# members: {'valid': (size, a function that opens it)}

def find_members(path):
    """wiki.*.raw in a folder, in its folder wikitext-103-raw, or in a zip."""
    shape = re.compile(r'(?:.*/)?wiki\.(.+)\.raw')
    try:
        if os.path.isdir(path):
            files = [os.path.join(at, f) for at in (os.path.join(path, 'wikitext-103-raw'), path) if os.path.isdir(at) for f in os.listdir(at)]
            return {m[1]: (os.path.getsize(f), lambda f=f: open(f, 'rb')) for f in files if (m := shape.fullmatch(f.replace(os.sep, '/')))}
        z = zipfile.ZipFile(path)
        return {m[1]: (i.file_size, lambda i=i: z.open(i)) for i in z.infolist() if (m := shape.fullmatch(i.filename))}
    except zipfile.BadZipFile:
        fail(f"{path}: no zip, or a truncated one ({size_of(path):,} bytes). {BY_HAND}")
    except OSError as e:
        fail(f"{path}: {e.strerror}")

def read(member, start=0, stop=None):
    """Bytes start..stop of a member, a megabyte at a time."""
    size, open_member = members[member]
    try:
        with open_member() as f:
            f.seek(start)
            left = (size if stop is None else stop) - start
            while left:
                block = f.read(min(2**20, left))
                if not block:
                    raise EOFError('it ends early')
                left -= len(block)
                yield block
            f.read(1) # past the end of a zip's member its CRC is checked
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as e: # RuntimeError: encrypted, or an unknown method
        fail(f"{path}, wiki.{member}.raw: cannot be read ({type(e).__name__}: {e}). {BY_HAND}")

def check(member):
    """A published member is what it should be; any other is accepted with --subset=True."""
    size, expected = members[member][0], {'valid': valid_sha256, 'test': test_sha256}.get(member, '')
    sha = hashlib.sha256()
    for block in read(member):
        sha.update(block)
    if expected and sha.hexdigest() != expected:
        fail(f"{path}, wiki.{member}.raw: {size:,} bytes with sha256 {sha.hexdigest()}, not {expected}: not the published file. {BY_HAND}")
    if member == 'train' and train_bytes and size != train_bytes and not subset:
        fail(f"{path}, wiki.train.raw: {size:,} bytes, not {train_bytes:,}: give --subset=True to train on a part of the text. {BY_HAND}")

if src:
    path = os.path.expanduser(src)
    if not os.path.exists(path):
        usage(f"src={src!r}: no such file or folder")
else:
    path = zip_path
    if not os.path.exists(zip_path):
        try:
            download()
        except OSError as e: # of the disk: those of the network are dealt with above
            fail(f"cannot write data/{name}/{zip_name}.part: {e.strerror}; make room for {(zip_bytes + train_bytes) / 1e6:,.0f} MB there "
                 f"and run this again" + (f": it goes on from byte {size_of(part_path):,}" if size_of(part_path) else ''))
    elif zip_sha256 and sha256_of(zip_path) != zip_sha256:
        fail(f"data/{name}/{zip_name}: {size_of(zip_path):,} bytes with another sha256 than the published file's: delete it to download it anew. {BY_HAND}")

members = find_members(path)
if train_member not in members:
    fail(f"{path}: no wiki.{train_member}.raw there, only {', '.join(f'wiki.{m}.raw' for m in sorted(members)) or 'other files'}"
         + (": name one with --train_member, and --subset=True" if members else f". {BY_HAND}"))
missing = [f'wiki.{m}.raw' for m in ('valid', 'test') if m not in members]
if missing and not subset:
    fail(f"{path}: no {' and no '.join(missing)} there: give --subset=True to do without. {BY_HAND}")
used = [m for m in dict.fromkeys((train_member, 'valid', 'test')) if m in members]
for member in used:
    check(member)

size = members[train_member][0]
own_val = train_member != 'valid' and 'valid' in members
cut = size if own_val else round(size * (1 - val_fraction))
if cut < 2 or not own_val and size - cut < 2:
    fail(f"{path}, wiki.{train_member}.raw: {size:,} bytes are too few to learn from")
whole = train_member == 'train' and size == train_bytes and not missing
word = train_member + f'({size} bytes)' * (train_member == 'train' and size != train_bytes)
percent = f'{100 * (1 - val_fraction):g}%'
# split: (member, first byte, end, word for the note)
parts = {'train': (train_member, 0, cut, word if own_val else f'{word}[:{percent}]'),
         'val': ('valid', 0, None, 'valid') if own_val else (train_member, cut, size, f'{word}[{percent}:]')}
if 'test' in members:
    parts['test'] = ('test', 0, None, 'test')
note = ' '.join(['wikitext103' + ' (unpublished files)' * (not published), *(f'{s}={w}' for s, (_, _, _, w) in parts.items())])
sizes = {s: (members[m][0] if b is None else b) - a for s, (m, a, b, _) in parts.items()}
blocks = {s: (np.frombuffer(block, np.uint8) for block in read(m, a, b)) for s, (m, a, b, _) in parts.items()}
write_folder(name, blocks, dict(kind='stream', vocab_size=256, dtype='uint8', encoding='bytes', subset=not whole,
                                note=note, splits={s: {'bytes': n} for s, n in sizes.items()}))
print(note)
