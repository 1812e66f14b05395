"""timm's training, of the parts that its train.py is made of (`--torchcompile fused_norm`)."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from adopters import EAGER, assert_same_parameters, register

pytestmark = pytest.mark.filterwarnings("ignore")


def test_training(sites: list[Any]) -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed: uv sync --group models")
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import ModelEmaV3

    torch.use_deterministic_algorithms(False)
    register()
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    own = timm.create_model("vit_tiny_patch16_224", num_classes=10, **sizes)
    ours = copy.deepcopy(own)
    x, y = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
    averages = []
    for model, is_ours in ((own, False), (ours, True)):
        # As train.py does: the optimizer and the average are of the model itself.
        optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, weight_decay=0.01)
        average = ModelEmaV3(model, decay=0.5)
        scheduler, _ = create_scheduler_v2(optimizer, num_epochs=4)
        mixup = Mixup(num_classes=10, mixup_alpha=0.2, label_smoothing=0.1)
        task = torch.compile(model, backend="fused_norm", options=EAGER) if is_ours else model
        np.random.seed(0)
        for epoch in range(3):
            inputs, targets = mixup(x.clone(), y)
            loss = SoftTargetCrossEntropy()(task(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average.update(model, step=epoch)
            scheduler.step(epoch + 1)
        averages.append(average)
    assert_same_parameters(ours, own)
    assert_same_parameters(averages[1], averages[0])
    assert len(sites) == 5
    assert all(site.fused for site in sites)
