"""README and docs tell the truth: all of their code is executed, or said not to be.

Each page has a folder of its own with a few small photos. Its blocks run there in
order: Python in one namespace, `keras-ccp` in this process. A configuration is loaded
as the command says, and then brought to small images and a small network. A command
that was run before, in whatever page, is checked again, and leaves what it left then.
"""

import contextlib
import importlib
import importlib.metadata
import inspect
import io
import json
import pkgutil
import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf
import typer
import yaml
from look_alikes import one_bit_png
from typer.testing import CliRunner

from keras_ccp.app import cli
from keras_ccp.app.config import load_config

# First, so that none keeps the `load_config` that `place` puts there.
for _name in ("compare", "doctor", "report", "run", "search", "tuning"):
    importlib.import_module(f"keras_ccp.app.{_name}")

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
# Page and beginning of a command: why it is checked but not run.
COMMANDS_NOT_RUN = {
    ("README.md", "python examples/train_emoji.py"): "in tests/test_examples.py",
    ("README.md", "pytest"): "these are the tests",
    ("concepts.md", "python examples/mnist_figure.py"): "in tests/test_examples.py",
    ("concepts.md", "tensorboard"): "a server; its event files are looked for",
}
# Page and beginning of a block: why its syntax and its commands are checked, no more.
BLOCKS_NOT_RUN = {
    ("distribution.md", "export TF_CONFIG="): "two machines; test_multi_worker.py",
    ("distribution.md", "#!/bin/bash"): "takes a cluster with Slurm",
    ("distribution.md", "apiVersion: v1"): "takes a cluster with Kubernetes",
}
# No package is installed: files and extras that `pip install` names are looked for.
# Page: what is replaced in its Python, and by what. There are no GPUs (two replicas are
# in tests/test_distribute.py) and no network (a look-alike lies in ROOT).
REPLACED = {
    "distribution.md": ("distribute.MirroredStrategy()", "distribute.get_strategy()"),
    "reproducing.md": ("download=True", "check_counts=False"),
}
FENCE = re.compile(
    r'^( *)```(\w*)(?: title="(.+?)")?\n(.*?)^\1```$', re.MULTILINE | re.DOTALL
)
BIRDS = "crow dove finch gull hawk heron kite robin swift wren".split()


# ==== Blocks and commands ====


class Block(NamedTuple):
    """A fenced block: its language, file name, first line (from 0) and content."""

    language: str
    title: str | None
    line: int
    code: str


def blocks_of(text):
    blocks = []
    for found in FENCE.finditer(text):
        code = textwrap.dedent(found[4]) if found[1] else found[4]
        line = text[: found.start(4)].count("\n")
        blocks.append(Block(found[2], found[3], line, code))
    return blocks


def commands_of(code):
    """The words of each command of a shell block."""
    lines = code.replace("\\\n", " ").replace("&&", "\n").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def is_in(table, page, text):
    return any(name == page.name and text.startswith(start) for name, start in table)


def extras():
    return set(importlib.metadata.metadata("keras-ccp").get_all("Provides-Extra"))


def wrong_words(words, extras):
    """What a command asks for and the project does not have."""
    file = re.compile(r"(examples|benchmarks|docs)/\S+|\S+\.(py|txt)")
    named = [word for word in words if file.fullmatch(word)]
    wrong = [f"no such file: {name}" for name in named if not (ROOT / name).is_file()]
    if words[:2] == ["pip", "install"]:
        named = re.findall(r"\[(.+?)\]", " ".join(words))
        missing = set(",".join(named).split(",")) - {""} - extras
        wrong += [f"no such extra: {extra}" for extra in sorted(missing)]
    elif words[:1] == ["python"] and words[1:2] and (ROOT / words[1]).is_file():
        script = (ROOT / words[1]).read_text("utf-8")
        options = [word.split("=")[0] for word in words if word.startswith("--")]
        wrong += [f"no such option: {o}" for o in options if f'"{o}"' not in script]
    return wrong


