"""Checkpoints that adapters are made for: each written once a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Multi-query, tied."""
    folder = tmp_path_factory.mktemp("lora") / "base"
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def multi_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every query head with a key head of its own, rows laid out per head, an output matrix of its own."""
    folder = tmp_path_factory.mktemp("lora") / "multi-head"
    make_checkpoint(folder, multi_query=False, tied=False, seed=1)
    return folder
