"""The run directory: where it can be written, and what is kept out of it."""

from dataclasses import replace
from pathlib import Path

import pytest

import config
import train
from config import STORAGE, UserError


def test_an_unwritable_run_directory_is_a_storage_error(cfg, tmp_path):
    (tmp_path / "file").write_text("x")
    for where in ("file", "file/below"):
        with pytest.raises(UserError) as error:
            train.main(replace(cfg, run=replace(cfg.run, dir=str(tmp_path / where))))
        assert error.value.code == STORAGE and "cannot write to" in str(error.value)


def test_secrets_stay_out_of_the_run_directory(cfg, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "canary-7f3a")
    cfg = replace(
        cfg,
        mesh=config.Mesh(1, 1, 1),
        train=replace(cfg.train, steps=2, eval_batches=1),
        optim=replace(cfg.optim, warmup_steps=1),
        log=config.Log(wandb="offline"),
    )
    train.main(cfg)
    files = [path for path in Path(cfg.run.dir, cfg.run.name).rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert b"canary-7f3a" not in path.read_bytes(), path
