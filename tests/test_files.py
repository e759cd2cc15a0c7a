"""Files and folders that are whole or not there, whenever the process is killed."""

import os
import subprocess
import sys

import pytest

from keras_ccp.files import replaced_folder

# Kills a copy of the process at each rename in turn, before and after it. One new
# process for all: importing takes seconds, and one with threads should not be copied.
KILLER = """
import os, pathlib, signal, sys
from keras_ccp.files import replaced_folder
replace = pathlib.Path.replace
def killed_at(number, work):
    child = os.fork()
    if not child:
        count = [0]
        def dying(path, target):
            for when in (0, 1):
                if count[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                count[0] += 1
                when or replace(path, target)
        pathlib.Path.replace = dying
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


def kill(code, folder):
    """What a program prints that kills its copies."""
    return subprocess.run(
        [sys.executable, "-c", KILLER + code],
        capture_output=True,
        check=True,
        cwd=folder,
        text=True,
    ).stdout.splitlines()


def write(path, text):
    with replaced_folder(path) as folder:
        (folder / "file").write_text(text)


def test_folder_that_is_replaced_survives_kills(tmp_path):
    code = """
def write(text):
    with replaced_folder(pathlib.Path("model")) as folder:
        (folder / "file").write_text(text)
number = 0
write("old")
while killed_at(number, lambda: write("new")):
    print(number, sorted(os.listdir()))
    # The next one, that fails: the old or the new folder is there, and nothing else.
    try:
        with replaced_folder(pathlib.Path("model")):
            raise KeyError
    except KeyError:
        print(os.listdir(), pathlib.Path("model/file").read_text())
    write("old")
    number += 1
"""
    printed = kill(code, tmp_path)
    states = printed[1::2]
    # Before and after the renames of the old and of the new one.
    assert states == [f"['model'] {text}" for text in ("old", "old", "old", "new")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_folder_is_written_by_one_at_a_time(tmp_path):
    write(tmp_path / "model", "first")
    with pytest.raises(BlockingIOError, match="Another process works"):
        with replaced_folder(tmp_path / "model"):
            write(tmp_path / "model", "second")
    assert os.listdir(tmp_path) == ["model"]
    assert (tmp_path / "model" / "file").read_text() == "first"


def test_index_that_is_replaced_survives_kills(tmp_path):
    code = """
import numpy as np
from keras_ccp.index import KeptEmbedder, RetrievalIndex
def write(count):
    index = RetrievalIndex.build(np.eye(count), fingerprint=str(count))
    pathlib.Path("index").mkdir(exist_ok=True)
    partial = pathlib.Path("index/partial_embedder.keras")
    partial.write_text(f"embedder of {count}")
    index.embedder = KeptEmbedder(partial, 8, 9)
    index.save("index")
number = 0
write(3)
while killed_at(number, lambda: write(4)):
    index = RetrievalIndex.load("index")
    print(len(index), index.fingerprint, index.embedder.file.read_text())
    write(3)
    print(len(os.listdir("index")))
    number += 1
"""
    printed = kill(code, tmp_path)
    old, new = "3 3 embedder of 3", "4 4 embedder of 4"
    # Rows, embedder and index.json, whose rename decides.
    assert printed[::2] == [old] * 5 + [new]
    assert printed[1::2] == ["3"] * 6
