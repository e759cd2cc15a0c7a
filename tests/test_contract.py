"""Rules over the whole package, and for each rule code that breaks it.

A rule is a function `(module name, source) -> list of complaints`.
"""

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import pkgutil
import re
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import keras_ccp
from keras_ccp import losses

ROOT = Path(__file__).parent.parent
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text("utf-8")
    for path in sorted((ROOT / "keras_ccp").rglob("*.py"))
}
# From the top down: a module imports only from rows below its own.
LAYERS = [
    {"__main__"},
    {"app"},
    {"serving", "index", "monitor", "backup"},
    {"callback"},
    {"model"},
    {"losses", "retrieval", "pipeline", "datasets"},
    {"layers", "k_center", "backbones", "distribute", "images"},
    {"checks", "files"},
]
# Neighbours of one floor that build on each other.
MAY_IMPORT = {
    ("pipeline", "datasets"),
    ("losses", "retrieval"),
    ("serving", "index"),
    ("backbones", "layers"),
}
ROWS = {part: row for row, parts in enumerate(LAYERS) for part in parts}
# Keras calls these with its own arguments and documents them; the names that
# describe the rest of the public interface are documented here.
KERAS_PROTOCOL = re.compile(
    "on_.+|call|build|compute_(output_shape|output_spec|mask|loss|metrics)"
    "|(train|test|predict)_step|make_(train|test|predict)_function"
    "|get(_build|_compile)?_config|(build_|compile_)?from_config"
    "|(save|load)_(own_variables|assets)|set_(model|params)"
)
MACHINE_PATH = re.compile(r"(?<![\w.])/(root|home|Users|work|tmp|mnt)/|[A-Z]:\\Users")


# ==== Import layers ====


def imported_modules(name, source):
    """`(line, "keras_ccp...")` of what a module takes from this package."""
    package = name.removesuffix(".__init__").split(".")
    if not name.endswith(".__init__"):
        package.pop()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join(base + ([node.module] if node.module else []))
            targets = [base]
            if base == "keras_ccp":  # from keras_ccp import losses
                targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            if target.split(".")[0] == "keras_ccp":
                yield node.lineno, target


def layer_rule(name, source):
    if name == "keras_ccp.__init__":
        return []
    own = name.split(".")[1]
    if own not in ROWS:
        return [f"{own} is not in the table of layers: LAYERS here and CONTRIBUTING.md"]
    complaints = []
    for line, target in imported_modules(name, source):
        other = (target.split(".") + [""])[1]
        if other == own:
            continue
        if other not in ROWS:
            complaints.append(f"line {line}: {target} is not a module of the table")
        elif ROWS[other] <= ROWS[own] and (own, other) not in MAY_IMPORT:
            complaints.append(f"line {line}: {own} must not import {other}")
    return complaints


# ==== Docstrings and annotations ====


def is_decorated(node, *names):
    decorators = [
        ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list
    ]
    return any(d.split(".")[-1] in names for d in decorators)


def signature(function, is_method):
    """`[(name as documented, is annotated)]` without self and cls."""
    args = function.args
    names = [(arg.arg, bool(arg.annotation)) for arg in args.posonlyargs + args.args]
    if is_method and not is_decorated(function, "staticmethod"):
        names = names[1:]
    if args.vararg:
        names.append((f"*{args.vararg.arg}", True))
    names += [(arg.arg, bool(arg.annotation)) for arg in args.kwonlyargs]
    if args.kwarg:
        names.append((f"**{args.kwarg.arg}", True))
    return names


def fields(node):
    """The arguments of the constructor that a dataclass or NamedTuple gets."""
    return [
        (statement.target.id, True)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and "ClassVar" not in ast.unparse(statement.annotation)
        and "init=False" not in ast.unparse(statement)
    ]


def public_signatures(source):
    """`(label, docstring, signature, base classes)` of everything public."""
    for node in ast.parse(source).body:
        if getattr(node, "name", "_").startswith("_"):
            continue
        doc = ast.get_docstring(node)
        if isinstance(node, ast.FunctionDef):
            yield node.name, doc, signature(node, is_method=False), []
        elif isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).split(".")[-1] for base in node.bases]
            if is_decorated(node, "dataclass") or "NamedTuple" in bases:
                yield node.name, doc, fields(node), []
            for method in node.body:
                if not isinstance(method, ast.FunctionDef):
                    continue
                label = f"{node.name}.{method.name}"
                arguments = signature(method, is_method=True)
                if method.name == "__init__":
                    yield node.name, doc, arguments, []
                elif method.name[0] != "_" and not is_decorated(method, "setter"):
                    yield label, ast.get_docstring(method), arguments, bases


