"""Parsing of a program's last exception from its output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from slowness import scaled

from ezpz_llm.launcher.on_nodes.run_facts import Raised
from ezpz_llm.launcher.on_nodes.tracebacks import last_exception, last_exception_in_thread

_PROGRAMS = {

    "def f():\n  raise ValueError('boom\\nmore')\nf()": ("ValueError", "boom\nmore", "p.py:2 in f", None),
    "import json\ndef load(): json.loads('{')\nload()": (
        "json.decoder.JSONDecodeError",
        "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)", "p.py:2 in load", None),
    "try:\n  {}['x']\nexcept KeyError as e:\n  raise RuntimeError('no x') from e": (
        "RuntimeError", "no x", "p.py:4 in <module>", "KeyError: 'x'"),
    "try:\n  {}['x']\nexcept KeyError:\n  1/0": ("ZeroDivisionError", "division by zero", "p.py:4 in <module>",
                                                 "KeyError: 'x'"),
    "def f(:\n  pass": ("SyntaxError", "invalid syntax", "p.py:1", None),
    "import no_such_module.x": ("ModuleNotFoundError", "No module named 'no_such_module'", "p.py:1 in <module>",
                                None),
    "class A:\n  def __del__(s): raise OSError('later')\na = A()\nraise KeyError('k')": (
        "KeyError", "'k'", "p.py:4 in <module>", None),
    "def f():\n  class E(Exception): pass\n  raise E('x: y')\nf()": ("f.<locals>.E", "x: y", "p.py:3 in f", None),
    "def f(): f()\nf()": ("RecursionError", "maximum recursion depth exceeded", "p.py:1 in f", None),
    "assert 1 == 2": ("AssertionError", "", "p.py:1 in <module>", None),
    "import sys\nsys.stderr.write('\\r 50%|## | 1/2')\nraise ValueError('x')": (
        "ValueError", "x", "p.py:3 in <module>", None),
    "import sys\nsys.stderr.buffer.write(b'\\xff\\n')\nraise ValueError('\\udcff')": (
        "ValueError", "\\udcff", "p.py:3 in <module>", None),
    "import faulthandler, os, signal\nfaulthandler.enable()\ndef f(): os.kill(os.getpid(), signal.SIGSEGV)\nf()": (
        "Fatal Python error", "Segmentation fault", "p.py:3 in f", None),
    # The parent only reports a lost child, whose error is above.
    "import multiprocessing, os\nos.environ['TMPDIR'] = f = os.path.abspath('x' * 60 + '/' + 'y' * 60)\n"
    "os.makedirs(f)\nmultiprocessing.Manager()": (
        "EOFError", "", "p.py:4 in <module>", "OSError: AF_UNIX path too long"),
    "from torch.utils.data import DataLoader\nnumbers = list(range(4))\n"
    "next(iter(DataLoader(numbers, num_workers=1, multiprocessing_context='spawn')))": (
        "RuntimeError", "DataLoader worker (pid(s) ", "p.py:3 in <module>",
        "RuntimeError: An attempt has been made to start a new process before the"),
}


def test_lines_that_only_announce_the_error() -> None:
    keys = ("Error(s) in loading state_dict for Linear:", '\tMissing key(s) in state_dict: "weight".')
    assert Raised("RuntimeError", "\n".join(keys)).line == f"RuntimeError: {keys[0]} {keys[1].strip()}"
    fields = ("1 validation error for DeepSpeedZeroConfig", "overlap", "  Extra inputs are not permitted")
    raised = Raised("ValidationError", "\n".join(fields))
    assert raised.line == f"ValidationError: {fields[0]}: overlap: Extra inputs are not permitted"
    assert raised.printed_line == f"ValidationError: {fields[0]}"
    assert Raised("ValueError", "no:").line == "ValueError: no:"


def test_a_chain_whose_first_header_is_missing() -> None:
    frame, header = '  File "t.py", line 8, in cast', "Traceback (most recent call last):"
    chained = "The above exception was the direct cause of the following exception:"
    lines = [frame, "    raise e", "ValueError: Couldn't cast", "", chained, "", header, frame,
             "GenerationError: no data"]
    found = last_exception("\n".join(lines))
    assert found is not None
    assert (found.line, found.caused_by) == ("GenerationError: no data", "ValueError: Couldn't cast")
    found = last_exception("\n".join(lines[4:]))
    assert found is not None
    assert found.caused_by is None


def test_a_failed_build_is_named_by_the_compilers_error() -> None:
    command = "c++ -MMD -c a.cpp -o a.o"
    errors = {"a.cpp:1:10: fatal error: cusolverDn.h: No such file or directory": 3,
              "/usr/bin/ld: cannot find -lcurand: No such file or directory": 30,
              "a.cpp:(.text+0x1d): undefined reference to `cublasCreate_v2'": 4,
              "nvcc fatal   : Unsupported gpu architecture 'compute_120'": 2}
    for error, number in errors.items():
        lines = [f"Error building extension 'a': [1/2] {command}", "FAILED: a.o", *[command] * (number - 2), error,
                 "ninja: build stopped: subcommand failed."]
        text = "\n".join(["Traceback (most recent call last):", '  File "p.py", line 1, in f',
                          f"RuntimeError: {lines[0]}", *lines[1:]])
        found = last_exception(text)
        assert found is not None
        assert found.line == f"RuntimeError: {error}"
        assert found.printed_line == f"RuntimeError: {lines[0]}"


def test_an_exception_in_a_thread_or_worker_that_ends_the_output(tmp_path: Path) -> None:
    start = "import multiprocessing, threading\ndef f(): print('reads'); {}['x']\n"
    runs = "w = threading.Thread(target=f); w.start(); w.join()\n"
    for program, shown in (
            (start + runs, "KeyError: 'x'"),
            (start + runs.replace("threading.Thread", "multiprocessing.Process"), "KeyError: 'x'"),
            (start + runs + "print('goes on\\n' * 20)", None), (start + runs + "print('step'); 1 / 0", None),
            (start + "f()", None), ("print('x')", None)):
        (tmp_path / "p.py").write_text(program)
        done = subprocess.run([sys.executable, "-u", "p.py"], cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                              stderr=subprocess.STDOUT, timeout=scaled(120), check=False)
        found = last_exception_in_thread(done.stdout)
        assert (found and found.line) == shown, done.stdout


def test_exceptions_of_real_programs(tmp_path: Path) -> None:
    for number, (program, (name, message, where, cause)) in enumerate(_PROGRAMS.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "p.py").write_text(program)
        done = subprocess.run([sys.executable, "p.py"], cwd=folder, stdout=subprocess.PIPE, timeout=scaled(120),
                              stderr=subprocess.STDOUT, check=False)
        found = last_exception(done.stdout.decode(errors="replace"))
        assert found is not None, program
        assert (found.type, found.caused_by) == (name, cause)
        assert found.message.startswith(message)
        assert found.where.endswith(where), program
    # An exception that was caught long before the end, or raised in a destructor, did not end the program.
    caught = "Traceback (most recent call last):\n  File \"p.py\", line 1, in f\nValueError: x\n"
    assert last_exception(caught + "going on\n" * 300) is None
    assert last_exception(f"Exception ignored in: <function A.__del__>\n{caught}") is None
    assert last_exception("") is None
    assert last_exception("Traceback (most recent call last):\n  File \"p.py\", line 1, in f\n") is None


@pytest.mark.parametrize(("text", "name", "message", "where"), [
    ("[rank3]: Traceback (most recent call last):\n[rank3]:   File \"/u/train.py\", line 3, in main\n"
     "[rank3]:     x()\n[rank3]:   File \"/opt/lib/python3.12/site-packages/torch/nn/m.py\", line 9, in f\n"
     "[rank3]: RuntimeError: CUDA error: device-side assert triggered\n[rank3]: Compile with `TORCH_USE_CUDA_DSA`\n"
     "\n[rank3]:[W1121 08:00:00 ProcessGroupNCCL.cpp:1] Warning: destroy_process_group() was not called\n",
     "RuntimeError", "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`",
     "/u/train.py:3 in main"),
    ("Traceback (most recent call last):\n  File \"/u/t.py\", line 1, in <module>\n"
     "ValueError: Caught KeyError in DataLoader worker process 0.\n"
     "Original Traceback (most recent call last):\n  File \"/u/data.py\", line 7, in __getitem__\nKeyError: 5\n",
     "KeyError", "5", "/u/data.py:7 in __getitem__"),
    # Wrapped at the terminal's width, even within a function's name.
    ("Traceback (most recent call last):\n  File \"/opt/lib/python3.12/site-packages/hub/v.py\", line 1, in \n"
     "_inner_fn\n    return fn(*args)\n  File \"/u/t.py\", line 2, in \nload\n    raise Gone(\n"
     "hub.errors.GoneError: not in the\ncache\n", "hub.errors.GoneError", "not in the\ncache", None),
    ("terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  [PG ID 0] watchdog\n",
     "c10::DistBackendError", "[PG ID 0] watchdog", None),
    ("terminate called without an active exception\n", "std::terminate",
     "terminate called without an active exception", None),
    # Interrupted by another process's output; shortened by hand, with lines that are not indented.
    ("Traceback (most recent call last):\n  File \"/u/t.py\", line 3, in load\n[INFO] [engine.py:21:load] Loading\n"
     "    load_optimizer=True)\n  File \"/u/t.py\", line 9, in f\n    raise Bad(\nengine.Bad: 256 is not 2\n",
     "engine.Bad", "256 is not 2", "/u/t.py:9 in f"),
    ("Traceback (most recent call last):\n......\nFile \"/u/t.py\", line 482, in compile\n  put(x)\n"
     "File \"/u/t.py\", line 109, in put\n  os.replace(a, b)\nFileNotFoundError: gone\n",
     "FileNotFoundError", "gone", "/u/t.py:109 in put"),
    # Exception groups of Python 3.11, which 3.10 lacks.
    ("  + Exception Group Traceback (most recent call last):\n  |   File \"p.py\", line 5, in <module>\n"
     "  |     raise ExceptionGroup('many', [ValueError('a'), t])\n  | ExceptionGroup: many (2 sub-exceptions)\n"
     "  +-+---------------- 1 ----------------\n    | ValueError: a\n    +---------------- 2 ----------------\n"
     "    | Traceback (most recent call last):\n    |   File \"p.py\", line 3, in <module>\n    |     try: f()\n"
     "    | TypeError: b\n    +------------------------------------\n",
     "ExceptionGroup", "many (2 sub-exceptions)\nValueError: a\nTypeError: b", "p.py:3 in <module>"),
])
def test_exceptions_as_libraries_print_them(text: str, name: str, message: str, where: str | None) -> None:
    found = last_exception(text)
    assert found is not None
    assert (found.type, found.message, found.where) == (name, message, where)