def check_own_command(words):
    """Parses `keras-ccp` and its options, and loads the configuration it names."""
    commands = typer.main.get_command(cli.app).commands
    name, *arguments = words[1:]
    assert name in commands, f"there is no keras-ccp {name}"
    given = commands[name].make_context(name, arguments).params
    if "config" in given:
        load_config(given["config"], given["overrides"] or ())
    return given


# ==== The folder of a page ====


# The same experiment on few small images, with a small network, at once over.
SMALL = """
    data.name=npz data.split=ablation data.train_classes=0.8 data.augmentation=none
    embedder.backbone=small_cnn embedder.weights=null embedder.frozen_statistics=false
    embedder.embedding_dim=4 callback.pool_size=4 callback.patience=1
    training.batch_size=4 training.samples_per_class=2 training.steps_per_evaluation=1
    training.max_evaluations=1 training.policy=float32
""".split()


@pytest.fixture(scope="module")
def birds(tmp_path_factory):
    """Ten classes of four photos, noise around the class's colour; also as arrays."""
    rng = np.random.default_rng(0)
    folder = tmp_path_factory.mktemp("birds")
    images = 20 * np.arange(10)[:, None, None, None, None]
    images = (images + rng.integers(0, 60, (10, 4, 16, 16, 3))).astype("uint8")
    for name, photos in zip(BIRDS, images, strict=True):
        for i, pixels in enumerate(photos, 1):
            path = str(folder / "photos" / name / f"{i}.jpg")
            tf.io.write_file(path, tf.io.encode_jpeg(pixels))
    labels = np.repeat(np.arange(10), 4)
    np.savez(folder / "birds.npz", images=np.concatenate(images), labels=labels)
    return folder