def documented_args(docstring):
    """Names in the `Args:` section in order, or None without such a section."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n|\n)*)", f"{docstring}\n", re.M)
    if section is None:
        return None
    lines = [line for line in section[1].splitlines() if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    entries = [line.strip() for line in lines if not line[indent:].startswith(" ")]
    names = [entry.split(":")[0].split(" (")[0] for entry in entries]
    return [name.strip("` ") for group in names for name in group.split(",")]


def is_keras_protocol(label):
    return bool(KERAS_PROTOCOL.fullmatch(label.partition(".")[2]))


def exported_names():
    """What an `__all__` or the reference names, as `module.name` where it is made."""
    pages = (ROOT / "docs" / "reference").glob("*.md")
    pages = "".join(page.read_text("utf-8") for page in pages)
    names = set(re.findall(r"^::: (\S+)$", pages, re.M))
    for module, source in MODULES.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__":
                package = module.removesuffix(".__init__")
                names |= {f"{package}.{own}" for own in ast.literal_eval(node.value)}
    for full_name in names:
        member = pkgutil.resolve_name(full_name)
        if not inspect.ismodule(member):
            yield f"{member.__module__}.{member.__name__}"


def docstring_rule(name, source):
    complaints = []
    for label, doc, arguments, _ in public_signatures(source):
        expected = [argument for argument, _ in arguments]
        documented = documented_args(doc or "")
        is_needed = bool(expected) and f"{name}.{label}" in EXPORTED - NOT_CALLED
        # A section that is there must be right.
        if documented != expected and (is_needed or documented is not None):
            complaints.append(f"{label}: Args {documented}, signature {expected}")
    return complaints


def annotation_rule(name, source):
    return [
        f"{label}: `{argument}` has no type"
        for label, _, arguments, _ in public_signatures(source)
        for argument, is_annotated in arguments
        if f"{name}.{label.split('.')[0]}" in EXPORTED
        and not (is_annotated or is_keras_protocol(label))
    ]


EXPORTED = set(exported_names())
# Made by `build` and `load`.
NOT_CALLED = {"keras_ccp.index.retrieval_index.RetrievalIndex"}


# ==== Plain text ====


def tidy_rule(name, source):
    complaints = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            complaints.append(f"line {node.lineno}: assert")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            complaints.append(f"line {node.lineno}: print")
    return complaints + path_rule(name, source)


def path_rule(name, source):
    return [
        f"line {number}: machine path {line.strip()!r}"
        for number, line in enumerate(source.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]


# ==== Private names of other libraries ====

# Module and name: why there is no public way.
PRIVATE = {
    ("backbones.torch_weights", "_Unpickler"): "that in C takes memory as it is told",
    ("losses.other_libraries", "_fn_kwargs"): "where tensorflow-similarity keeps them",
    ("model", "_maybe_symbolic_build"): "see CCPModel",
}


def is_private(name):
    return re.fullmatch("_[a-zA-Z]\\w*", name) and name not in ("_asdict", "_replace")


def own_names():
    """Names that this package itself gives to anything."""
    for source in MODULES.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(getattr(node, "ctx", None), ast.Store):
                yield ast.unparse(node).split(".")[-1]


OWN_NAMES = set(own_names())


def private_rule(name, source):
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and is_private(node.attr)
        if node.attr not in OWN_NAMES
        and (name.removeprefix("keras_ccp."), node.attr) not in PRIVATE
    ]


def test_no_class_replaces_a_private_name_of_keras():
    kinds = keras.layers.Layer, keras.losses.Loss, keras.callbacks.Callback
    replaced = {
        (module.removeprefix("keras_ccp."), name)
        for module in MODULES
        if not module.endswith("__init__")
        for cls in vars(importlib.import_module(module)).values()
        if isinstance(cls, type) and cls.__module__ == module and issubclass(cls, kinds)
        for name in filter(is_private, vars(cls))
        if any(name in vars(base) for base in cls.__mro__[1:] if "src" in repr(base))
    }
    assert replaced == {("model", "_maybe_symbolic_build")}
    # Where Keras renames it, what replaces it would do nothing.
    assert callable(keras.Model._maybe_symbolic_build)


RULES = [layer_rule, docstring_rule, annotation_rule, tidy_rule, private_rule]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODULES)
def test_module(name, rule):
    assert rule(name, MODULES[name]) == []


def test_no_machine_paths_outside_the_package():
    folders = ("tests", "examples", "benchmarks", "docs", "configs", ".ci")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    files += ROOT.glob("*")
    kinds = {".py", ".toml", ".txt", ".md", ".yaml", ".yml", ""}
    for path in files:
        is_hidden = any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        if is_hidden and ".ci" not in path.parts:
            continue  # caches that tools write beside the files
        if path.is_file() and path.suffix in kinds:
            text = path.read_text("utf-8", errors="replace")
            assert path_rule(path, text) == [], path


# ==== Each rule catches what it is for ====

DOCUMENTED = '''
def f(a, *rest, b=1, **kwargs):
    """F.

    Args:
        a: `(n,)` array: long
            description: with a colon.

        *rest: more.
        b: int.
        **kwargs: passed on.

    Returns:
        b: not an argument.
    """
    def g(x): pass
'''


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (layer_rule, "losses.x", "from keras_ccp.model import CCPModel"),
        (layer_rule, "losses.x", "from ..model import CCPModel"),
        (layer_rule, "losses.__init__", "from ..callback import CCPCallback"),
        (layer_rule, "layers", "from . import callback"),
        (layer_rule, "checks", "def f():\n    import keras_ccp.layers"),
        (layer_rule, "model", "from keras_ccp import CCPCallback"),
        (layer_rule, "model", "import keras_ccp"),
        (layer_rule, "utils", ""),
        (docstring_rule, "retrieval.metrics", "def evaluate(a): pass"),
        (docstring_rule, "model", DOCUMENTED.replace("def f(a,", "def f(a, c,")),
        (docstring_rule, "model", DOCUMENTED.replace("f(a, *rest, b", "f(b, *rest, a")),
        (docstring_rule, "model", DOCUMENTED.replace("        *rest: more.\n", "")),
        (docstring_rule, "model", DOCUMENTED.replace("**kwargs:", "kwargs:")),
        (docstring_rule, "model", "class CCPModel:\n  def __init__(self, a): pass"),
        (docstring_rule, "model", "class C:\n  def call(self, a): 'Args:\\n  b: x'"),
        (
            docstring_rule,
            "app.search",
            "class Neighbour(NamedTuple):\n  'C.'\n  a: int",
        ),
        (annotation_rule, "retrieval.metrics", "def evaluate(a: int, *, b=1): pass"),
        (annotation_rule, "model", "class CCPModel:\n  def __init__(self, a): pass"),
        (
            annotation_rule,
            "model",
            "class CCPModel:\n  @staticmethod\n  def f(a): pass",
        ),
        (tidy_rule, "model", "print(1)"),
        (tidy_rule, "model", "assert 1"),
        (tidy_rule, "model", "path = '/" + "root/data'"),
        (private_rule, "model", "for layer in self._flatten_layers(): pass"),
        (private_rule, "callback", "self.model._initial_epoch"),
    ],
)
def test_rule_catches(rule, name, source):
    assert rule(f"keras_ccp.{name}", source)


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (layer_rule, "__init__", "from keras_ccp.model import CCPModel"),
        (layer_rule, "pipeline", "from .datasets import Dataset\nimport keras"),
        (layer_rule, "losses.x", "from .pair_loss import P\nfrom .. import layers"),
        (layer_rule, "losses.__init__", "from keras_ccp.losses.x import X"),
        (docstring_rule, "model", DOCUMENTED),
        (
            docstring_rule,
            "model",
            "def f(a): pass\ndef evaluate(a): pass\nclass _C: pass",
        ),
        (docstring_rule, "model", "class C:\n  def on_epoch_end(self, epoch): pass"),
        (annotation_rule, "model", "class C:\n  def f(self, a: int, **kw): pass"),
        (annotation_rule, "model", "class C:\n  def call(self, inputs): pass"),
        (tidy_rule, "model", "# print(x), https://a.org/tmp/b"),
        (private_rule, "model", "self._steps, row._asdict(), self.__class__"),
    ],
)
def test_rule_allows(rule, name, source):
    assert rule(f"keras_ccp.{name}", source) == []


# ==== Version ====


def test_version_is_the_same_everywhere():
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest = re.search(r"^## \[(.+?)\]", changelog, re.MULTILINE)[1]
    assert keras_ccp.__version__ == newest
    # The installed one: after a release, `pip install -e .` again.
    assert keras_ccp.__version__ == importlib.metadata.version("keras-ccp")


# ==== Keras objects survive their config ====


def small_embedder():
    images = keras.Input((4, 4, 1))
    return keras.Model(images, keras.layers.Dense(3)(keras.layers.Flatten()(images)))


@keras.saving.register_keras_serializable("tests")
def function_of_pairs(labels, embeddings, reference_labels, references, exclude_self):
    return tf.reduce_sum(embeddings, axis=1)


def similarity_loss():
    library = pytest.importorskip("tensorflow_similarity")
    return library.losses.TripletLoss(reduction="sum_over_batch_size", margin=0.2)


def addons_loss():
    if importlib.util.find_spec("tensorflow_addons") is None:  # it cannot be imported
        pytest.skip("tensorflow-addons is not installed: extra interop")
    return {"function": "triplet_hard", "margin": 0.2}


# Arguments that differ from the defaults, so that none is lost unseen.
ARGUMENTS = {
    "AddonsLoss": addons_loss,
    "FrozenBatchNormalization": lambda: {"momentum": 0.8},
    "SimilarityLoss": lambda: {"loss": similarity_loss()},
    "CCPModel": lambda: {
        "embedder": small_embedder(),
        "num_classes": 5,
        "proxies_per_class": 2,
        "proximal_weight": 1e-3,
        "in_batch_weight": 0.5,
        "normalization": "l2",
        "references": "samples",
        "proxy_learning_rate_multiplier": 10.0,
        "weight_decay": 0.1,
    },
    "LipschitzNormalization": dict,
    "PairLoss": dict,
    "ArcFaceLoss": lambda: {"margin": 0.3, "scale": 30.0},
    "CircleLoss": lambda: {"margin": 0.3, "gamma": 30.0, "similarity": "dot"},
    "CosFaceLoss": lambda: {"margin": 0.3, "scale": 30.0},
    "LiftedStructureLoss": lambda: {"positive_margin": 0.1, "negative_margin": 0.9},
    "MarginLoss": lambda: {"margin": 0.3, "beta": 1.1},
    "NPairsLoss": lambda: {"similarity": "dot"},
    "NTXentLoss": lambda: {"temperature": 0.2, "similarity": "dot"},
    "SubCenterArcFaceLoss": lambda: {"margin": 0.3, "scale": 30.0},
    "SupConLoss": lambda: {"temperature": 0.2, "similarity": "dot"},
    "ContrastiveLoss": lambda: {
        "positive_margin": 0.1,
        "negative_margin": 0.6,
        "mining": "hard",
    },
    "CosineContrastiveLoss": lambda: {
        "margin": 0.4,
        "similarity": "dot",
        "mining": "hard",
    },
    "CrossBatchMemory": lambda: {
        "loss": losses.ContrastiveLoss(),
        "size": 7,
        "start_step": 3,
    },
    "EmbeddingMemory": lambda: {"size": 7, "embedding_dim": 3},
    "FunctionLoss": lambda: {"function": function_of_pairs},
    "MultiSimilarityLoss": lambda: {
        "alpha": 3.0,
        "beta": 30.0,
        "base": 0.4,
        "similarity": "dot",
        "mining": "semi_hard",
    },
    "ProxyAnchorLoss": lambda: {"margin": 0.2, "alpha": 30.0, "similarity": "dot"},
    "ProxyNCALoss": lambda: {"temperature": 0.2, "similarity": "dot"},
    "SoftTripleLoss": lambda: {
        "scale": 10.0,
        "gamma": 0.2,
        "tau": 0.3,
        "margin": 0.02,
        "similarity": "dot",
    },
    "TripletLoss": lambda: {"margin": 0.2, "mining": "easy_positive"},
}


def public_keras_classes():
    classes = {}
    for module in pkgutil.walk_packages(keras_ccp.__path__, "keras_ccp."):
        for name, member in vars(importlib.import_module(module.name)).items():
            if (
                isinstance(member, type)
                and issubclass(member, (keras.layers.Layer, keras.losses.Loss))
                and member.__module__ == module.name
                and not name.startswith("_")
            ):
                classes[name] = member
    return classes


def test_every_public_keras_class_has_arguments():
    assert set(public_keras_classes()) == set(ARGUMENTS)


def check_config(cls, arguments):
    assert keras.saving.get_registered_name(cls) == f"keras_ccp>{cls.__name__}"
    original = cls(**arguments)
    config = original.get_config()
    for argument, parameter in inspect.signature(cls).parameters.items():
        # The formula of a loss is what its class stands for.
        if argument != "formula" and parameter.kind is not parameter.VAR_KEYWORD:
            assert argument in config, f"get_config leaves out `{argument}`"
    for argument, value in arguments.items():
        if isinstance(value, (int, float, str)):
            assert config[argument] == value
    assert cls.from_config(original.get_config()).get_config() == config

    written = json.dumps(keras.saving.serialize_keras_object(original))
    read = keras.saving.deserialize_keras_object(json.loads(written))
    assert type(read) is cls
    assert json.dumps(keras.saving.serialize_keras_object(read)) == written


@pytest.mark.parametrize("name", ARGUMENTS)
def test_keras_object_survives_its_config(name):
    check_config(public_keras_classes()[name], ARGUMENTS[name]())
