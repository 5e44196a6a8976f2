"""
Config files and --key=value flags over a script's module-level settings:

    python train.py config/synth_jordan.py --pos=rope --seed=2

A script writes its defaults as plain assignments between two '# ---' rules at its top and then calls

    config = configure(globals(), rules)

Config files are Python, executed in the order given; flags come after them, wherever they stand. The type
of a setting is that of its default, or its annotation where the default is None or a tuple. `rules` maps a
condition on x to the settings that it binds: {'x >= 1': 'batch_size n_layer'}. Anything wrong is one line on
stderr and exit status 2.

Every script imports this file first, before torch takes its second to load: from then on a Ctrl-C, a reader
that goes away and a console that cannot print a character end a script in one line, or not at all.
"""

import os
import re
import sys
import time
import errno
import atexit
import signal
import difflib
import traceback

ROOT = os.path.dirname(os.path.abspath(__file__)) # of scripts, configs and data

def usage(message, status=2):
    """One line that names the script and what is wrong, exit status 2."""
    # of torchrun's processes on a machine the first one speaks; the others wait, and are ended meanwhile
    rank = os.environ.get('LOCAL_RANK', '')
    if rank.isdigit() and int(rank):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(10)
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr)
    sys.exit(status)

def in_one_line(kind, error, trace):
    """sys.excepthook: Ctrl-C, a closed pipe, no memory, a full disk, a lost process are no faults of ours."""
    script = os.path.basename(sys.argv[0])
    if issubclass(kind, KeyboardInterrupt):
        print(f"{script}: interrupted", file=sys.stderr, flush=True)
        os._exit(130)
    if issubclass(kind, BrokenPipeError): # as in `probe.py | head`
        os._exit(141)
    if kind is MemoryError or kind.__name__ == 'OutOfMemoryError' or "can't allocate memory" in str(error):
        what = (str(error).strip().splitlines() or [''])[0][:120]
        print(f"{script}: out of memory ({what}): try smaller sizes", file=sys.stderr)
    elif issubclass(kind, OSError) and error.errno == errno.ENOSPC:
        print(f"{script}: {error}", file=sys.stderr)
    elif 'LOCAL_RANK' in os.environ and re.search('Connection (closed|reset) by', str(error)):
        usage("another process of this run has ended; it says why", status=1)
    else:
        sys.__excepthook__(kind, error, trace)

def last_flush():
    """At exit: what is still to be printed may meet a reader that has gone."""
    try:
        if sys.stdout: # None where it was closed before the start
            sys.stdout.flush()
    except BrokenPipeError:
        os._exit(141)
    except OSError as e: # a full disk
        os.write(2, f"{os.path.basename(sys.argv[0])}: stdout cannot be written ({e.strerror})\n".encode())
        os._exit(1)

sys.excepthook = in_one_line
atexit.register(last_flush)
for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, 'reconfigure'): # pytest's and a notebook's have not
        stream.reconfigure(errors='replace')

def configure(g, rules={}, argv=None):
    """Override the settings in g (a script's globals()) from argv, and return them as a dict."""
    argv = sys.argv[1:] if argv is None else argv
    kinds = {k: kind_of(v, g.get('__annotations__', {}).get(k)) for k, v in g.items() if is_setting(k, v)}
    if '-h' in argv or '--help' in argv:
        print_help(g)
    files, flags = [a for a in argv if not a.startswith('-')], [a for a in argv if a.startswith('-')]
    for file in files:
        run_file(file, g, kinds)
    for flag in flags:
        key, equals, text = flag.lstrip('-').partition('=')
        if key not in kinds:
            usage(f"{flag}: no such setting{near(key, kinds)}; --help lists them")
        if not equals or not flag.startswith('--'):
            usage(f"{flag}: write it as --{key}={text or 'VALUE'}")
        g[key] = parse(text, kinds[key], f"--{key}={text}")
    for rule, names in rules.items():
        for name in names.split():
            if g[name] is not None and not eval(rule, {'x': g[name]}):
                condition = re.sub(r'\bx\b', name, rule)
                huge = type(g[name]) is int and abs(g[name]) >= 10**30 # Python may refuse to print it
                shown = 'a number of over 30 digits' if huge else repr(g[name])
                usage(f"{name}={shown}: expected {condition}")
    return {k: g[k] for k in kinds}