@pytest.fixture
def place(birds, tmp_path, monkeypatch):
    """The folder that a page's code runs in, and the home folder of its commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for name in ("photos", "PHOTOS", "data"):
        (tmp_path / name).symlink_to(birds / "photos")
    shutil.copy(birds / "photos" / "robin" / "1.jpg", "query.jpg")
    for number in range(1, 3):
        folder = tmp_path / "ROOT/images_background/Greek" / f"character{number:02d}"
        folder.mkdir(parents=True)
        for drawer in range(1, 3):
            data = one_bit_png(np.eye(105, k=number))
            (folder / f"{number:04d}_{drawer:02d}.png").write_bytes(data)

    def load_small(path, overrides=()):
        per_class = min(2, load_config(path, overrides).model.proxies_per_class)
        more = f"data.file={birds}/birds.npz", f"model.proxies_per_class={per_class}"
        return load_config(path, [*overrides, *SMALL, *more])

    monkeypatch.setattr("keras_ccp.app.config.load_config", load_small)
    return tmp_path


@pytest.fixture(scope="module")
def left():
    """What each command that was run has left, by its name and options."""
    return {}


class Page:
    """Runs the blocks of a page."""

    def __init__(self, path, left):
        self.path = path
        self.left = left
        self.namespace = {"__name__": "__main__"}

    def run(self, block):
        if block.title:
            Path(block.title).write_text(block.code, "utf-8")
        if block.language in ("bash", "yaml") and is_in(
            BLOCKS_NOT_RUN, self.path, block.code
        ):
            getattr(self, f"check_{block.language}")(block.code)
        elif block.language not in ("text", "csv"):
            getattr(self, f"run_{block.language}")(block)

    # ==== Checked ====

    def check_bash(self, script):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        own = re.findall(r"^ *(keras-ccp .*)", script.replace("\\\n", " "), re.M)
        assert own
        for command in own:
            check_own_command(shlex.split(command))

    def check_yaml(self, text):
        assert all(document["kind"] for document in yaml.safe_load_all(text))
        scripts = re.findall(r"- \|\n((?: {14,}.*\n)+)", text)
        assert scripts
        for script in scripts:
            self.check_bash(textwrap.dedent(script))

    # ==== Run ====

    def run_python(self, block):
        code = block.code
        if self.path.name in REPLACED:
            code = code.replace(*REPLACED[self.path.name])
        # Padded, so that a traceback shows the line of the page.
        padded = "\n" * block.line + code
        exec(compile(padded, self.path, "exec"), self.namespace)

    def run_yaml(self, block):
        path = Path(block.title or "partial.yaml")
        if not block.title:
            path.write_text(f"base: [emoji, ms_ccp]\n{block.code}", "utf-8")
        load_config(path)

    def run_bash(self, block):
        for words in commands_of(block.code):
            self.run_command(words)

    def run_command(self, words):
        assert wrong_words(words, extras()) == []
        if words[0] == "keras-ccp":
            self.run_own_command(words)
        elif words[0] == "tensorboard":
            folder = words[words.index("--logdir") + 1]
            assert list(Path(folder).rglob("events.out.tfevents.*"))
        elif words[:2] != ["pip", "install"]:
            text = " ".join(words)
            assert is_in(COMMANDS_NOT_RUN, self.path, text), f"say how to test {text}"

    def run_own_command(self, words):
        words = [re.sub("^~", str(Path.cwd()), word) for word in words]
        if "--trials" in words:
            words[words.index("--trials") + 1] = "1"
        given = check_own_command(words)
        run = given.get("run")
        if run and run.parts[0] == "runs" and not run.exists():
            # Pages may begin with a run.
            train = "keras-ccp train folder contrastive_ccp --data photos --out"
            self.run_own_command([*train.split(), str(run)])
        out = given.get("out") or given.get("html")
        key = words[1], given.get("k"), bool(out)
        if key in self.left and out and not out.exists():
            copy = shutil.copytree if self.left[key].is_dir() else shutil.copy
            copy(self.left[key], out)
        elif key not in self.left:
            result = CliRunner().invoke(cli.app, words[1:])
            assert result.exit_code == 0, f"{words}: {result.output}"
            self.left[key] = out and out.absolute()


# ==== Pages ====


@pytest.mark.filterwarnings("ignore:Your `PyDataset` class should call:UserWarning")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_code_runs(path, place, left):
    if path.name == "interop.md":
        # The packages are for some versions of Python only.
        pytest.importorskip("tensorflow_similarity")
        if importlib.util.find_spec("tensorflow_addons") is None:
            pytest.skip("tensorflow-addons is not installed")
    page = Page(path, left)
    for block in blocks_of(path.read_text("utf-8")):
        with contextlib.redirect_stdout(io.StringIO()):
            page.run(block)


def test_exceptions_are_of_use():
    blocks = {path.name: blocks_of(path.read_text("utf-8")) for path in PAGES}
    for table, before in ((BLOCKS_NOT_RUN, r"\A"), (COMMANDS_NOT_RUN, "(^|&& )")):
        for name, start in table:
            pattern = re.compile(before + re.escape(start), re.MULTILINE)
            assert sum(bool(pattern.search(b.code)) for b in blocks[name]) == 1, start
    for name, (old, _) in REPLACED.items():
        assert sum(old in block.code for block in blocks[name]) == 1, name


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_in_the_text_name_what_exists(path):
    text = FENCE.sub("", path.read_text("utf-8"))
    assert "```" not in text, "a fence that is not a block"
    own = typer.main.get_command(cli.app).commands
    for code in re.findall(r"`((?:pip|python|keras-ccp) [^`]+)`", text):
        words = code.replace('"', "").split()
        assert wrong_words(words, extras()) == []
        assert words[0] != "keras-ccp" or words[1] in own, code


# ==== Links, reference and notebook ====


def slug(heading):
    """Anchor of a heading, as GitHub and MkDocs make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", [*PAGES, *REFERENCE], ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    text = FENCE.sub("", path.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match("https?:", target):
            continue
        name, _, anchor = target.partition("#")
        other = path.parent / name if name else path
        assert other.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", other.read_text("utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), target


