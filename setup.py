"""How the package is built and what it needs; tools are configured in ``pyproject.toml``."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"

CPU = ["paddlepaddle>=3.3,<3.4"]
CLI = ["rich>=13"]
PLOT = ["matplotlib>=3.8"]

setup(
    name="paddle_fsdp_ckpt",
    version=runpy.run_path(str(HERE / "paddle_fsdp_ckpt" / "version.py"))["__version__"],
    description="Save, resume, reshard and export PaddlePaddle FullyShard training: exactly, at any number of cards, and safely",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="paddle_fsdp_ckpt authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    keywords="paddlepaddle fsdp fully_shard checkpoint reshard safetensors",
    packages=find_packages(include=["paddle_fsdp_ckpt", "paddle_fsdp_ckpt.*"]),
    package_data={"paddle_fsdp_ckpt": ["py.typed"]},
    zip_safe=False,
    python_requires=">=3.10,<3.13",
    entry_points={"console_scripts": ["paddle-fsdp-ckpt = paddle_fsdp_ckpt.cli.main:main"]},
    install_requires=["numpy>=1.24", "safetensors>=0.7", "xxhash>=3.1"],
    extras_require={
        "cli": CLI,
        "cpu": CPU,
        "dev": [*CPU, *CLI, *PLOT, "hypothesis>=6.100", "mypy>=2.4,<3", "pytest>=8.3", "pytest-xdist>=3.6", "ruff>=0.17,<0.18"],
        "plot": PLOT,
        # Later ones of these want another numpy and other tokenizers than PaddleFormers does; pip would try them all.
        "real-models": [
            *CPU,
            "datasets==4.0.0",
            "numpy<1.27",
            "pandas<3.1",
            "paddleformers==0.4.1",
            "peft>=0.17",
            "pyarrow<21",
            "pytest>=8.3",
            "torch==2.13.0",
            "transformers==4.55.4",
        ],
    },
)
