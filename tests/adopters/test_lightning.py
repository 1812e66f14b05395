"""Lightning's Trainer, around a model that is compiled in place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adopters import EAGER, assert_same_parameters, llama, register
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore")


def test_trainer(tmp_path: Path, sites: list[Any]) -> None:
    lightning = pytest.importorskip("lightning", reason="uv sync --group adopters")
    pytest.importorskip("transformers", reason="transformers is not installed: uv sync")

    class Trained(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            (ids,) = batch
            return self.model(input_ids=ids, labels=ids, use_cache=False).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.use_deterministic_algorithms(False)
    register()
    own = llama()
    ours = copy.deepcopy(own)
    ours.compile(backend="fused_norm", options=EAGER)
    ids = torch.randint(3, 97, (8, 9))
    for model in (own, ours):
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=4)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        lightning.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=tmp_path, **quiet).fit(
            Trained(model), data
        )
    assert_same_parameters(ours, own)
    assert len(sites) == 3
    assert all(site.fused for site in sites)