def nav_pages(entry):
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [page for child in children for page in nav_pages(child)]


def test_every_page_is_on_the_site_and_in_the_overview():
    nav = nav_pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    pages = [*PAGES[1:], *REFERENCE]
    assert sorted(nav) == sorted(str(path.relative_to(DOCS)) for path in pages)
    overview = (DOCS / "index.md").read_text("utf-8")
    for path in PAGES[1:]:
        assert path.name == "index.md" or f"]({path.name})" in overview, path.name


def documented_names():
    return {
        name
        for path in REFERENCE
        for name in re.findall(r"^::: (\S+)$", path.read_text("utf-8"), re.MULTILINE)
    }


def public_names():
    """`{where it is made: where it is imported from}`, as in every `__all__`."""
    found = {}
    for path in (ROOT / "keras_ccp").rglob("*.py"):
        if "__all__ = " in path.read_text("utf-8"):
            module = path.relative_to(ROOT).with_suffix("").as_posix()
            module = module.removesuffix("/__init__").replace("/", ".")
            for name in importlib.import_module(module).__all__:
                member = pkgutil.resolve_name(f"{module}.{name}")
                if not inspect.ismodule(member):
                    found[member] = f"{module}.{name}"
    return found


def test_reference_has_every_public_name():
    documented = {pkgutil.resolve_name(name) for name in documented_names()}
    assert documented
    missing = [name for made, name in public_names().items() if made not in documented]
    assert missing == []


def test_notebook(place):
    path = DOCS / "quick_start.ipynb"
    notebook = json.loads(path.read_text("utf-8"))
    assert path.stat().st_size < 300_000
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert all(cell["metadata"] == {} for cell in notebook["cells"])
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output["output_type"] != "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    # In one namespace: they are plain Python and need no kernel.
    namespace = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        for number, cell in enumerate(cells):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    assert namespace["trained"]["map_at_r"] > namespace["untrained"]["map_at_r"]


# ==== The checks themselves ====


def test_blocks_are_found_with_their_line():
    text = (
        "a\n```python\nx = 1\n\ny = 2\n```\n\n```bash\nls\n```\n```\nplain\n```\n"
        '- b\n\n  ```csv title="t.csv"\n  p,l\n    1,2\n  ```\n'
    )
    assert blocks_of(text) == [
        Block("python", None, 2, "x = 1\n\ny = 2\n"),
        Block("bash", None, 8, "ls\n"),
        Block("", None, 11, "plain\n"),
        Block("csv", "t.csv", 16, "p,l\n  1,2\n"),
    ]


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("python examples/nothing.py", "file: examples/nothing.py"),
        ('pip install -e ".[test,gone]"', "extra: gone"),
        ("pip install -r missing.txt", "file: missing.txt"),
        ("python setup.py --no-such", "option: --no-such"),
        ('pip install -r requirements.txt -e ".[test]"', None),
    ],
)
def test_wrong_command_is_caught(code, complaint):
    expected = [f"no such {complaint}"] if complaint else []
    assert wrong_words(shlex.split(code), {"test"}) == expected


def test_failing_command_and_code_are_caught(place):
    page = Page(ROOT / "README.md", {})
    for code, message in (
        ("keras-ccp evaluate nothing", "There is no run"),
        ("keras-ccp trian emoji ms --out runs/a", "no keras-ccp trian"),
        ("keras-ccp train emoji ms --to runs/a", "No such option"),
        ("keras-ccp train emoji ms --out a --set data.sise=3", "size"),
        ("sudo reboot", "say how to test"),
    ):
        with pytest.raises(Exception, match=message):
            page.run(Block("bash", None, 1, code))
    with pytest.raises(NameError):
        page.run(Block("python", None, 1, "undefined"))