def typed():
    """The names of the settings that stand on the command line as flags."""
    return [a.lstrip('-').partition('=')[0] for a in sys.argv[1:] if a.startswith('--')]

def is_setting(name, value):
    return not name.startswith('_') and isinstance(value, (int, float, bool, str, tuple, type(None)))

def near(name, names):
    close = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {close[0]}?)" if close else ''

def kind_of(default, annotation):
    """
    (type, type of an element or None, may it be None): from an annotation such as float | None, else from the
    default.
    """
    if annotation is None:
        return type(default), None, False
    parts = getattr(annotation, '__args__', ())
    if getattr(annotation, '__origin__', None) is tuple:
        return tuple, parts[0], False
    optional = type(None) in parts
    return (next(p for p in parts if p is not type(None)) if optional else annotation), None, optional

def parse(text, kind, where):
    """The value of a flag's text."""
    to, element, optional = kind
    if optional and text.lower() == 'none':
        return None
    if to is tuple:
        return tuple(parse(t.strip(), (element, None, False), where) for t in text.split(',') if t.strip())
    try:
        if to is bool:
            return {'true': True, '1': True, 'yes': True, 'on': True,
                    'false': False, '0': False, 'no': False, 'off': False}[text.lower()]
        if to is int:
            return int(text) if re.fullmatch(r'[+-]?\d[\d_]*', text) else exact_int(float(text))
        if to is float:
            return finite(float(text))
    except (KeyError, ValueError, OverflowError):
        usage(f"{where}: expected {name_of(kind)}")
    return text

def convert(value, kind, where):
    """The same for a config file's value: an int passes for a float, 1e3 for an int, a list for a tuple."""
    to, element, optional = kind
    if value is None and optional:
        return None
    if to is tuple and isinstance(value, (tuple, list)):
        return tuple(convert(v, (element, None, False), where) for v in value)
    try:
        if to is float and type(value) in (int, float):
            return finite(float(value))
        if to is int and type(value) is float:
            return exact_int(value)
    except (ValueError, OverflowError):
        pass
    if type(value) is not to:
        usage(f"{where} = {value!r}: expected {name_of(kind)}")
    return value

def finite(x):
    if x != x or x in (float('inf'), float('-inf')):
        raise ValueError
    return x

def exact_int(x):
    if x != int(x):
        raise ValueError
    return int(x)

def name_of(kind):
    to, element, optional = kind
    word = {bool: 'True or False', int: 'a whole number', float: 'a finite number', str: 'a string'}
    name = f"a comma-separated list, each {word[element]}" if to is tuple else word[to]
    return name + (', or None' if optional else '')

def run_file(file, g, kinds):
    """Execute a config file (as given, or beside the scripts) and take over what it sets."""
    path = next((p for p in (file, os.path.join(ROOT, file)) if os.path.isfile(p)), None)
    if path is None:
        folder = os.path.join(ROOT, 'config')
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        known = [f"config/{f}" for f in names if f.endswith('.py')]
        usage(f"{file}: no such config file{near(file, known)}; flags are written --key=value")
    scope = {k: g[k] for k in kinds}
    try:
        with open(path, encoding='utf-8') as f:
            exec(compile(f.read(), path, 'exec'), scope)
    except SyntaxError as e:
        usage(f"{file}, line {e.lineno or 1}: {e.msg}")
    except (Exception, SystemExit) as e:
        line = 1
        for frame, number in traceback.walk_tb(e.__traceback__):
            if frame.f_code.co_filename == path: # the innermost line of the file itself
                line = number
        usage(f"{file}, line {line}: {type(e).__name__}: {e}")
    for name, value in scope.items():
        if name in kinds:
            g[name] = convert(value, kinds[name], f"{file}: {name}")
        elif is_setting(name, value):
            usage(f"{file}: {name}: no such setting{near(name, kinds)}; --help lists them")

def print_help(g):
    """The script's docstring and its default block, comments included."""
    with open(g['__file__'], encoding='utf-8') as f:
        block = re.split(r'^# -{20,}.*\n', f.read(), flags=re.M)[1]
    print(g['__doc__'].strip(), f"\n\nsettings, as --key=value or in a config file:\n\n{block.strip()}")
    sys.exit(0)
