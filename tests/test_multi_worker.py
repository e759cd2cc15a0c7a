"""Several processes and several devices train what one process trains on one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import keras
import numpy as np
import pytest
import yaml

from keras_ccp import datasets
from keras_ccp.app.config import check_config
from keras_ccp.app.run import train_run
from keras_ccp.backup import Backup

NUM_EPOCHS = 6
COMMAND = [sys.executable, "-c", "from keras_ccp.app.cli import main; main()", "train"]


def config(**distribution):
    """Emoji of 8 x 8 pixels; batch norm learns its statistics, problems follow."""
    return {
        "method": "MS-CCP",
        "data": {
            "name": "npz",
            "file": "emoji.npz",
            "split": "ablation",
            "train_classes": 24,
            "augmentation": "small",
        },
        "embedder": {
            "backbone": "small_cnn",
            "embedding_dim": 8,
            "frozen_statistics": False,
        },
        "loss": {"name": "multi_similarity"},
        # Without the decay Adam would hide a gradient of the wrong size.
        "model": {"proxies_per_class": 2, "weight_decay": 0.1},
        "callback": {"patience": 1, "pool_size": 3},
        "training": {
            "batch_size": 16,
            "samples_per_class": 2,
            "learning_rate": 2e-5,
            "steps_per_evaluation": 2,
            "max_evaluations": NUM_EPOCHS,
        },
        "distribution": distribution,
        "seed": 2,  # two projections, by the validation classes' ups and downs
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Folder with the first 32 classes of the emoji."""
    root = tmp_path_factory.mktemp("root")
    emoji = datasets.emoji().select_classes(range(32))
    np.savez(root / "emoji.npz", images=emoji.images[:, ::4, ::4], labels=emoji.labels)
    for name in ("none", "multi_worker"):
        (root / f"{name}.yaml").write_text(yaml.dump(config(strategy=name)))
    return root


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory):
    """Run of one process on one device."""
    out = tmp_path_factory.mktemp("run")
    train_run(check_config(config()), root, out, verbose=0)
    return Run(out)


class Run:
    """What a run has left behind."""

    def __init__(self, out):
        self.out = out
        self.fold = out / "repeat0" / "fold0"
        self.metrics = json.loads((out / "metrics.json").read_text())
        embedder = keras.models.load_model(self.fold / "embedder.keras")
        self.weights = embedder.get_weights()
        self.log = np.genfromtxt(self.fold / "log.csv", delimiter=",", names=True)


def assert_same(run, whole):
    for weight, other in zip(run.weights, whole.weights, strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=1e-5)
    assert run.log["projection"].max() >= 2  # otherwise none was tested
    np.testing.assert_array_equal(run.log["epoch"], np.arange(NUM_EPOCHS))
    for name in whole.log.dtype.names:
        np.testing.assert_allclose(run.log[name], whole.log[name], rtol=1e-4, atol=1e-6)
    for score, other in zip(
        run.metrics["models"], whole.metrics["models"], strict=True
    ):
        assert score == pytest.approx(other, abs=1e-5)


# ==== Two workers ====


def start_workers(root, out, temporary):
    """Two processes that know each other by TF_CONFIG."""
    sockets = [socket.socket() for _ in range(2)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    arguments = [root / "multi_worker.yaml", "--data", root, "--out", out, "--resume"]
    workers = []
    for index in range(2):
        (temporary / f"tmp{index}").mkdir(parents=True)
        cluster = {"worker": addresses}
        task = {"type": "worker", "index": index}
        environment = {
            **os.environ,
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
            "TMPDIR": str(temporary / f"tmp{index}"),
        }
        with open(temporary / f"output{index}.txt", "w") as output:
            workers.append(
                subprocess.Popen(
                    [*COMMAND, *map(str, arguments)],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return workers


def wait_for(condition, workers, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the workers hang"
        assert all(worker.poll() is None for worker in workers), "a worker has ended"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def killed(root, tmp_path_factory):
    """A run whose second worker is killed after two epochs, and comes back."""
    out, temporary = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("workers")
    backup = out / "repeat0" / "fold0" / "backup"
    started = []
    try:
        chief, other = start_workers(root, out, temporary / "first")
        started += [chief, other]
        second = backup / "checkpoint-00000002.npz"
        wait_for(second.exists, started)
        other.send_signal(signal.SIGKILL)
        outcome = {"out": out, "temporary": temporary, "pids": [chief.pid]}
        # By the broken connection, or missing heartbeats after about ten seconds.
        outcome["chief ends with"] = chief.wait(300)
        outcome["num_epochs"] = Backup(backup).num_epochs
        again = start_workers(root, out, temporary / "second")
        started += again
        outcome["pids"].append(again[0].pid)
        outcome["both end with"] = [worker.wait(300) for worker in again]
    finally:
        for worker in started:
            worker.kill()
            worker.wait()
    return outcome


def test_death_of_a_worker_ends_the_others(killed):
    text = (killed["temporary"] / "first" / "output0.txt").read_text()
    assert killed["chief ends with"] == 1, text
    assert "Error: Another worker has ended" in text and "--resume" in text
    assert 2 <= killed["num_epochs"] < NUM_EPOCHS


def test_workers_that_come_back_end_like_one_process(killed, whole):
    output = killed["temporary"] / "second" / "output1.txt"
    assert killed["both end with"] == [0, 0], output.read_text()
    assert_same(Run(killed["out"]), whole)


def test_only_the_chief_writes(killed, root):
    out = killed["out"]
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    events = [name for name in files if "tfevents" in name]
    writers = {int(name.split(".")[-3]) for name in events}
    assert writers == set(killed["pids"])
    fold = "repeat0/fold0/"
    assert {name for name in files - set(events) if "embedder/" not in name} == {
        ".lock",
        "config.yaml",
        "data.json",
        "metrics.csv",
        "metrics.json",
        "run.json",
        "untrained.keras",
        f"{fold}backup/checkpoint-{NUM_EPOCHS - 1:08d}.npz",
        f"{fold}backup/checkpoint-{NUM_EPOCHS:08d}.npz",
        f"{fold}embedder.keras",
        f"{fold}fold.json",
        f"{fold}log.csv",
        f"{fold}projections.jsonl",
        f"{fold}tensorboard/ccp/embeddings.tsv",
        f"{fold}tensorboard/ccp/metadata.tsv",
        f"{fold}tensorboard/ccp/projector_config.pbtxt",
        f"{fold}tensorboard/ccp/sprite.png",
    }
    # What the other one had to write is gone.
    assert list((killed["temporary"] / "second" / "tmp1").iterdir()) == []


# ==== Two devices ====


def test_two_devices_train_what_one_trains(root, whole, tmp_path):
    out = tmp_path / "run"
    # A new process, with as many devices as it makes.
    arguments = [root / "none.yaml", "--data", root, "--out", out, "--devices", 2]
    command = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    resolved = yaml.safe_load((out / "config.yaml").read_text())
    assert resolved["distribution"] == {"strategy": "mirrored", "devices": 2}
    assert_same(Run(out), whole)


def test_finished_run_goes_on_and_is_scored_on_other_devices(root, whole):
    two = check_config(config(strategy="mirrored", devices=2))
    metrics = train_run(two, root, whole.out, resume=True)
    assert metrics["models"] == [pytest.approx(whole.metrics["models"][0])]
